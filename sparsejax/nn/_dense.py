"""Dense: a linear layer on a feature matrix, given as an array or as CSR."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, CSRLike, PyTree, Spec
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer, _matrix


_CALL = "sparsejax.nn.Dense"
_KERNEL_INIT: Any = jax.nn.initializers.lecun_normal()
_BIAS_INIT: Any = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True, repr=False)
class Dense:
    """A linear layer on arrays, or on CSR with a row-sparse gradient.

    `out = x @ kernel + bias`. If x is CSR, only the rows of `kernel` for columns that
    occur in x are read, and under `sparsejax.grad` the kernel's gradient is a
    SelectedRows of those rows. With `features=1` the outputs are the logits of a
    logistic regression.

    Args:
      features: int F, the number of output columns.
      in_features: int C, the number of columns of x; None to infer it from the x passed
        to `init`.
      use_bias: whether to add a bias.
      dtype: of the result; None for the promoted dtype of x and the parameters.
        Products and sums are computed in at least float32.
      param_dtype: of the parameters.
      kernel_init, bias_init: initializers `(key, shape, dtype) -> array`.
      sparse_grad: what `sparsejax.nn.tables` returns for the kernel. None lets
        `sparsejax.grad` decide, True requires a sparse gradient (x must then be CSR),
        False always gives a dense gradient.

    Raises:
      TypeError, ValueError: a field has the wrong type, or a size is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> layer = sj.nn.Dense(1, 1000, kernel_init=jax.nn.initializers.ones)
      >>> params = layer.init(jax.random.key(0))
      >>> index, value = jnp.array([7, 3, 7]), jnp.array([1.0, 2.0, 3.0])
      >>> elements = {"index": index, "value": value}
      >>> x = sj.SegmentTensor.from_lengths(elements, jnp.array([2, 1]))
      >>> layer(params, x)
      Array([[3.],
             [3.]], dtype=float32)
      >>> sj.grad(lambda p: jnp.sum(layer(p, x)))(params)["kernel"].rows
      Array([7, 3, 7], dtype=int32)

    References:
      Gluon, `SparseLinear` of the sparse API's design; MXNet, `sparse.dot`.
    """

    features: int
    in_features: int | None = None
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.dtype("float32")
    kernel_init: _layer.Initializer = _KERNEL_INIT
    bias_init: _layer.Initializer = _BIAS_INIT
    sparse_grad: bool | None = None

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        columns, dtype = self.in_features, self.dtype
        _layer.check_bool(_CALL, "use_bias", self.use_bias)
        _layer.check_bool(_CALL, "sparse_grad", self.sparse_grad, or_none=True)
        for name in ("kernel_init", "bias_init"):
            _layer.check_initializer(_CALL, name, getattr(self, name))
        if columns is not None:
            columns = _layer.check_size(_CALL, "in_features", columns)
        _layer.set_fields(
            self,
            features=_layer.check_size(_CALL, "features", self.features),
            in_features=columns,
            dtype=dtype if dtype is None else _layer.check_dtype(_CALL, "dtype", dtype),
            param_dtype=_layer.check_dtype(_CALL, "param_dtype", self.param_dtype),
        )

    def init(
        self,
        key: jax.Array,
        x: ArrayLike | CSRLike | Spec | None = None,
    ) -> dict[str, jax.Array]:
        """The parameters: `{"kernel": [C, F], "bias": [F]}`.

        Args:
          key: PRNG key.
          x: an input (an array, or a scipy CSR or BCSR matrix), or its shape and dtype.
            C is inferred from it if `in_features` is None.

        Raises:
          ValueError: `in_features` is None, and C cannot be inferred from `x`.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> params = sj.nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 30)))
          >>> params["kernel"].shape, params["bias"].shape
          ((30, 4), (4,))
        """
        key = _arguments.as_key(f"{_CALL}.init", key)
        kernel_key, bias_key = jax.random.split(key)
        columns = self._columns_of(x) if self.in_features is None else self.in_features
        shape, dtype = (columns, self.features), self.param_dtype
        draw = functools.partial(_layer.draw, _CALL)
        params = {
            "kernel": draw("kernel_init", self.kernel_init, kernel_key, shape, dtype)
        }
        if self.use_bias:
            bias = draw("bias_init", self.bias_init, bias_key, shape[1:], dtype)
            params["bias"] = bias
        return params

    def _columns_of(self, x: Any) -> int:
        """The number of columns of an input; raises if it cannot be inferred."""
        if x is None:
            found = "neither in_features nor x was given"
        elif isinstance(x, SegmentTensor):
            found = "a SegmentTensor does not store its number of columns"
        else:
            shape = x.shape if hasattr(x, "shape") else np.shape(x)
            if shape:
                return _layer.check_size(f"{_CALL}.init", "in_features", shape[-1])
            found = f"x is {_arguments.kind_of(x)}"
        raise ValueError(
            f"{_CALL}.init: cannot infer the number of columns of x: {found}. Pass "
            "in_features to Dense, or call init(key, x) with an array."
        )

    def __call__(self, params: PyTree, x: ArrayLike | CSRLike) -> jax.Array:
        """`x @ kernel + bias`.

        Args:
          params: as returned by `init`. The kernel may be a SelectedRows of pulled
            rows; a column whose row it does not store reads NaN.
          x: a numeric array `[..., C]`, or a CSR matrix `[S, C]`: a SegmentTensor with
            one segment per row and values `{"index": int[n], "value": dtype[n]}` (or
            only the indices if all values are one), a scipy CSR matrix, or a BCSR.
            Duplicates are summed; a column outside `[0, C)` contributes zero.

        Returns:
          `[..., F]`, or `[S, F]`.

        Raises:
          TypeError, ValueError: `params` do not match this layer, `x` is not such a
            matrix, or `x` has the wrong number of columns.
        """
        names = ("kernel", "bias") if self.use_bias else ("kernel",)
        params = _layer.check_params(_CALL, params, names)
        columns = self.in_features
        if columns is None:
            found = getattr(params["kernel"], "shape", ())
            if not found:
                raise TypeError(
                    f"{_CALL}: params['kernel'] must be an array of shape "
                    f"[in_features, {self.features}], got "
                    f"{_arguments.kind_of(params['kernel'])}."
                )
            columns = found[0]
        shape = columns, self.features
        kernel = _layer.table_of(_CALL, params, "kernel", shape, self.sparse_grad)
        x = _matrix.as_matrix(_CALL, x, columns)
        dtype = _matrix.result_dtype(x, kernel, self.dtype)
        out = _matrix.multiply(_CALL, x, kernel, "kernel", dtype)
        if self.use_bias:
            bias = _layer.parameter(_CALL, params, "bias", shape[1:])
            out = _layer.add_bias(out, bias)
        return out.astype(dtype)

    def table_prefix(self) -> dict[str, bool | None]:
        """The `tables=` argument of `sparsejax.value_and_grad` for the parameters.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.Dense(1, 1000, sparse_grad=True).table_prefix()
          {'kernel': True, 'bias': False}
        """
        prefix: dict[str, bool | None] = {"kernel": self.sparse_grad}
        return {**prefix, "bias": False} if self.use_bias else prefix
