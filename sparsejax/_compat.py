"""The only file that depends on JAX internals, or on the version of JAX.

Everything here is re-exported under a stable name, or is a small function whose body
differs between releases of JAX, from 0.7.2 on. No other file of the package imports
`jax.extend`, `jax.interpreters` or `jax._src`.
"""

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import experimental as _experimental, lax
from jax._src import (
    api as _api,
    core as _core,
    dispatch as _dispatch,
    dtypes as _dtypes,
    mesh as _mesh,
    sharding_impls as _sharding_impls,
    source_info_util as _source_info,
    tree_util as _tree_util,
)
from jax._src.ad_checkpoint import name_p as name_p, remat_p as remat_p
from jax._src.interpreters import (
    ad as _ad_src,
    mlir as _mlir_src,
    partial_eval as _partial_eval,
    pxla as _pxla,
)
from jax._src.lax import parallel as _parallel
from jax._src.shard_map import shard_map_p as shard_map_p
from jax.extend import core as _jex_core
from jax.extend.core import primitives as primitives
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir


Literal = _jex_core.Literal
Primitive = _jex_core.Primitive
pvary_p = _core.pvary_p

# jax 0.7.2 has it elsewhere.
_namespace: Any = jax if hasattr(jax, "enable_x64") else _experimental
enable_x64 = _namespace.enable_x64

get_concrete_mesh = _mesh.get_concrete_mesh

# Numbers in shapes may be symbols, in an export.
InconclusiveDimensionOperation = _core.InconclusiveDimensionOperation
max_dim = _core.max_dim

# Types of one's own, with tangents of another type. Before jax 0.12 they are missing or
# have other names, and `object` stands in: no value is ever made.
HIJAX_RELEASE = "0.12"
try:
    from jax.experimental import hijax as _hijax
except ImportError:  # jax 0.7.2
    _hijax = None
has_hijax = hasattr(_hijax, "HiPrim")
HiType: Any = getattr(_hijax, "HiType", object) if has_hijax else object
HiPrim: Any = getattr(_hijax, "HiPrim", object)

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INSTALLED = tuple(f"{os.sep}{d}{os.sep}" for d in ("site-packages", "dist-packages"))

# Source lines in messages are the user's, not the library's. The demo is a user.
for _name in os.listdir(_PACKAGE):
    if _name not in ("demo", "__pycache__"):
        _source_info.register_exclusion(os.path.join(_PACKAGE, _name))


def trace(fun, *args) -> tuple[Any, list[Any]]:
    """`fun`, which returns a flat list, as `(open jaxpr, consts)`."""
    return open_jaxpr(jax.make_jaxpr(fun)(*args))


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr, closed or open, as `(open jaxpr, consts)`.

    jax 0.10.2 has a class for each; later a `Jaxpr` carries its own consts.
    """
    consts = getattr(jaxpr, "consts", None)
    return getattr(jaxpr, "jaxpr", jaxpr), list(consts or ())


def is_ref_type(aval: Any) -> bool:
    """Whether `aval` is a mutable reference (`jax.new_ref`), not an array."""
    return hasattr(aval, "inner_aval")


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Runs one equation on other inputs, as `eval_jaxpr` does; returns a list."""
    found = eqn.primitive.get_bind_params(eqn.params)
    # Up to jax 0.9 functions among the parameters are arguments, before the others.
    functions, params = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def nested(eqn: Any) -> dict[str, Any] | None:
    """An equation as a nested `jit` that is inlined: the parameters of that `jit`.

    Its inputs are the equation's, without literals, each of them once. None if an
    output is not used, which has no name then, or if a type is one of hijax.
    """
    if any(isinstance(v, _core.DropVar) for v in eqn.outvars):
        return None
    if any(getattr(v.aval, "is_high", False) for v in (*eqn.invars, *eqn.outvars)):
        return None
    invars = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    params = _nested_jit(len(invars), len(eqn.outvars), eqn.ctx, get_concrete_mesh())
    closed = params["jaxpr"]
    jaxpr, _ = open_jaxpr(closed)
    # Where it is inlined it gets the name and the source line that it has there.
    unnamed = eqn.replace(source_info=_source_info.new_source_info())
    inner = jaxpr.replace(invars=invars, outvars=list(eqn.outvars), eqns=[unnamed])
    if type(closed) is not type(jaxpr):
        inner = closed.replace(jaxpr=inner)
    return {**params, "jaxpr": inner, "inline": _INLINE, "name": eqn.primitive.name}


