"""Primitives that are linear, that reduce, or that work row by row.

"Row by row" means that an output entry of a row is computed from that row's entry of
each input.
"""

from collections.abc import Sequence
from typing import Any

from sparsejax import _primitives


LINEAR = frozenset("neg convert_element_type copy copy_p".split())
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split()
)
# Work row by row if no axis in this parameter runs over rows.
_ALONG = {
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), "axes"),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp split".split(), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
    **dict.fromkeys(("rev", "squeeze"), "dimensions"),
}


def row_params(eqn: Any, rows: Sequence[bool], count: int = 1) -> Any:
    """An equation's parameters as one row sees them, None if it mixes rows.

    An output entry of a row is then computed from that row's entry of the inputs.

    Args:
      eqn: an equation with at least one input that has rows, or a broadcast.
      rows: for each input, True if it has one entry per row.
      count: number of leading axes that run over rows, 2 for a stack of tables.

    Returns:
      A dict in which axes and shapes leave out the leading ones, so that programs for
      different numbers of rows can be compared.
    """
    name, params = eqn.primitive.name, dict(eqn.params)
    params.pop("sharding", None)  # of the rows, which differs with their number
    shapes = [v.aval.shape for v in eqn.invars]
    out = eqn.outvars[0].aval.shape
    if name in _primitives.ELEMENTWISE:
        # A scalar broadcasts to all rows, and so does an array [1, D].
        alone = (shape for shape, has_rows in zip(shapes, rows) if not has_rows)
        if any(shape and shape[:1] != (1,) for shape in alone):
            return None
        return params

    if name == "dot_general":
        (left, right), batch = params["dimension_numbers"]
        if rows != [True, False] or any(batch) or any(k < count for k in left):
            return None
        left = tuple(k - count for k in left)
        return {**params, "dimension_numbers": (left, tuple(right))}
    if name in _ALONG:
        if not all(rows) or (len(rows) > 1 and name != "concatenate"):
            return None
        axes = params[_ALONG[name]]
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        if any(axis < count for axis in axes):
            return None
        return {**params, _ALONG[name]: tuple(axis - count for axis in axes)}
    if name == "broadcast_in_dim":
        dims, shape = params["broadcast_dimensions"], params["shape"]
        has_rows = rows[0] if rows else False
        if has_rows and dims[:count] != tuple(range(count)):
            return None
        dims = dims[count:] if has_rows else dims
        if any(k < count for k in dims):
            return None
        dims = tuple(k - count for k in dims)
        return {**params, "broadcast_dimensions": dims, "shape": shape[count:]}
    if rows != [True]:
        return None
    first = shapes[0][:count]
    if name == "reshape":
        if out[:count] != first or params["dimensions"] is not None:
            return None
        return {**params, "new_sizes": out[count:]}
    if name == "transpose":
        order = params["permutation"]
        if order[:count] != tuple(range(count)):
            return None
        return {**params, "permutation": tuple(k - count for k in order[count:])}
    if name == "slice":
        if out[:count] != first:
            return None
        return {
            key: None if params[key] is None else tuple(params[key][count:])
            for key in ("start_indices", "limit_indices", "strides")
        }
    return None
