"""The only file that depends on JAX internals, or on the version of JAX.

Everything here is re-exported under a stable name, or is a small function whose body
differs between releases of JAX, from 0.7.2 on. No other file of the package imports
`jax.extend`, `jax.interpreters` or `jax._src`.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import experimental as _experimental, lax
from jax._src import (
    core as _core,
    dispatch as _dispatch,
    source_info_util as _source_info,
    xla_bridge as _xla_bridge,
)
from jax._src.ad_checkpoint import remat_p as remat_p
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import parallel as _parallel
from jax._src.random import prng as _prng
from jax._src.shard_map import shard_map_p as shard_map_p
from jax.extend import core as _jex_core, random as _jex_random
from jax.extend.core import primitives as primitives
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir


Literal = _jex_core.Literal
Primitive = _jex_core.Primitive
pvary_p = _core.pvary_p

# Runs an open jaxpr: `eval_jaxpr(jaxpr, consts, *args)`.
eval_jaxpr = _core.eval_jaxpr

# jax 0.7.2 has it elsewhere.
_namespace: Any = jax if hasattr(jax, "enable_x64") else _experimental
enable_x64 = _namespace.enable_x64

# Return True if JAX has started a backend, with its threads.
has_backend = _xla_bridge.backends_are_initialized

# Numbers in shapes may be symbols, in an export.
InconclusiveDimensionOperation = _core.InconclusiveDimensionOperation
is_symbolic_dim = _core.is_symbolic_dim
max_dim, min_dim = _core.max_dim, _core.min_dim

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INSTALLED = tuple(f"{os.sep}{d}{os.sep}" for d in ("site-packages", "dist-packages"))

# Source lines in messages are the user's, not the library's.
_source_info.register_exclusion(_PACKAGE + os.sep)


def trace(fun, *args) -> tuple[Any, list[Any]]:
    """Traces `fun`, which returns a flat list; returns `(open jaxpr, consts)`."""
    return open_jaxpr(jax.make_jaxpr(fun)(*args))


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns a jaxpr, closed or open, as `(open jaxpr, consts)`.

    jax 0.10.2 has a class for each; later a `Jaxpr` carries its own consts.
    """
    consts = getattr(jaxpr, "consts", None)
    return getattr(jaxpr, "jaxpr", jaxpr), list(consts or ())


def is_ref_type(aval: Any) -> bool:
    """Returns True if `aval` is a mutable reference (`jax.new_ref`), not an array."""
    return hasattr(aval, "inner_aval")


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Runs one equation on other inputs, as `eval_jaxpr` does; returns a list."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Up to jax 0.9 functions among the parameters are arguments, before the others.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def placeholder(aval: Any) -> Any:
    """Makes an array with only a type, for programs that are never run."""
    return _placeholder_p.bind(aval=aval)