_ways = getattr(_api, "Inline", None)  # jax 0.12
_INLINE: Any = _ways.JAX_EARLY if _ways else True


@functools.lru_cache(maxsize=256)
def _nested_jit(
    num_inputs: int, num_outputs: int, context: Any, mesh: Any
) -> dict[str, Any]:
    """The parameters of a `jit` with so many inputs and outputs, in that context."""
    del context, mesh  # the present ones
    fun = jax.jit(lambda *xs: [xs[0]] * num_outputs)
    with jax.disable_jit(False):
        jaxpr, _ = trace(fun, *(0.0,) * num_inputs)
    return jaxpr.eqns[0].params


def is_staged(x: Any) -> bool:
    """Whether `x` is a tracer of which nothing is computed now, as inside a `jit`."""
    trace = x._trace if isinstance(x, _core.Tracer) else None
    while trace and not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_staged_derivative(x: Any) -> bool:
    """Whether `x` is staged and is differentiated, as by `jax.vjp`."""
    return isinstance(x, _ad_src.LinearizeTracer) and is_staged(x)


def placeholder(aval: Any) -> Any:
    """An array with only a type, for programs that are never run."""
    return _placeholder_p.bind(aval=aval)


_placeholder_p = Primitive("placeholder")
_placeholder_p.def_abstract_eval(lambda *, aval: aval)


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Equations bound inside keep this one's source line, name scope and settings."""
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with _source_info.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        yield


def user_line(eqn: Any, enclosing: str | None = None) -> str:
    """`file:line` of the innermost frame in user code.

    Frames of JAX and of this package are skipped. If all others are of installed
    packages (a flax layer inside a scan, say), the line of the enclosing equation says
    more, and is returned if it is known.
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
    """`(file, qualified name of the function, line)` of the stack that made `eqn`.

    Innermost first, JAX's own frames included. Empty if the stack is not known.
    """
    traceback = eqn.source_info.traceback
    found = traceback.frames if traceback is not None else ()
    return [(_shown_name(f.file_name), f.function_name, f.line_num) for f in found]


def _shown_name(file: str) -> str:
    """A file's name as its author knows it: `In[3]` for a cell of a notebook."""
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
    """Numbers of constants and of carried values among a scan's inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def manual_axes(params: dict[str, Any]) -> frozenset:
    """The mesh axes that a shard_map makes manual."""
    in_old = params.get("manual_axes")  # up to jax 0.9
    return frozenset(params["newly_manual_axes"] if in_old is None else in_old)


def varying_axes(x: Any) -> frozenset:
    """Manual mesh axes over which `x` varies inside `shard_map` (empty elsewhere)."""
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # up to jax 0.9
        return aval.vma
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def to_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, marked as varying over manual mesh axes that it does not vary over yet."""
    names: Any = lax
    if hasattr(lax, "pcast"):
        return names.pcast(x, axes, to="varying")
    return names.pvary(x, axes)  # jax 0.7.2


def all_gather(x: jax.Array, axes: tuple[str, ...], *, to: str) -> jax.Array:
    """`lax.all_gather` along the first axis, `to` "varying" or "invarying"."""
    if to == "varying":  # the default, where there is a choice
        return lax.all_gather(x, axes, tiled=True)
    # Up to jax 0.9 `to` has no such value, or is missing.
    if hasattr(_parallel, "all_gather_invariant"):
        return _parallel.all_gather_invariant(x, axes, tiled=True)
    return lax.all_gather(x, axes, tiled=True, to=to)


def is_differentiated_with(x: Any, y: Any) -> bool:
    """Whether `x` is a tracer of the same transformation as the tracer `y`."""
    return isinstance(x, _core.Tracer) and x._trace is y._trace


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """How `x` is sharded over explicit mesh axes: a PartitionSpec's parts, or ()."""
    spec = tuple(getattr(jax.typeof(x).sharding, "spec", ()))
    return spec if any(part is not None for part in spec) else ()


