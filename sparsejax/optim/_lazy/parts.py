"""What a gradient transformation is made of, and what its parts are called.

optax builds transformations by closing over others: `chain` holds tuples of functions,
`masked` its inner transformation, `partition` a dict of them; `MultiSteps` is an
object. Nothing of that is an interface, so what is read here serves messages, and the
rule for chains in `_separable`; a part that is not found makes those less precise.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.core import Tracer

from sparsejax import _arguments


# Wrappers that do nothing to rows themselves: by rows wherever their parts are.
TRANSPARENT = frozenset(
    "chain named_chain partition masked with_extra_args_support inject_hyperparams "
    "apply_if_finite conditionally_transform conditionally_mask lazy".split()
)

# Wrappers that look at which leaf it is.
BY_LEAF = frozenset(["partition", "masked"])

# What a short run does not show, by its state: (its name, why it cannot be lifted).
_HOLDS_BACK = (
    "it holds gradients back and emits them at a later step, which would have to reach "
    "rows that are not read again (sparsejax.optim.accumulate does, by rows)"
)
_OF_MOMENTUM = "its step is made of the momentum of all rows, also of those not read"
_OF_DISTANCE = "its step size is made of sums over all rows, also of those not read"
NOT_LIFTED = {
    optax.MultiStepsState: ("MultiSteps", _HOLDS_BACK),
    optax.ApplyEvery: ("apply_every", _HOLDS_BACK),
    optax.contrib.MomoState: ("momo", _OF_MOMENTUM),
    optax.contrib.MomoAdamState: ("momo_adam", _OF_MOMENTUM),
    optax.contrib.MuonState: ("scale_by_muon", _OF_MOMENTUM),
    optax.contrib.ProdigyState: ("prodigy", _OF_DISTANCE),
    optax.contrib.DAdaptAdamWState: ("dadapt_adamw", _OF_DISTANCE),
    optax.contrib.MechanicState: ("mechanize", _OF_DISTANCE),
}

KNOWN_AS = {
    "scale_by_trust_ratio": "what makes lamb, lars and fromage",
    "scale_by_factored_rms": "what makes adafactor",
    "clip_by_block_rms": "also a part of adafactor",
    "scale_by_param_block_rms": "also a part of adafactor",
    "scale_by_muon": "what makes muon",
    "scale_by_shape": "a part of muon",
    "scale_by_sm3": "what makes sm3",
    "scale_by_dog": "what makes dog",
    "scale_by_dowg": "what makes dowg",
    "scale_by_lbfgs": "what makes lbfgs",
    "add_noise": "what makes noisy_sgd",
}


def is_transformation(x: Any) -> bool:
    """Whether `x` is a transformation or, as `optax.MultiSteps`, works like one."""
    if inspect.isclass(x) or inspect.ismodule(x) or callable(x):
        return False  # what can be called is a schedule, which may have both as well
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def check_state(call: str, state: Any, kind: Any) -> None:
    """A TypeError unless `state` has the fields of `kind`."""
    if not all(hasattr(state, field) for field in kind._fields):
        raise TypeError(
            f"{call}: takes the state that its own init or update gave, got "
            f"{_arguments.kind_of(state)}."
        )


def name(tx: Any) -> str:
    """What a transformation is called: the function that made it, or its class."""
    if not isinstance(tx, optax.GradientTransformation):
        return type(tx).__name__
    found = _function_name(tx.update)
    if found.startswith("stateless"):  # then it is the function inside that tells
        inner = [f for f in _held(tx.update) if inspect.isfunction(f)]
        return _function_name(inner[0]) if inner else found
    return found


def children(tx: Any) -> list[Any]:
    """The transformations directly inside `tx`, each once, in their order."""
    found = []
    for part in (*_pairs(tx), *_injected(tx), *_transformations(tx)):
        if not _among([tx, *found], part):
            found.append(part)
    return found


def descendants(tx: Any) -> list[Any]:
    """`tx` and all transformations inside it."""
    seen, queue = [], [tx]
    while queue:
        part = queue.pop(0)
        if not _among(seen, part):
            seen.append(part)
            queue.extend(children(part))
    return seen


def treats_leaves_alike(tx: Any) -> bool:
    """Whether all leaves are treated alike, as far as is known: optax, and no masks."""

    def is_plain(part):
        module = getattr(part.update, "__module__", None) or ""
        return module.split(".")[0] == "optax" and name(part) not in BY_LEAF

    return all(map(is_plain, descendants(tx)))


def required_extra_args(tx: Any) -> set[str]:
    """Names of the extra arguments that some part's update cannot do without."""
    names = set()
    for part in descendants(tx):
        for parameter in inspect.signature(part.update).parameters.values():
            required = parameter.default is parameter.empty
            if required and parameter.kind is parameter.KEYWORD_ONLY:
                names.add(parameter.name)
    return names


