"""The only file that depends on JAX internals, or on the version of JAX.

Everything here is re-exported under a stable name, or is a small function whose body
differs between jax 0.10.2 and newer releases. No other file of the package imports
`jax.extend`, `jax.interpreters` or `jax._src`.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import (
    core as _core,
    dispatch as _dispatch,
    source_info_util as _source_info,
)
from jax._src.shard_map import shard_map_p as shard_map_p
from jax.extend import core as _jex_core
from jax.extend.core import primitives as primitives
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir


Literal = _jex_core.Literal
Primitive = _jex_core.Primitive
pvary_p = _core.pvary_p

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
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


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


def varying_axes(x: Any) -> frozenset:
    """Manual mesh axes over which `x` varies inside `shard_map` (empty elsewhere)."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """How `x` is sharded over explicit mesh axes: a PartitionSpec's parts, or ()."""
    spec = tuple(getattr(jax.typeof(x).sharding, "spec", ()))
    return spec if any(part is not None for part in spec) else ()


def is_laid_out(x: Any) -> bool:
    """Whether the type of `x` has a mesh: it has a sharding, or may be varying."""
    mesh = getattr(jax.typeof(x).sharding, "mesh", None)
    return bool(getattr(mesh, "axis_names", ()))


def linear_primitive(
    name: str,
    reference: Callable[..., jax.Array],
    platforms: Mapping[str, Callable[..., jax.Array]],
) -> Any:
    """Makes `reference` one primitive, with other lowerings on some platforms.

    Under `vmap`, and for tangents, `reference` replaces it.

    Args:
      name: of the primitive.
      reference: a function of arrays, linear in the first; the others are not
        differentiated.
      platforms: by platform, a function that computes the same.

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

    p = _primitive(name, reference, platforms)
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

    p = _primitive(name, reference, platforms, multiple_results)
    _ad.primitive_jvps[p] = jvp
    _ad.primitive_transposes[p] = transpose
    _batching.primitive_batchers[p] = batched
    return p


def _primitive(
    name: str,
    reference: Callable[..., Any],
    platforms: Mapping[str, Callable[..., Any]],
    multiple_results: bool = False,
) -> Any:
    """A primitive whose platform is chosen when a program is lowered.

    So jaxprs have no branch over platforms.
    """
    p = Primitive(name)
    p.multiple_results = multiple_results
    p.def_impl(functools.partial(_dispatch.apply_primitive, p))

    def abstract(*avals, **static):
        program = jax.make_jaxpr(functools.partial(reference, **static))(*avals)
        # Types say more than shape and dtype: how explicit mesh axes lay an array out.
        outs = [v.aval.update(weak_type=False) for v in open_jaxpr(program)[0].outvars]
        return outs if multiple_results else outs[0]

    p.def_abstract_eval(abstract)
    rule = functools.partial(_mlir.lower_fun, multiple_results=multiple_results)
    _mlir.register_lowering(p, rule(reference))
    for platform, lowering in platforms.items():
        _mlir.register_lowering(p, rule(lowering), platform=platform)
    return p