def is_laid_out(x: Any) -> bool:
    """Whether the type of `x` (or `x`, a type) has a mesh: sharded, or varying."""
    aval = x if isinstance(x, _core.AbstractValue) else jax.typeof(x)
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return bool(getattr(mesh, "axis_names", ()))


def linear_primitive(
    name: str,
    reference: Callable[..., jax.Array],
    platforms: Mapping[str, Callable[..., jax.Array]],
    types: Callable[..., Sequence[tuple[Any, Any]]] | None = None,
    *,
    native: Callable[..., jax.Array] | None = None,
) -> Any:
    """Makes `reference` one primitive, with other lowerings on some platforms.

    Under `vmap`, and for tangents, `reference` replaces it.

    Args:
      name: of the primitive.
      reference: a function of arrays, linear in the first; the others are not
        differentiated.
      platforms: by platform, a function that computes the same.
      types: see `platform_primitive`; without it, `reference` is traced.
      native: see `platform_primitive`.

    Returns:
      The primitive.
    """

    def jvp(primals, tangents):
        out = p.bind(*primals)
        if isinstance(tangents[0], _ad.Zero):
            return out, _ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, reference(tangents[0], *primals[1:])

    def batch(args, dims):
        return jax.vmap(reference, in_axes=tuple(dims))(*args), 0

    p = _primitive(name, reference, platforms, types, native=native)
    _ad.primitive_jvps[p] = jvp
    _batching.primitive_batchers[p] = batch
    return p