_placeholder_p = Primitive("placeholder")
_placeholder_p.def_abstract_eval(lambda *, aval: aval)


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Gives equations bound inside the source line, scope and settings of `eqn`."""
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with _source_info.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        yield


def user_line(eqn: Any, enclosing: str | None = None) -> str:
    """Returns `file:line` of the innermost frame in user code.

    Frames of JAX and of this package are skipped. If all other frames are in installed
    packages (a flax layer inside a scan, for example), the line of the enclosing
    equation is returned, if it is known.
    """
    installed = None
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        name = frame.file_name
        line = f"{_shown_name(name)}:{frame.start_line}"
        if not any(part in name for part in _INSTALLED):
            return line
        installed = installed or line
    return enclosing or installed or "an unknown line"


def frames(eqn: Any) -> list[tuple[str, str, int]]:
    """Returns `(file, qualified name, line)` of the frames that made `eqn`.

    Innermost first, JAX's own frames included. Empty if the stack is not known.
    """
    traceback = eqn.source_info.traceback
    stack = traceback.frames if traceback is not None else ()
    return [(_shown_name(f.file_name), f.function_name, f.line_num) for f in stack]


def _shown_name(file: str) -> str:
    """Names a file in messages: `In[3]` for a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    # Releases before 7.33 name cells so that the number can be read.
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    kind_and_name = name_of(file) if name_of else None
    if kind_and_name:
        return kind_and_name[1]
    cell = re.match(r"<ipython-input-(\d+)-", file)
    return f"In[{cell[1]}]" if cell else file


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """Returns numbers of constants and of carried values among a scan's inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def manual_axes(params: dict[str, Any]) -> frozenset:
    """Returns the mesh axes that a shard_map makes manual."""
    in_old = params.get("manual_axes")  # up to jax 0.9
    return frozenset(params["newly_manual_axes"] if in_old is None else in_old)


def varying_axes(x: Any) -> frozenset:
    """Returns manual mesh axes over which `x` varies in `shard_map`; else empty."""
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # up to jax 0.9
        return aval.vma
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def to_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Marks `x` as varying over manual mesh axes, if it does not yet vary over them."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    if not missing:
        return x
    names: Any = lax
    if hasattr(lax, "pcast"):
        return names.pcast(x, missing, to="varying")
    return names.pvary(x, missing)  # jax 0.7.2


def all_gather(x: jax.Array, axes: tuple[str, ...], *, to: str) -> jax.Array:
    """Returns `lax.all_gather` along the first axis, `to` "varying" or "invarying"."""
    if to == "varying":  # the default, where there is a choice
        return lax.all_gather(x, axes, tiled=True)
    # Up to jax 0.9 `to` has no such value, or is missing.
    if hasattr(_parallel, "all_gather_invariant"):
        return _parallel.all_gather_invariant(x, axes, tiled=True)
    return lax.all_gather(x, axes, tiled=True, to=to)


def has_mesh(x: Any) -> bool:
    """Returns True if the type of `x`, an array or a type, is sharded or varying."""
    aval = x if isinstance(x, _core.AbstractValue) else jax.typeof(x)
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return bool(getattr(mesh, "axis_names", ()))


def primitive(
    name: str,
    reference: Callable[..., Any],
    platforms: Mapping[str, Callable[..., Any]],
    *,
    types: Callable[..., Sequence[tuple[Any, Any]]] | None = None,
    multiple_results: bool = False,
    transposes: Mapping[int, Callable[..., jax.Array]] | None = None,
    batch: Callable[..., Any] | None = None,
    drop_unused: Callable[..., tuple[Sequence[bool], dict[str, Any]]] | None = None,
) -> Any:
    """Makes `reference` one primitive, with other lowerings on some platforms.

    The platform is chosen when a program is lowered, so jaxprs have no branch over
    platforms. `reference` takes the primitive's place for derivatives and under `vmap`
    unless `transposes` and `batch` are given.

    Args:
      name: of the primitive.
      reference: a function of arrays and of static, hashable keywords.
      platforms: by platform, a function that computes the same.
      types: a function of the same arguments that returns the shapes and dtypes of the
        results. Without it, and if types of arguments have a mesh, `reference` is
        traced to find them.
      multiple_results: True if `reference` returns a sequence. Then it also takes the
        place of `platforms` in programs of several devices. So a lowering may be a loop
        that writes to its arguments in place.
      transposes: by position of an array in which `reference` is linear,
        `f(cotangent, like, *args, **static)`: the cotangent of that array, of the shape
        and type of `like`; in `args` the array itself is None. The JVP is the primitive
        again.
      batch: `f(bind, args, axes, **static)`, the primitive under `vmap`, with the batch
        axis first; `axes` are the mapped axes, or None.
      drop_unused: `f(used, **static)`, the results to compute and the new keywords if
        some results are not used.

    Returns:
      The primitive.
    """
    p = Primitive(name)
    p.multiple_results = multiple_results
    p.def_impl(functools.partial(_dispatch.apply_primitive, p))
    as_list = list if multiple_results else lambda out: [out]

    def abstract(*avals, **static):
        # Types may say more than shape and dtype: how a mesh lays an array out.
        if types is not None and (multiple_results or not any(map(has_mesh, avals))):
            outs = [_core.ShapedArray(*spec) for spec in types(*avals, **static)]
        else:
            program = jax.make_jaxpr(functools.partial(reference, **static))(*avals)
            outvars = open_jaxpr(program)[0].outvars
            outs = [v.aval.update(weak_type=False) for v in outvars]
        return outs if multiple_results else outs[0]

    def jvp_of_reference(primals, tangents, **static):
        moved = [k for k, t in enumerate(tangents) if not isinstance(t, _ad.Zero)]

        def fun(*moving):
            args = list(primals)
            for k, x in zip(moved, moving):
                args[k] = x
            return as_list(reference(*args, **static))

        moving = [primals[k] for k in moved]
        outs, changes = jax.jvp(fun, moving, [tangents[k] for k in moved])
        changes = [
            _ad.Zero(jax.typeof(out).to_tangent_aval())
            if change.dtype == jax.dtypes.float0
            else change
            for out, change in zip(outs, changes)
        ]
        if multiple_results:
            return outs, changes
        return p.bind(*primals, **static), changes[0]

    def jvp(primals, tangents, **static):
        out = p.bind(*primals, **static)
        total = _ad.Zero(jax.typeof(out).to_tangent_aval())
        for k in transposes or ():
            if k < len(primals) and not isinstance(tangents[k], _ad.Zero):
                args = [*primals[:k], tangents[k], *primals[k + 1 :]]
                total = _ad.add_tangents(total, p.bind(*args, **static))
        return out, total

    def transpose(cotangent, *args, **static):
        (k,) = (i for i, x in enumerate(args) if _ad.is_undefined_primal(x))
        like = args[k].aval
        result: list[Any] = [None] * len(args)
        if isinstance(cotangent, _ad.Zero):
            result[k] = _ad.Zero(like)
        elif transposes is not None:
            others = [None if i == k else x for i, x in enumerate(args)]
            result[k] = transposes[k](cotangent, like, *others, **static)
        return result

    def batched(args, dims, **static):
        if batch is not None:
            return batch(p.bind, args, dims, **static), 0
        fun = functools.partial(reference, **static)
        outs = as_list(jax.vmap(fun, in_axes=tuple(dims))(*args))
        return (outs, [0] * len(outs)) if multiple_results else (outs[0], 0)

    def dce(used, *args):
        eqn = args[-1]  # after the inputs that are live, on jax 0.12
        if not any(used):
            return [False] * len(eqn.invars), None
        assert drop_unused is not None
        kept, params = drop_unused(used, **eqn.params)
        outs = [v for v, is_kept in zip(eqn.outvars, kept) if is_kept]
        eqn = eqn.replace(params=params, outvars=outs)
        return [True] * len(eqn.invars), eqn

    p.def_abstract_eval(abstract)
    _ad.primitive_jvps[p] = jvp_of_reference if transposes is None else jvp
    _batching.primitive_batchers[p] = batched
    if transposes is not None:
        _ad.primitive_transposes[p] = transpose
    if drop_unused is not None:
        _partial_eval.dce_rules[p] = dce
    rule = functools.partial(_mlir.lower_fun, multiple_results=multiple_results)
    everywhere = rule(reference)
    _mlir.register_lowering(p, everywhere)
    for platform, function in platforms.items():
        lowering = rule(function)
        if multiple_results:
            lowering = _on_one_device(lowering, everywhere)
        _mlir.register_lowering(p, lowering, platform=platform)
    return p


def view_primitive(
    name: str, shape_of: Callable[..., tuple[int, ...]], refuse: Callable[..., Any]
) -> Any:
    """Makes a primitive that gives an array another shape, for a walk to replace.

    It may have several arguments; the result has the dtype of the first.

    Args:
      name: of the primitive.
      shape_of: `f(shape, **static)`, from the shape of the first to the result's.
      refuse: `f(**static)`, raises the error for programs that are run without a walk.

    Returns:
      The primitive.
    """

    def abstract(aval, *others, **static):
        del others
        return _core.ShapedArray(shape_of(aval.shape, **static), aval.dtype)

    def raises(*args, **static) -> Any:
        del args
        refuse(**static)

    def jvp(primals, tangents, **static):
        tangents = map(_ad.instantiate_zeros, tangents)
        return p.bind(*primals, **static), p.bind(*tangents, **static)

    p = Primitive(name)
    p.def_impl(raises)
    p.def_abstract_eval(abstract)
    _mlir.register_lowering(p, raises)
    _ad.primitive_jvps[p] = jvp
    _ad.primitive_transposes[p] = raises
    _batching.primitive_batchers[p] = raises
    return p


def only_needed(
    jaxpr: Any, consts: Sequence[Any], outputs: Sequence[bool] | None = None
) -> tuple[Any, list[Any], list[bool]]:
    """Removes the equations and inputs that the outputs of an open jaxpr do not need.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      outputs: which of its outputs to keep; by default all.

    Returns:
      The jaxpr, its constants, and for each old input True if it is still there.
    """
    outputs = [True] * len(jaxpr.outvars) if outputs is None else list(outputs)
    less, of_consts, of_inputs = _partial_eval.dce_jaxpr_consts(jaxpr, outputs)
    return less, [c for c, used in zip(consts, of_consts) if used], list(of_inputs)


def eval_in_own_mesh(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Runs an open jaxpr in the mesh of the caller.

    Equations keep the mesh that they were traced in, and some a sharding over it, which
    inside of a `shard_map` is the wrong one. Programs within equations, like branches
    of a conditional, still keep theirs.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        if eqn.params.get("sharding") is not None:
            eqn = eqn.replace(params={**eqn.params, "sharding": None})
        stack = _source_info.current_name_stack() + eqn.source_info.name_stack
        with _source_info.user_context(eqn.source_info.traceback, name_stack=stack):
            outs = bind(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs))
    return [read(v) for v in jaxpr.outvars]


def _on_one_device(own: Any, otherwise: Any) -> Any:
    """Returns a lowering rule: `own` in programs of one device, else `otherwise`."""

    def rule(ctx, *args, **static):
        num_devices = getattr(ctx.module_context.axis_context, "num_devices", None)
        return (own if num_devices == 1 else otherwise)(ctx, *args, **static)

    return rule


# ------------------------------------------------------------------ opaque integers


def define_opaque(
    name: str, label: str, words: int, number: int
) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Defines a dtype that JAX moves but does not compute with.

    The only dtype without arithmetic that JAX lets others define is a random key. So
    this is the key of a generator that draws nothing. `jax.random.key_data` gives the
    words back.

    Args:
      name: unique; raw leaves in checkpoints of orbax are stored under it.
      label: the text in the name of the dtype, `key<label>`, in jaxprs and errors.
      words: int, uint32 words per element.
      number: int, unique; exported programs store the dtype as this number.

    Returns:
      The dtype, and a function from uint32 `[..., words]` to an array `[...]` of it.
    """
    spec: Any = _jex_random.define_prng_impl(
        key_shape=(words,),
        seed=_draw,
        split=_draw,
        random_bits=_draw,
        fold_in=_draw,
        name=name,
        tag=label,
    )
    wrap = functools.partial(jax.random.wrap_key_data, impl=spec)
    dtype: Any = jax.eval_shape(wrap, jax.ShapeDtypeStruct((words,), np.uint32)).dtype
    # JAX has no public door for these two: orbax restores a key by its name, and
    # exported programs store a dtype as a number. Both functions are JAX's own.
    _prng.register_prng(dtype._impl)
    with contextlib.suppress(ImportError):  # needs flatbuffers, which is optional
        from jax._src.export import serialization

        serialization.register_dtype_kind(dtype, number)
    return dtype, wrap


def _draw(*args: Any) -> Any:
    """Stands for each function of a generator. A module's function can be pickled."""
    raise TypeError("A random key is needed, got row ids or scales of a table.")
