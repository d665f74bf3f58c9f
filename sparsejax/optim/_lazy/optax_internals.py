"""Inspects optax transformations, through interfaces that optax does not document.

optax builds transformations by closing over others: `chain` closes over tuples of
functions, `masked` over its inner transformation, `partition` over a dict of them;
`MultiSteps` is an object. This file finds the parts for error messages, and recognizes
wrappers that only combine parts (`TRANSPARENT`). If a part is not found, messages are
less precise.

tests/optim/test_canaries.py checks every name that this file relies on.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.core import Tracer


# Wrappers that are row-separable if all of their parts are.
TRANSPARENT = frozenset(
    "chain named_chain partition masked with_extra_args_support inject_hyperparams "
    "apply_if_finite conditionally_transform conditionally_mask lazy".split()
)

# Other wrappers that do to a table what their part does.
WRAPPERS = frozenset("flatten schedule_free split_real_and_imaginary".split())

# Wrappers that treat some leaves differently from others.
BY_LEAF = frozenset(["partition", "masked"])

# The variables that optax functions close over, by the function that makes them.
CLOSURES = {
    "chain": ("init_fns", "update_fns"),
    "partition": ("transforms", "param_labels"),
    "masked": ("inner", "mask"),
    "inject_hyperparams": ("inner_factory", "sched_hps", "other_hps", "numeric_hps"),
}

# Transformations that a short run does not unmask, by the type of their state: (name,
# why it cannot be lifted).
_HOLDS_BACK = (
    "it accumulates gradients and applies them at a later step, where it would have to "
    "update rows that are not read again (sparsejax.optim.accumulate does this by rows)"
)
_OF_MOMENTUM = "its step depends on the momentum of all rows, even those not read"
_OF_DISTANCE = "its step size depends on sums over all rows, even those not read"
NOT_LIFTED = {
    optax.MultiStepsState: ("MultiSteps", _HOLDS_BACK),
    optax.ApplyEvery: ("apply_every", _HOLDS_BACK),
    optax.contrib.MomoState: ("momo", _OF_MOMENTUM),
    optax.contrib.MomoAdamState: ("momo_adam", _OF_MOMENTUM),
    optax.contrib.MuonState: ("scale_by_muon", _OF_MOMENTUM),
    optax.contrib.ProdigyState: ("prodigy", _OF_DISTANCE),
    optax.contrib.DAdaptAdamWState: ("dadapt_adamw", _OF_DISTANCE),
    optax.contrib.MechanicState: ("mechanize", _OF_DISTANCE),
    optax.contrib.DoGState: ("scale_by_dog", _OF_DISTANCE),
    optax.contrib.DoWGState: ("scale_by_dowg", _OF_DISTANCE),
}

# The names that users know, shown in parentheses.
KNOWN_AS = {
    "scale_by_trust_ratio": "part of lamb, lars and fromage",
    "scale_by_factored_rms": "part of adafactor",
    "clip_by_block_rms": "also part of adafactor",
    "scale_by_param_block_rms": "also part of adafactor",
    "scale_by_muon": "part of muon",
    "scale_by_shape": "part of muon",
    "scale_by_sm3": "part of sm3",
    "scale_by_dog": "part of dog",
    "scale_by_dowg": "part of dowg",
    "scale_by_lbfgs": "part of lbfgs",
    "add_noise": "part of noisy_sgd",
}


def is_transformation(x: Any) -> bool:
    """Whether `x` is a transformation or, like `optax.MultiSteps`, works like one."""
    if inspect.isclass(x) or inspect.ismodule(x) or callable(x):
        return False  # a callable is a schedule, even if it has init and update
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


# ------------------------------------------------------------------ names


def name(tx: Any) -> str:
    """The name of a transformation: the function that made it, or its class."""
    if not isinstance(tx, optax.GradientTransformation):
        return type(tx).__name__
    return _function_name(_named_after(tx))


def is_optax(tx: Any) -> bool:
    """Whether the function that names a transformation is from optax."""
    return _is_from_optax(_named_after(tx))


def treats_leaves_alike(tx: Any) -> bool:
    """Whether all leaves are surely treated alike: only optax code, and no masks."""
    return all(is_optax(part) and name(part) not in BY_LEAF for part in descendants(tx))


def _named_after(tx: Any) -> Any:
    """The update function, or the function passed to `optax.stateless`."""
    if _function_name(tx.update).startswith("stateless"):
        for held in _held(tx.update):
            if inspect.isfunction(held):
                return held
    return tx.update


def _is_from_optax(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.split(".")[0] == "optax"


def _function_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return type(owner).__name__
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    outer = qualified.split(".<locals>")[0]
    return outer.split(".")[-1].lstrip("_")


# ------------------------------------------------------------------ parts


def descendants(tx: Any) -> list[Any]:
    """`tx` and all transformations inside it, in the order in which they run."""
    seen, queue = [], [tx]
    while queue:
        part = queue.pop(0)
        if not _among(seen, part):
            seen.append(part)
            queue = children(part) + queue
    return seen


def children(tx: Any) -> list[Any]:
    """The transformations directly inside `tx`, each once, in order."""
    found = []
    for part in (*_chained(tx), *_injected(tx), *_closed_over(tx)):
        if not _among([tx, *found], part):
            found.append(part)
    return found


def children_at(tx: Any, treedef: Any, specs: Any, leaf: int) -> list[Any]:
    """The children that act on a leaf, of `optax.partition` and `optax.masked`."""
    cells = _cells(tx.update)

    def at_leaf(of_leaves):
        tree = treedef.unflatten(specs)
        given = jax.tree.leaves(jax.tree.map(callable, of_leaves))
        found = of_leaves(tree) if given and all(given) else of_leaves
        flat = jax.tree.broadcast(found, treedef.unflatten(range(len(specs))))
        return treedef.flatten_up_to(flat)[leaf]

    kind = name(tx)
    try:
        if kind == "partition":
            transforms, labels = (cells[v] for v in CLOSURES[kind])
            return [transforms[at_leaf(labels)]]
        if kind == "masked":
            inner, mask = (cells[v] for v in CLOSURES[kind])
            return [inner] if at_leaf(mask) else []
    except Exception:  # another release of optax, or labels for another tree
        pass
    return children(tx)


def same(a: Any, b: Any) -> bool:
    """Whether two transformations are the same; parts of a chain are rebuilt often."""
    return a.init == b.init and a.update == b.update


def _among(parts: list[Any], tx: Any) -> bool:
    return any(same(part, tx) for part in parts)


def _chained(tx: Any) -> list[Any]:
    """The parts of `optax.chain`."""
    init_fns, update_fns = CLOSURES["chain"]
    inits = _cells(tx.init).get(init_fns, ())
    updates = _cells(tx.update).get(update_fns, ())
    if not inits or len(inits) != len(updates):
        return []
    parts = zip(inits, updates)
    return [optax.GradientTransformationExtraArgs(*part) for part in parts]


def _injected(tx: Any) -> list[Any]:
    """What `optax.inject_hyperparams` builds at each step, with initial values."""
    cells = {**_cells(tx.update), **_cells(tx.init)}
    try:
        found = (cells[variable] for variable in CLOSURES["inject_hyperparams"])
        factory, scheduled, others, numbers = found
        with _on_numbers():
            scheduled = {k: f(f.init()) for k, f in scheduled.items()}
            return [factory(**{**others, **numbers, **scheduled})]
    except Exception:  # not inject_hyperparams
        return []


@contextlib.contextmanager
def _on_numbers() -> Iterator[None]:
    """Schedules give numbers, in a trace too: what holds a tracer cannot be tested."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.ensure_compile_time_eval())
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


