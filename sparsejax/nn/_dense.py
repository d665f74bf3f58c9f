"""Dense: a linear layer on a feature matrix, given as an array or as CSR."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, CSRLike, Initializer, PyTree, Spec
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer, _matrix, _row_ids


_MODES = ("drop", "fill", "clip", "zero", "error")
_HINT = "'drop' skips columns out of range."
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
      use_bias: False for no bias.
      dtype: of the result; None for the promoted dtype of x and the parameters.
        Products and sums are computed in at least float32.
      param_dtype: of the parameters.
      kernel_init, bias_init: initializers `(key, shape, dtype) -> array`.
      sparse_grad: what `sparsejax.nn.tables` returns for the kernel. None lets
        `sparsejax.grad` decide, True requires a sparse gradient (x must then be CSR),
        False always gives a dense gradient.
      mode: what a column of CSR reads. `"drop"`: nothing if it is outside `[0, C)`, and
        NaN if the kernel is a SelectedRows that does not store its row. Or a mode of
        `sparsejax.lookup`, for both: `"fill"` (NaN), `"clip"`, `"zero"` or
        `"error"`.

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
    kernel_init: Initializer = _KERNEL_INIT
    bias_init: Initializer = _BIAS_INIT
    sparse_grad: bool | None = None
    mode: str = "drop"

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        columns, dtype = self.in_features, self.dtype
        if columns is not None:
            columns = _arguments.static_int("in_features", columns, 1)
        if self.sparse_grad is not None:
            _arguments.check_bool("sparse_grad", self.sparse_grad)
        vars(self).update(
            features=_arguments.static_int("features", self.features, 1),
            in_features=columns,
            use_bias=_arguments.check_bool("use_bias", self.use_bias),
            dtype=dtype if dtype is None else _layer.check_dtype("dtype", dtype),
            param_dtype=_layer.check_dtype("param_dtype", self.param_dtype),
            mode=_arguments.check_mode(self.mode, _MODES, _HINT),
        )

    def init(
        self,
        key: jax.Array,
        x: ArrayLike | CSRLike | Spec | None = None,
    ) -> dict[str, jax.Array]:
        """Makes the parameters: `{"kernel": [C, F], "bias": [F]}`.

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
        key = _arguments.as_key(key)
        kernel_key, bias_key = jax.random.split(key)
        columns = self._columns_of(x) if self.in_features is None else self.in_features
        shape, dtype = (columns, self.features), self.param_dtype
        init = self.kernel_init
        params = {"kernel": _layer.draw("kernel_init", init, kernel_key, shape, dtype)}
        if self.use_bias:
            params["bias"] = self.init_bias(bias_key)
        return params

    def init_bias(self, key: jax.Array) -> jax.Array:
        """Makes the bias alone, `[F]`."""
        init, shape, dtype = self.bias_init, (self.features,), self.param_dtype
        return _layer.draw("bias_init", init, key, shape, dtype)

    def _columns_of(self, x: Any) -> int:
        """Counts the columns of an input; raises if that cannot be inferred."""
        shape = () if x is None or isinstance(x, SegmentTensor) else np.shape(x)
        if not shape:
            raise ValueError(
                "the number of columns of x is not known: pass in_features to "
                "sparsejax.nn.Dense, or call init(key, x) with an array, got "
                f"{_arguments.kind_of(x)}."
            )
        return shape[-1]

    def __call__(self, params: PyTree, x: ArrayLike | CSRLike) -> jax.Array:
        """Computes `x @ kernel + bias`.

        Args:
          params: as returned by `init`. The kernel may be a SelectedRows of pulled
            rows.
          x: a numeric array `[..., C]`, or a CSR matrix `[S, C]`: a SegmentTensor with
            one segment per row and values `{"index": int[n], "value": dtype[n]}` (or
            only the indices if all values are one), a scipy CSR matrix, or a BCSR.
            Duplicates are summed; `mode` says what a column outside `[0, C)` reads.

        Returns:
          `[..., F]`, or `[S, F]`.

        Raises:
          TypeError, ValueError: `params` do not match this layer, `x` is not such a
            matrix, or `x` has the wrong number of columns.
        """
        names = ("kernel", "bias") if self.use_bias else ("kernel",)
        _layer.check_params(params, names)
        columns = self.in_features
        if columns is None:
            columns = params["kernel"].shape[0]
        shape = columns, self.features
        kernel = _layer.table_of(params, "kernel", shape, self.sparse_grad)
        x = _matrix.as_matrix(x, columns, self.mode)
        dtype = _matrix.result_dtype(x, kernel, self.dtype)
        out = _matrix.multiply(x, kernel, dtype, self.mode)
        if self.use_bias:
            bias = _layer.parameter(params, "bias", shape[1:])
            out += jnp.expand_dims(bias.astype(out.dtype), range(out.ndim - 1))
        return out.astype(dtype)

    def row_ids(self, x: CSRLike) -> dict[str, Any]:
        """Returns the kernel's rows that the call reads, to pull them from a store.

        Args:
          x: a CSR matrix, as in the call. Its values are not read.

        Returns:
          `{"kernel": integers [n]}`, the column of each element, on the host unless
          traced. -1 stands for an element of no row of x, and in mode `"drop"` or
          `"zero"` for a column out of range. In other modes a column out of range
          stays so (-1 becomes -2), or becomes the nearest one (`"clip"`).

        Raises:
          TypeError, ValueError: `x` is not CSR, or has the wrong number of columns.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> x = sj.SegmentTensor(jnp.array([4, 1, 9, 0]), jnp.array([0, 0, 1, 2]), 2)
          >>> sj.nn.Dense(1, 5, mode="fill").row_ids(x)["kernel"].tolist()
          [4, 1, 9, -1]
        """
        columns = self.in_features
        if columns is None:
            raise ValueError(
                "sparsejax.nn.Dense.row_ids: the number of columns is not known. Pass "
                "in_features."
            )
        x = _matrix.as_elements(x, columns)
        index, _ = _matrix.split(x)
        index = _arguments.as_integers(index, "the index")
        index = _row_ids.on_host(index)
        skip = _row_ids.without_segment(x, index.ndim)
        return {"kernel": _row_ids.row_ids(index, skip, columns, self.mode)}

    def table_prefix(self) -> dict[str, bool | None]:
        """Returns `tables=` of `sparsejax.value_and_grad` for the parameters.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.Dense(1, 1000, sparse_grad=True).table_prefix()
          {'kernel': True, 'bias': False}
        """
        prefix: dict[str, bool | None] = {"kernel": self.sparse_grad}
        return {**prefix, "bias": False} if self.use_bias else prefix
