"""Row layouts: which device owns which rows of a table, and where they lie there.

The rows of all owners in turn are one array `[N * R, ...]`; the place of an id in it is
its *position*. With N owners,

    "mod":      position(id) = (id mod N) * R + id // N,          R = ceil(V / N)
    "block":    position(id) = id,                                R = ceil(V / N)

A `TableWise` layout is for a stack of tables, T_0, ..., T_K, one after the other in one
array. The owners are G groups of m = N / G devices, and each table lies in one group,
its rows divided over the m devices of that group. Row j of table k is at

    position(j + start_k) = (m group_k + j mod m) * R + offset_k + j // m,

where offset_k is the number of rows that a device of the group holds of earlier tables,
and R is the most that any device holds. With m = 1 a table lies whole on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments


_CALL = "sparsejax.parallel.TableWise"


@dataclasses.dataclass(frozen=True, repr=False)
class TableWise:
    """A layout for a stack of tables: each table on one device, or one group of them.

    For `shard_rows(stack, mesh, axis, layout=...)`, where the rows of the stack are
    those of its tables, one after the other, as `sparsejax.nn.EmbeddingCollection` has
    them. Features and bags of fixed length that the collection reads are summed by the
    owner of their table: ids are sent to it and bags come back, instead of rows. The
    plan that `sparsejax.parallel.plan` makes with `stacks=` chooses the groups.

    Args:
      heights: ints, the number of rows of each table, in order.
      groups: ints, the group of each table, from 0 to num_groups - 1.
      num_groups: int, the number of groups, a divisor of the number of devices; for
        whole tables on single devices, the number of devices. The axes of the mesh that
        come first in `axis` must have as many devices: over the others the rows of each
        table are divided. With `axis=("host", "device")` and a group for each host,
        tables are on different hosts, and each host's devices share a table's rows.

    Raises:
      TypeError, ValueError: the lists are empty, differ in length, or hold other
        numbers.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> layout = sj.parallel.TableWise(heights=(5, 3), groups=(0, 0), num_groups=1)
      >>> table = sj.parallel.shard_rows(jnp.ones((8, 2)), mesh, "x", layout=layout)
      >>> table.layout, table[jnp.array([7])]
      (TableWise(tables=2, groups=1), Array([[1., 1.]], dtype=float32))

    References:
      TorchRec, table-wise and table-row-wise sharding.
    """

    heights: tuple[int, ...]
    groups: tuple[int, ...]
    num_groups: int

    def __post_init__(self) -> None:
        count = _arguments.static_int(_CALL, "num_groups", self.num_groups, 1)
        lists = {"heights": self.heights, "groups": self.groups}
        for name, given in lists.items():
            if not isinstance(given, Sequence | np.ndarray) or not len(given):
                raise TypeError(
                    f"{_CALL}: {name} must be ints, one for each table of the stack, "
                    f"got {given!r}."
                )
            ints = (_arguments.static_int(_CALL, name, n, 0) for n in given)
            lists[name] = tuple(ints)
        heights, groups = lists.values()
        if len(heights) != len(groups):
            raise ValueError(
                f"{_CALL}: groups must name one group for each table, {len(heights)} "
                f"in all, got {len(groups)}."
            )
        if max(groups) >= count:
            raise ValueError(
                f"{_CALL}: groups must be less than num_groups, {count}, got "
                f"{max(groups)}."
            )
        vars(self).update(heights=heights, groups=groups, num_groups=count)

    def __repr__(self) -> str:
        return f"TableWise(tables={len(self.heights)}, groups={self.num_groups})"

    @property
    def height(self) -> int:
        """V, the number of rows of the stack."""
        return sum(self.heights)

    @property
    def starts(self) -> np.ndarray:
        """int64, the first row of each table in the stack."""
        return np.cumsum([0, *self.heights[:-1]])

    def table_of(self, row: int) -> int:
        """The number of the table that has a row of the stack."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1