def holds_tracer(tx: Any) -> bool:
    """Whether a part of `tx` was made of values that are being traced."""
    functions = [f for part in descendants(tx) for f in (part.init, part.update)]
    return any(isinstance(x, Tracer) for f in functions for x in _held(f))


def same(a: Any, b: Any) -> bool:
    """Whether two transformations are one: parts of a chain are made anew each time."""
    return a.init == b.init and a.update == b.update


def _among(parts: list[Any], tx: Any) -> bool:
    return any(same(part, tx) for part in parts)


def children_at(tx: Any, treedef: Any, specs: Any, leaf: int) -> list[Any]:
    """The children that act on a leaf: of `optax.partition` only the one it is for."""
    cells = _cells(tx.update)
    try:
        transforms, labels = cells["transforms"], cells["param_labels"]
        tree = treedef.unflatten(specs)
        labels = labels(tree) if callable(labels) else labels
        flat = jax.tree.broadcast(labels, treedef.unflatten(range(len(specs))))
        return [transforms[treedef.flatten_up_to(flat)[leaf]]]
    except Exception:  # not a partition, or none that is known
        return children(tx)


def not_lifted(state: Any, owners: tuple[int | None, ...]) -> dict[int, Any]:
    """For each table with state in one of `NOT_LIFTED`: (name, why)."""
    known = tuple(NOT_LIFTED)
    found, first = {}, 0
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, known)):
        last = first + len(jax.tree.leaves(node))
        if isinstance(node, known):
            reason = next(r for kind, r in NOT_LIFTED.items() if isinstance(node, kind))
            found.update({o: reason for o in owners[first:last] if o is not None})
        first = last
    return found


def _function_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return type(owner).__name__
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    outer = qualified.split(".<locals>")[0]
    return outer.split(".")[-1].lstrip("_")


def _cells(function: Any) -> dict[str, Any]:
    """The variables a function closes over, by name."""
    closure = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if closure else ()
    filled = {}
    for variable, cell in zip(names, closure):
        try:
            filled[variable] = cell.cell_contents
        except ValueError:  # not assigned yet
            pass
    return filled


def _held(function: Any) -> Iterator[Any]:
    """What a function, method or partial carries along, containers opened."""
    queue = []
    if isinstance(function, functools.partial):
        queue += [function.func, *function.args, *function.keywords.values()]
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        queue.append(owner)
        queue.extend(getattr(owner, "__dict__", {}).values())
    queue.extend(_cells(function).values())
    while queue:
        x = queue.pop(0)
        if isinstance(x, dict):
            queue.extend(x.values())
        elif isinstance(x, (list, tuple)) and not is_transformation(x):
            queue.extend(x)
        elif isinstance(x, functools.partial):
            queue.extend([x.func, *x.args, *x.keywords.values()])
        else:
            yield x


def _transformations(tx: Any) -> Iterator[Any]:
    for function in (tx.update, tx.init):
        for x in _held(function):
            if is_transformation(x):
                yield x


def _pairs(tx: Any) -> list[Any]:
    """The parts of `optax.chain`, which it keeps as two tuples of functions."""
    inits = _cells(tx.init).get("init_fns", ())
    updates = _cells(tx.update).get("update_fns", ())
    if not inits or len(inits) != len(updates):
        return []
    parts = zip(inits, updates)
    return [optax.GradientTransformationExtraArgs(*part) for part in parts]


def _injected(tx: Any) -> list[Any]:
    """What `optax.inject_hyperparams` makes at each step, made with initial values."""
    cells = {**_cells(tx.update), **_cells(tx.init)}
    if "inner_factory" not in cells:
        return []
    try:
        scheduled = {k: f(f.init()) for k, f in cells["sched_hps"].items()}
        values = {**cells["other_hps"], **cells["numeric_hps"], **scheduled}
        return [cells["inner_factory"](**values)]
    except Exception:  # a release of optax that keeps them in another way
        return []
