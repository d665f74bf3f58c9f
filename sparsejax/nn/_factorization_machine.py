"""FactorizationMachine: all pairwise interactions, computed in linear time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, CSRLike, PyTree
from sparsejax._rows import indexing
from sparsejax.nn import _layer, _matrix


_CALL = "sparsejax.nn.FactorizationMachine"
_LINEAR_INIT: Any = jax.nn.initializers.zeros
_FACTOR_INIT: Any = jax.nn.initializers.normal(0.01)


@dataclasses.dataclass(frozen=True, repr=False)
class FactorizationMachine:
    """A linear model plus a low-rank model of all pairs of features.

    Each feature c has a row `v_c` of R factors:

      `out = bias + sum_c w_c x_c + sum_{c < d} <v_c, v_d> x_c x_d`

    The last sum equals `(sum_c v_c x_c)^2 - sum_c (v_c x_c)^2`, halved and summed over
    the R factors, so one pass over the features computes it. If x is CSR, only the rows
    of `w` and `v` for columns that occur in x are read, and under `sparsejax.grad`
    their gradients are SelectedRows.

    Args:
      in_features: int C, the number of columns of x.
      rank: int R, the number of factors per feature.
      outputs: int O for a result `[..., O]`, with separate weights and factors for each
        output; None for a single output `[...]`.
      use_bias: whether to add a bias.
      use_linear: whether to include the linear term.
      dtype: of the result; None for the promoted dtype of x and the parameters.
        Products and sums are computed in at least float32.
      param_dtype: of the parameters.
      factor_init, linear_init, bias_init: initializers `(key, shape, dtype) -> array`.
        Zero factors have zero gradients, so do not initialize all of them to zero.
      sparse_grad: what `sparsejax.nn.tables` returns for weights and factors. None lets
        `sparsejax.grad` decide, True requires sparse gradients (x must then be CSR),
        False always gives dense gradients.

    Raises:
      TypeError, ValueError: a field has the wrong type, or a size is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> ones = jax.nn.initializers.ones
      >>> layer = sj.nn.FactorizationMachine(1000, 2, factor_init=ones)
      >>> params = layer.init(jax.random.key(0))
      >>> index, value = jnp.array([7, 3, 9]), jnp.array([1.0, 2.0, 5.0])
      >>> elements = {"index": index, "value": value}
      >>> x = sj.SegmentTensor.from_lengths(elements, jnp.array([2, 1]))
      >>> layer(params, x)
      Array([4., 0.], dtype=float32)
      >>> sj.grad(lambda p: jnp.sum(layer(p, x)))(params)["factors"].rows
      Array([7, 3, 9], dtype=int32)

    References:
      Rendle, 2010, "Factorization Machines".
    """

    in_features: int
    rank: int
    outputs: int | None = None
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    use_linear: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.dtype("float32")
    factor_init: _layer.Initializer = _FACTOR_INIT
    linear_init: _layer.Initializer = _LINEAR_INIT
    bias_init: _layer.Initializer = _LINEAR_INIT
    sparse_grad: bool | None = None

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        outputs, dtype = self.outputs, self.dtype
        for name in ("use_bias", "use_linear"):
            _layer.check_bool(_CALL, name, getattr(self, name))
        _layer.check_bool(_CALL, "sparse_grad", self.sparse_grad, or_none=True)
        for name in ("factor_init", "linear_init", "bias_init"):
            _layer.check_initializer(_CALL, name, getattr(self, name))
        if outputs is not None:
            outputs = _layer.check_size(_CALL, "outputs", outputs)
        _layer.set_fields(
            self,
            in_features=_layer.check_size(_CALL, "in_features", self.in_features),
            rank=_layer.check_size(_CALL, "rank", self.rank),
            outputs=outputs,
            dtype=dtype if dtype is None else _layer.check_dtype(_CALL, "dtype", dtype),
            param_dtype=_layer.check_dtype(_CALL, "param_dtype", self.param_dtype),
        )

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """The parameters: `{"factors": [C, R], "linear": [C, 1], "bias": []}`.

        If `outputs` is set, factors are `[C, O, R]`, weights `[C, O]`, and the bias
        `[O]`.

        Args:
          key: PRNG key.

        Raises:
          TypeError: `key` is not a PRNG key.

        Example:
          >>> import jax, sparsejax as sj
          >>> layer = sj.nn.FactorizationMachine(30, 4)
          >>> {k: v.shape for k, v in layer.init(jax.random.key(0)).items()}
          {'factors': (30, 4), 'linear': (30, 1), 'bias': ()}
        """
        shapes = self._shapes()
        keys = jax.random.split(_arguments.as_key(f"{_CALL}.init", key), 3)
        fields = {
            "factors": "factor_init",
            "linear": "linear_init",
            "bias": "bias_init",
        }
        params = {}
        for (name, field), k in zip(fields.items(), keys):
            if name in shapes:
                make, dtype = getattr(self, field), self.param_dtype
                params[name] = _layer.draw(_CALL, field, make, k, shapes[name], dtype)
        return params

    def __call__(self, params: PyTree, x: ArrayLike | CSRLike) -> jax.Array:
        """The prediction for each row of x.

        Args:
          params: as returned by `init`. Weights and factors may be SelectedRows of
            pulled rows; a column whose row they do not store reads NaN.
          x: a numeric array `[..., C]`, or a CSR matrix `[S, C]` as in
            `sparsejax.nn.Dense`. A column that occurs twice in a row counts as two
            features with the same weights, so their pair counts too.

        Returns:
          `[...]` or `[S]`; if `outputs` is set, `[..., O]` or `[S, O]`.

        Raises:
          TypeError, ValueError: `params` do not match this layer, `x` is not such a
            matrix, or `x` has the wrong number of columns.
        """
        shapes = self._shapes()
        params = _layer.check_params(_CALL, params, tuple(shapes))
        table = lambda name: _layer.table_of(
            _CALL, params, name, shapes[name], self.sparse_grad
        )
        x = _matrix.as_matrix(_CALL, x, self.in_features)
        factors = table("factors")
        dtype = _matrix.result_dtype(x, factors, self.dtype)
        out = _sum_of_pairs(x, factors, indexing.accumulator_dtype(dtype))
        if self.use_linear:
            linear = _matrix.multiply(_CALL, x, table("linear"), "linear", dtype)
            out += linear.reshape(out.shape)
        if self.use_bias:
            bias = _layer.parameter(_CALL, params, "bias", shapes["bias"])
            out = _layer.add_bias(out, bias)
        return out.astype(dtype)

    def table_prefix(self) -> dict[str, bool | None]:
        """The `tables=` argument of `sparsejax.value_and_grad` for the parameters.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.FactorizationMachine(1000, 2, sparse_grad=True).table_prefix()
          {'factors': True, 'linear': True, 'bias': False}
        """
        return {
            name: False if name == "bias" else self.sparse_grad
            for name in self._shapes()
        }

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        own = () if self.outputs is None else (self.outputs,)
        shapes: dict[str, tuple[int, ...]] = {
            "factors": (self.in_features, *own, self.rank)
        }
        if self.use_linear:
            # Each row is a single number; the second axis makes it a table, which can
            # get sparse gradients.
            shapes["linear"] = (self.in_features, *(own or (1,)))
        if self.use_bias:
            shapes["bias"] = own
        return shapes


def _sum_of_pairs(x: Any, factors: Any, dtype: Any) -> jax.Array:
    """The sum over all pairs of features, in `dtype`: `[...]` or `[..., O]`."""
    if isinstance(x, _matrix.Csr):
        rows = _matrix.scale(x, _matrix.read(_CALL, x, factors), dtype)
        sums = _matrix.sum_segments(x, jnp.stack([rows, rows * rows], axis=1))
        total, squares = sums[:, 0], sums[:, 1]
    else:
        v = _matrix.whole(_CALL, factors, "factors").astype(dtype)
        x = x.astype(dtype)
        total = jnp.tensordot(x, v, axes=1)
        squares = jnp.tensordot(x * x, v * v, axes=1)
    return 0.5 * jnp.sum(total * total - squares, axis=-1)