def balance(
    heights: Sequence[int], loads: Sequence[float], num_groups: int
) -> TableWise:
    """The layout whose groups have about equal loads, and equal numbers of rows.

    The tables with the largest load come first, and each goes to the group that is the
    least full with it, by load or by rows, whichever is more.

    Args:
      heights: of the tables.
      loads: of the tables, for example how many of their rows a step reads.
      num_groups: G.
    """
    share = lambda xs: np.asarray(xs, np.float64) / max(1e-9, sum(xs) / num_groups)
    load, rows = share(loads), share(heights)
    full = np.zeros((num_groups, 2))
    groups = np.zeros(len(heights), np.int64)
    for k in sorted(range(len(heights)), key=lambda k: -max(load[k], rows[k])):
        then = full + [load[k], rows[k]]
        groups[k] = np.lexsort((then.sum(1), then.max(1)))[0]
        full[groups[k]] = then[groups[k]]
    return TableWise(tuple(map(int, heights)), tuple(groups.tolist()), num_groups)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The position of each row of a table. A plain array is one "block".

    Args:
      height: V, the number of rows.
      shards: N, the number of parts.
      layout: `"mod"`, `"block"` or a TableWise.
    """

    height: int
    shards: int
    layout: str | TableWise

    @property
    def per_shard(self) -> int:
        """R, the number of rows of each part; at least 1, so that no part is empty."""
        if isinstance(self.layout, TableWise):
            return max(1, int(self._offsets[1].max()))
        return max(1, -(-self.height // self.shards))

    # -- positions of arrays of ids ------------------------------------------------

    def position(self, ids: jax.Array) -> jax.Array:
        """The position of each id in range; of others, any number."""
        if self.layout == "block":
            return ids
        rows = _arguments.scalar(self.per_shard, ids)
        if not isinstance(self.layout, TableWise):
            n = _arguments.scalar(self.shards, ids)
            return jnp.remainder(ids, n) * rows + jnp.floor_divide(ids, n)
        starts, m = self.layout.starts, self._members
        table = _last_at_most(starts, ids)
        first = np.asarray(self.layout.groups) * m * self.per_shard + self._offsets[0]
        ids = ids - _pick(starts, table, ids)
        n = _arguments.scalar(m, ids)
        within = jnp.remainder(ids, n) * rows + jnp.floor_divide(ids, n)
        return _pick(first, table, ids) + within

    def ids_at(self, positions: jax.Array) -> jax.Array:
        """The id at each position in range; for padding, `height` or more."""
        if self.layout == "block":
            return positions
        rows = _arguments.scalar(self.per_shard, positions)
        part, row = jnp.floor_divide(positions, rows), jnp.remainder(positions, rows)
        if not isinstance(self.layout, TableWise):
            return row * _arguments.scalar(self.shards, positions) + part
        m = _arguments.scalar(self._members, positions)
        # Each table is a run of rows of its group, and so a run of these numbers.
        number = jnp.floor_divide(part, m) * rows + row
        first = np.asarray(self.layout.groups) * self.per_shard + self._offsets[0]
        order = np.argsort(first, kind="stable")
        at = _last_at_most(first[order], number)
        pick = lambda xs: _pick(np.asarray(xs)[order], at, positions)
        ids = (number - pick(first)) * m + jnp.remainder(part, m)
        known = (ids >= _arguments.scalar(0, ids)) & (ids < pick(self.layout.heights))
        ids = ids + pick(self.layout.starts)
        return jnp.where(known, ids, _arguments.scalar(self.height, ids))

    def owner_of(self, ids: np.ndarray) -> np.ndarray:
        """The part that has each id in range; runs on the host."""
        if self.layout == "mod":
            return ids % self.shards
        if not isinstance(self.layout, TableWise):
            return ids // self.per_shard
        starts, m = self.layout.starts, self._members
        table = np.searchsorted(starts, ids, side="right") - 1
        return np.asarray(self.layout.groups)[table] * m + (ids - starts[table]) % m

    @property
    def _members(self) -> int:
        """m, the number of parts in a group."""
        assert isinstance(self.layout, TableWise)
        return self.shards // self.layout.num_groups

    @functools.cached_property
    def _offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """By table its first row on the devices of its group; by group its rows."""
        assert isinstance(self.layout, TableWise)
        used = np.zeros(self.layout.num_groups, np.int64)
        offsets = []
        for height, group in zip(self.layout.heights, self.layout.groups):
            offsets.append(used[group])
            used[group] += -(-height // self._members)
        return np.array(offsets), used

    # -- ranges of ids and positions, for files ------------------------------------

    def progression(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """The ids at positions `[start, stop)`, in pieces of equally spaced ids.

        Yields, for each piece, the offset of its first id from `start`, and the ids.
        """
        rows = self.per_shard
        for shard in range(start // rows, -(-stop // rows)):
            low = max(start, shard * rows)
            high = min(stop, (shard + 1) * rows)
            for first, ids in self._part(shard):
                # Of the piece, what lies in [low, high).
                first += shard * rows
                here = ids[max(0, low - first) : max(0, high - first)]
                yield max(low, first) - start, here

    def _part(self, shard: int) -> Iterator[tuple[int, range]]:
        """The pieces of a part: the row of the first id in the part, and the ids."""
        if self.layout == "mod":
            yield 0, range(shard, max(shard, self.height), self.shards)
        elif not isinstance(self.layout, TableWise):
            rows, end = self.per_shard, max(0, self.height)
            yield 0, range(min(end, shard * rows), min(end, (shard + 1) * rows))
        else:
            m = self._members
            tables = zip(self.layout.starts.tolist(), self.layout.heights)
            for k, (start, height) in enumerate(tables):
                if self.layout.groups[k] == shard // m:
                    own = range(start + min(shard % m, height), start + height, m)
                    yield int(self._offsets[0][k]), own

    def runs(self, ids: range) -> Iterator[tuple[slice, slice]]:
        """Equally spaced ids as pairs of slices: of `ids`, and of their positions."""
        if not ids:
            return
        if self.layout == "block" or (self.layout == "mod" and self.shards == 1):
            yield slice(0, len(ids), 1), slice(ids.start, ids[-1] + 1, ids.step)
            return
        if not isinstance(self.layout, TableWise):
            yield from self._runs_of_table(ids, 0, ids, 0, self.shards)
            return
        m, rows = self._members, self.per_shard
        tables = zip(self.layout.starts.tolist(), self.layout.heights)
        for k, (start, height) in enumerate(tables):
            begin = max(0, -(-(start - ids.start) // ids.step))
            own = ids[begin : max(begin, -(-(start + height - ids.start) // ids.step))]
            own = range(own.start - start, own.stop - start, own.step)
            first = self.layout.groups[k] * m * rows + int(self._offsets[0][k])
            if own:
                yield from self._runs_of_table(own, begin, own, first, m)

    def _runs_of_table(
        self, ids: range, begin: int, own: range, first: int, parts: int
    ) -> Iterator[tuple[slice, slice]]:
        # Every `turn`-th id lies in the same part, `distance` rows apart.
        turn = parts // math.gcd(ids.step, parts)
        distance = ids.step * turn // parts
        for k, id_ in enumerate(own[:turn]):
            count = len(range(k, len(own), turn))
            at = first + id_ % parts * self.per_shard + id_ // parts
            end = at + distance * (count - 1) + 1
            yield slice(begin + k, begin + len(own), turn), slice(at, end, distance)


def _last_at_most(ascending: np.ndarray, x: jax.Array) -> jax.Array:
    """The number of the last element that is at most x; 0 if there is none."""
    found = jnp.searchsorted(jnp.asarray(ascending.astype(x.dtype)), x, side="right")
    return jnp.maximum(found - 1, 0)


def _pick(values: Any, at: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.asarray(np.asarray(values).astype(like.dtype))[at]
