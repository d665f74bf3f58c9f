"""Sparse embedding training in JAX: a training step costs what its batch touches.

Two lines change in a training step::

    tx = sj.optim.lazy(tx)                                   # around optax's
    loss, grads = sj.value_and_grad(loss_fn)(params, batch)  # in place of jax's
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)

The gradient of a table that the loss reads by rows is then a
`SelectedRows`, and only those rows of weights and optimizer state are
updated. `help(sj.value_and_grad)` has a complete program, and says which
reads are sparse.

Gradients

- `value_and_grad`, `grad`: as in JAX, with SelectedRows for tables that are
  read by rows.
- `explain`: which leaves get a sparse gradient, and why others do not.
- `DensifyError`: a leaf that `tables=` requires to be sparse cannot be.

Rows of tables

- `lookup`: rows by id; `embedding_bag`: rows of each bag of ids, reduced.
- `SelectedRows`: rows of an array, by id; `concatenate`: the sum of
  several.
- `QuantizedTable`: a table in 8, 4 or 2 bits a number; `quantize` makes it.
- `scatter_assign`, `scatter_weighted_sum`: write rows.
- `unique`, `partition`: distinct ids; ids grouped by shard.
- `dot`: CSR matrix times dense matrix.
- `top_k`: the rows with the highest scores, as in retrieval.
- `HashIndex`: rows for keys that come and go, a vocabulary that grows.

Lists of different lengths

- `SegmentTensor`: one axis of elements, cut into segments of any lengths.
- `segment_sum`, `segment_mean`, `segment_sqrtn`, `segment_prod`,
  `segment_max`, `segment_min`, `segment_all`, `segment_any`,
  `segment_count`, `segment_var`, `segment_std`, `segment_logsumexp`,
  `segment_logmeanexp`: one result per segment.
- `segment_softmax`, `segment_log_softmax`, `segment_normalize`,
  `segment_cumsum`: one result per element.
- `segment_argmax`, `segment_argmin`, `segment_top_k`: positions.
- `lengths_to_offsets`, `lengths_to_ranges`, `lengths_to_segment_ids`,
  `offsets_to_lengths`, `segment_ids_to_lengths`, `segment_ids_to_ranges`:
  conversions.
- `pack_segments`, `unpack_segments`: to padded rows, and back.

Packages, each with its own help, such as `help(sj.optim)`

- `optim`: `lazy`, `exact`, and optimizers that optax does not have.
- `losses`: sampled softmax, in-batch negatives and rankings.
- `nn`: layers, and models whose tables are in a store.
- `data`: data sets, batches of static shape, ids of words.
- `store`: tables in host memory or a file, larger than device memory.
- `parallel`: tables sharded over many devices.
- `desc`: kinds, types and dimensions of variables before there is data.
- `viz`: plots of the rows touched, and of programs.
- `cpu`: memory settings of the process that speed up steps on a CPU.
- `extend`: rules for your own primitives.
- `testing`: `assert_equals_dense`, your model against plain JAX and optax.

A block of `nn` raises `NotPulledError` for a table that it did not declare.
"""

import importlib.metadata as _metadata

from sparsejax import (
    cpu as cpu,
    data as data,
    desc as desc,
    extend as extend,
    losses as losses,
    nn as nn,
    optim as optim,
    parallel as parallel,
    store as store,
    testing as testing,
    viz as viz,
)
from sparsejax._export import register_all as _register_all
from sparsejax._index import HashIndex as HashIndex
from sparsejax._lookup.dot import dot as dot
from sparsejax._lookup.embedding_bag import embedding_bag as embedding_bag
from sparsejax._lookup.lookup import lookup as lookup
from sparsejax._lookup.top_k import top_k as top_k
from sparsejax._rows import (
    QuantizedTable as QuantizedTable,
    SelectedRows as SelectedRows,
    concatenate as concatenate,
    quantize as quantize,
)
from sparsejax._rows.scatter import (
    scatter_assign as scatter_assign,
    scatter_weighted_sum as scatter_weighted_sum,
)
from sparsejax._segments import SegmentTensor as SegmentTensor
from sparsejax._segments.conversions import (
    lengths_to_offsets as lengths_to_offsets,
    lengths_to_ranges as lengths_to_ranges,
    lengths_to_segment_ids as lengths_to_segment_ids,
    offsets_to_lengths as offsets_to_lengths,
    segment_ids_to_lengths as segment_ids_to_lengths,
    segment_ids_to_ranges as segment_ids_to_ranges,
)
from sparsejax._segments.pack import (
    pack_segments as pack_segments,
    unpack_segments as unpack_segments,
)
from sparsejax._segments.reduce.cumulative import segment_cumsum as segment_cumsum
from sparsejax._segments.reduce.exponentials import (
    segment_log_softmax as segment_log_softmax,
    segment_logmeanexp as segment_logmeanexp,
    segment_logsumexp as segment_logsumexp,
    segment_softmax as segment_softmax,
)
from sparsejax._segments.reduce.extremes import (
    segment_argmax as segment_argmax,
    segment_argmin as segment_argmin,
    segment_max as segment_max,
    segment_min as segment_min,
    segment_top_k as segment_top_k,
)
from sparsejax._segments.reduce.moments import (
    segment_normalize as segment_normalize,
    segment_std as segment_std,
    segment_var as segment_var,
)
from sparsejax._segments.reduce.sums import (
    segment_all as segment_all,
    segment_any as segment_any,
    segment_count as segment_count,
    segment_mean as segment_mean,
    segment_prod as segment_prod,
    segment_sqrtn as segment_sqrtn,
    segment_sum as segment_sum,
)
from sparsejax._segments.unique import partition as partition, unique as unique
from sparsejax.nn._block import NotPulledError as NotPulledError
from sparsejax.transform import (
    DensifyError as DensifyError,
    explain as explain,
    grad as grad,
    value_and_grad as value_and_grad,
)


# jax.export needs a name for each of our types in the arguments of a program.
_register_all()

try:
    __version__ = _metadata.version("sparsejax")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