def multilinear_primitive(
    name: str,
    reference: Callable[..., Any],
    platforms: Mapping[str, Callable[..., Any]],
    transposes: Mapping[int, Callable[..., jax.Array]],
    batch: Callable[..., Any],
    *,
    types: Callable[..., Sequence[tuple[Any, Any]]] | None = None,
    native: Callable[..., Any] | None = None,
    multiple_results: bool = False,
) -> Any:
    """Makes `reference` one primitive whose JVP is that primitive again.

    Args:
      name: of the primitive.
      reference: a function of arrays and of static, hashable keywords, linear in each
        of the arrays in `transposes`.
      platforms: by platform, a function that computes the same.
      transposes: by position of an array, `f(cotangent, like, *args, **static)`: the
        cotangent of that array, of the shape and type of `like`; in `args` the array
        itself is None.
      batch: `f(bind, args, axes, **static)`, the primitive under `vmap`, with the batch
        axis first; `axes` are the mapped axes, or None.
      types: see `platform_primitive`; without it, `reference` is traced.
      native: see `platform_primitive`.
      multiple_results: whether `reference` returns a tuple. Then the first of its
        results is the linear one, and the others have no derivative.

    Returns:
      The primitive.
    """
    as_list = list if multiple_results else lambda out: [out]
    as_results = (lambda outs: outs) if multiple_results else lambda outs: outs[0]

    def jvp(primals, tangents, **static):
        outs = as_list(p.bind(*primals, **static))
        zeros = [_ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
        total, *others = zeros
        for k in transposes:
            if k < len(primals) and not isinstance(tangents[k], _ad.Zero):
                args = [*primals[:k], tangents[k], *primals[k + 1 :]]
                term = as_list(p.bind(*args, **static))[0]
                total = _ad.add_tangents(total, term)
        return as_results(outs), as_results([total, *others])

    def transpose(cotangents, *args, **static):
        cotangent = as_list(cotangents)[0]
        (k,) = (i for i, x in enumerate(args) if _ad.is_undefined_primal(x))
        like = args[k].aval
        result: list[Any] = [None] * len(args)
        if isinstance(cotangent, _ad.Zero):
            result[k] = _ad.Zero(like)
            return result
        known = [None if i == k else x for i, x in enumerate(args)]
        result[k] = transposes[k](cotangent, like, *known, **static)
        return result

    def batched(args, dims, **static):
        outs = as_list(batch(p.bind, args, dims, **static))
        return as_results(outs), as_results([0] * len(outs))

    p = _primitive(
        name,
        reference,
        platforms,
        types,
        native=native,
        multiple_results=multiple_results,
    )
    _ad.primitive_jvps[p] = jvp
    _ad.primitive_transposes[p] = transpose
    _batching.primitive_batchers[p] = batched
    return p


def platform_primitive(
    name: str,
    reference: Callable[..., Sequence[jax.Array]],
    platforms: Mapping[str, Callable[..., Sequence[jax.Array]]],
    types: Callable[..., Sequence[tuple[Any, Any]]],
    *,
    native: Callable[..., Sequence[jax.Array]] | None = None,
) -> Any:
    """Makes `reference` one primitive, with other lowerings on some platforms.

    Under `vmap`, for derivatives, and in programs of several devices, `reference` takes
    its place. So a lowering may be a loop that writes to its arguments in place, which
    none of these could do well.

    Args:
      name: of the primitive.
      reference: a function of arrays and static, hashable keywords; returns a sequence.
      platforms: by platform, a function that computes the same.
      types: a function of the same arguments that returns the shapes and dtypes of the
        results.
      native: computes the same on a CPU with kernels of this process; used in place of
        `platforms["cpu"]` for programs of one device that are not exported.

    Returns:
      The primitive, which has multiple results.
    """

    def jvp(primals, tangents, **static):
        moved = [k for k, t in enumerate(tangents) if not isinstance(t, _ad.Zero)]

        def fun(*some):
            args = list(primals)
            for k, x in zip(moved, some):
                args[k] = x
            return list(reference(*args, **static))

        some = [primals[k] for k in moved]
        outs, changes = jax.jvp(fun, some, [tangents[k] for k in moved])
        zeros = (
            _ad.Zero(jax.typeof(out).to_tangent_aval())
            if change.dtype == jax.dtypes.float0
            else change
            for out, change in zip(outs, changes)
        )
        return outs, list(zeros)

    def batch(args, dims, **static):
        fun = functools.partial(reference, **static)
        outs = jax.vmap(fun, in_axes=tuple(dims))(*args)
        return list(outs), [0] * len(outs)

    p = _primitive(
        name,
        reference,
        platforms,
        types,
        native=native,
        multiple_results=True,
        one_device=True,
    )
    _ad.primitive_jvps[p] = jvp
    _batching.primitive_batchers[p] = batch
    return p


def view_primitive(
    name: str, shape_of: Callable[..., tuple[int, ...]], refuse: Callable[..., Any]
) -> Any:
    """Makes a primitive that gives an array another shape, for a walk to replace.

    It may have several arguments; the result has the dtype of the first.

    Args:
      name: of the primitive.
      shape_of: `f(shape, **static)`, the shape of the result, from that of the first.
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
    """An open jaxpr without what its outputs do not need.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      outputs: which of its outputs to keep; by default all.

    Returns:
      The jaxpr, its constants, and which of the inputs it still has.
    """
    outputs = [True] * len(jaxpr.outvars) if outputs is None else list(outputs)
    less, of_consts, of_inputs = _partial_eval.dce_jaxpr_consts(jaxpr, outputs)
    return less, [c for c, used in zip(consts, of_consts) if used], list(of_inputs)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Runs an open jaxpr."""
    return _core.eval_jaxpr(jaxpr, consts, *args)


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


def _primitive(
    name: str,
    reference: Callable[..., Any],
    platforms: Mapping[str, Callable[..., Any]],
    types: Callable[..., Sequence[tuple[Any, Any]]] | None = None,
    *,
    native: Callable[..., Any] | None = None,
    multiple_results: bool = False,
    one_device: bool = False,
) -> Any:
    """A primitive whose platform is chosen when a program is lowered.

    So jaxprs have no branch over platforms. With `one_device`, the lowerings of
    `platforms` are for programs of one device only. `types` are those of the results;
    without it, and where types say more, `reference` is traced to find them. `native`
    is as `platform_primitive` has it.
    """
    p = Primitive(name)
    p.multiple_results = multiple_results
    p.def_impl(functools.partial(_dispatch.apply_primitive, p))

    def abstract(*avals, **static):
        # Types may say more than shape and dtype: how a mesh lays an array out.
        if types is not None and (one_device or not any(map(is_laid_out, avals))):
            outs = [_core.ShapedArray(*spec) for spec in types(*avals, **static)]
        else:
            program = jax.make_jaxpr(functools.partial(reference, **static))(*avals)
            outvars = open_jaxpr(program)[0].outvars
            outs = [v.aval.update(weak_type=False) for v in outvars]
        return outs if multiple_results else outs[0]

    p.def_abstract_eval(abstract)
    rule = functools.partial(_mlir.lower_fun, multiple_results=multiple_results)
    everywhere = rule(reference)
    _mlir.register_lowering(p, everywhere)
    chosen = {}
    for platform, lowering in platforms.items():
        own = rule(lowering)
        chosen[platform] = (
            _choose(own, everywhere, _has_one_device) if one_device else own
        )
    if native is not None:
        otherwise = chosen.get("cpu", everywhere)
        chosen["cpu"] = _choose(rule(native), otherwise, _runs_here)
    for platform, lowering in chosen.items():
        _mlir.register_lowering(p, lowering, platform=platform)
    return p


def _choose(own: Any, otherwise: Any, if_: Callable[[Any], bool]) -> Any:
    """A lowering rule: `own` in programs of which `if_` is true."""

    def rule(ctx, *args, **static):
        lower = own if if_(ctx.module_context) else otherwise
        return lower(ctx, *args, **static)

    return rule


def _has_one_device(module: Any) -> bool:
    return getattr(module.axis_context, "num_devices", None) == 1


def _runs_here(module: Any) -> bool:
    """Whether a program of one device is not exported, for others to run."""
    return _has_one_device(module) and not module.lowering_parameters.for_export


# ------------------------------------------------------------------ types of one's own


def register_hitype(kind: Any, type_of: Callable[[Any], Any]) -> None:
    """Registers the class of the values of a `HiType`, where JAX has them."""
    if has_hijax:
        hijax: Any = _hijax
        hijax.register_hitype(kind, type_of)


def array_method(f: Any) -> Any:
    """A function of a traced value as a method of its `HiType`."""
    hijax: Any = _hijax
    return hijax.aval_method(f) if has_hijax else f


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """The type of an array."""
    return _core.ShapedArray(tuple(shape), np.dtype(dtype))


def is_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return isinstance(x, _ad.Zero)


def zero_tangent(aval: Any) -> Any:
    """The symbolic zero tangent of a value of type `aval`."""
    return _ad.Zero(aval.to_tangent_aval())


def linearize_from_jvp() -> tuple[Any, Any]:
    """The rules `lin` and `linearized` of a `HiPrim` that has a `jvp`."""
    hijax: Any = _hijax
    return tuple(hijax.linearize_from_jvp) if has_hijax else (None, None)


# ------------------------------------------------------------------ opaque integers


class _opaque(_dtypes.extended):
    """The kind of `OpaqueInts`, as `np.integer` is of int32."""


class _OpaqueRules:
    """What JAX asks of a dtype of its own (compare `KeyTyRules`, of random keys)."""

    @staticmethod
    def physical_element_aval(dtype):
        return _core.ShapedArray((), dtype.ints)

    @staticmethod
    def physical_const(val):
        return val.plain

    @staticmethod
    def convert_from(dtype, other):
        return other == dtype.ints

    @staticmethod
    def convert_to(other, dtype):
        return other == dtype.ints

    @staticmethod
    def tangent_dtype(dtype):
        del dtype
        return _dtypes.float0

    @staticmethod
    def zero(dtype):
        del dtype
        return np.zeros((), _dtypes.float0)

    @staticmethod
    def full(shape, fill_value, dtype):
        """An array of zeros, as loops and `zeros_like` ask for: out of any range."""
        if not isinstance(fill_value, int | float | np.ndarray) or fill_value != 0:
            raise TypeError(f"full({fill_value}) is not accepted by {dtype.name}")
        largest = np.iinfo(dtype.ints).max
        return to_opaque(lax.full(shape, largest, dtype.ints), dtype)

    @staticmethod
    def global_sharded_result_handler(aval, out_sharding, committed):
        plain = _core.physical_aval(aval)
        make = _pxla.global_result_handlers[_core.ShapedArray]
        sharding = _sharding_impls.physical_sharding(aval, out_sharding)
        handler = make(plain, sharding, committed)
        if hasattr(handler, "wrap"):
            return handler.wrap(aval.dtype.array)
        return lambda buffers: aval.dtype.array(handler(buffers))  # jax 0.7.2

    @staticmethod
    def make_sharded_array(aval, sharding, arrays, committed):
        plain = _core.physical_aval(aval)
        make = _pxla.global_result_handlers[_core.ShapedArray]
        sharding = _sharding_impls.physical_sharding(aval, sharding)
        arrays = [getattr(x, "plain", x) for x in arrays]
        return aval.dtype.array(make(plain, sharding, committed)(arrays))


@dataclasses.dataclass(frozen=True)
class OpaqueInts(_dtypes.ExtendedDType):
    """A dtype of integers that programs can move but not compute with.

    Attributes:
      ints: the dtype of the integers.
      array: the class of such arrays outside of programs. Made from an array of
        integers, which is its attribute `plain`.
      short: the name of the dtype in jaxprs.
      label: its name in errors.
    """

    ints: np.dtype
    array: Any
    short: str
    label: str

    _rules = _OpaqueRules

    @property
    def type(self) -> Any:
        return _opaque

    @property
    def name(self) -> str:
        return self.label

    @property
    def itemsize(self) -> int:
        return self.ints.itemsize

    def __str__(self) -> str:  # in jaxprs
        return self.short

    def __repr__(self) -> str:  # in errors
        return self.label


def is_tracing() -> bool:
    """Whether operations are recorded or transformed, not run at once."""
    return not _core.trace_state_clean()


def to_opaque(ids: Any, dtype: OpaqueInts) -> Any:
    """Integers, as a tracer or an array, of that dtype."""
    return lax.convert_element_type(ids, dtype)


def is_opaque(x: jax.Array) -> bool:
    """Whether the dtype of `x` is an `OpaqueInts`."""
    return isinstance(x.dtype, OpaqueInts)


def from_opaque(x: Any) -> Any:
    """The integers of a tracer; one of another dtype is returned as it is."""
    return lax.convert_element_type(x, x.dtype.ints) if is_opaque(x) else x


def register_opaque(array: Any, spec: Any, dtype_of: Callable[[Any], Any]) -> None:
    """Registers the classes of opaque integers outside of programs.

    Args:
      array: a `jax.Array` with the attribute `plain`, an array of integers.
      spec: a `jax.ShapeDtypeStruct` of integers.
      dtype_of: the OpaqueInts for a dtype of integers.
    """

    def opaque(aval):
        return aval.update(dtype=dtype_of(aval.dtype), weak_type=False)

    def abstract(x):
        plain = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return opaque(_core.shaped_abstractify(plain))

    def shard(xs, shardings, layouts, copy_semantics):
        shardings = [
            _sharding_impls.physical_sharding(x.aval, s) for x, s in zip(xs, shardings)
        ]
        xs = [x.plain for x in xs]
        return _pxla.shard_args(shardings, layouts, copy_semantics, xs)

    def constant(val, aval):
        return _mlir_src.get_constant_handler(type(val.plain))(val.plain, aval)

    array.aval = property(lambda x: opaque(_core.typeof(x.plain)))
    _core.pytype_aval_mappings[array] = lambda x: x.aval
    _core.pytype_aval_mappings[spec] = abstract
    if hasattr(_dtypes, "register_canonicalize_value_handler"):
        _dtypes.register_canonicalize_value_handler(array, None)
    else:  # jax 0.7.2
        _dtypes.canonicalize_value_handlers[array] = lambda x: x
    _pxla.shard_arg_handlers[array] = shard
    _mlir.register_constant_handler(array, constant)
    _tree_util.dispatch_registry.register_node(
        array, lambda x: ((x.plain,), None), lambda _, children: array(*children)
    )
    # In exported programs, which store a dtype as a number.
    with contextlib.suppress(ImportError):  # needs flatbuffers, which is optional
        from jax._src.export import serialization

        for number, name in enumerate(_INTEGERS, start=100):
            serialization.register_dtype_kind(dtype_of(np.dtype(name)), number)

    _sharding_impls.logical_sharding = _logical_sharding


_jax_logical_sharding = _sharding_impls.logical_sharding


def _logical_sharding(shape: Any, dtype: Any, sharding: Any) -> Any:
    """JAX's, for dtypes whose elements are scalars.

    The sharding of such an array is that of its integers. JAX cuts the axes of an
    element off its end as `spec[:-ndim]`, which for 0 axes leaves nothing.
    """
    if isinstance(dtype, OpaqueInts):
        return sharding
    return _jax_logical_sharding(shape, dtype, sharding)


_INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