def _closed_over(tx: Any) -> list[Any]:
    # `init` is often the part's own, and so holds the parts of that part.
    for function in (tx.update, tx.init):
        found = [x for x in _held(function) if is_transformation(x)]
        if found:
            return found
    return []


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
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
    """Everything a function, method or partial refers to, with containers opened."""
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


# ------------------------------------------------------------------ other questions


def required_extra_args(tx: Any) -> set[str]:
    """Names of the extra arguments that the update of some part requires."""
    names = set()
    for part in descendants(tx):
        for parameter in inspect.signature(part.update).parameters.values():
            required = parameter.default is parameter.empty
            if required and parameter.kind is parameter.KEYWORD_ONLY:
                names.add(parameter.name)
    return names


def holds_tracer(tx: Any) -> bool:
    """Whether a part of `tx` was made from traced values."""
    functions = [f for part in descendants(tx) for f in (part.init, part.update)]
    return any(isinstance(x, Tracer) for f in functions for x in _held(f))


def not_lifted(state: Any, owners: tuple[int | None, ...]) -> dict[int, tuple]:
    """`(name, why)` for each table that has state of a type in `NOT_LIFTED`."""
    known = tuple(NOT_LIFTED)
    found, first = {}, 0
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, known)):
        last = first + len(jax.tree.leaves(node))
        if isinstance(node, known):
            entry = next(r for kind, r in NOT_LIFTED.items() if isinstance(node, kind))
            found.update({o: entry for o in owners[first:last] if o is not None})
        first = last
    return found
