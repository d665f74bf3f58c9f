"""NegativeSampler: draws ids on the device, with the log of their expected counts.

A sampler is a distribution over `[0, V)`. The uniform and the log-uniform distribution
have formulas; a distribution of counts has an alias table (Walker, 1977). The table has
V equal cells with at most two ids each, the cell's own id and its alias, so a draw
reads one cell and makes one comparison for any V. It is built once, on the host, in
float64.

Sharp edge: if a jitted function closes over a sampler, the V numbers of the table
become a constant of the program. Pass the sampler as an argument.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing


# After this many rounds of draws, a slot without an id stays empty.
_MAX_ROUNDS = 64
# An octave [2^j, 2^(j + 1)) of the log-uniform distribution is divided into 2^12 parts
# of constant density. float32 has 2048 numbers per part, so rounding does not matter.
_PART_BITS = 12


class NegativeSamples(NamedTuple):
    """Ids that were drawn, and the logs of their expected counts.

    Args:
      ids: int `[..., n]`; -1 in a slot that could not be filled, which losses skip.
      log_q: float32 `[..., n]`, log of the expected number of occurrences of each id in
        the sample; 0 for a slot without an id.
      label_log_q: float32, the same for each label; None without labels.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> sampler = sj.losses.NegativeSampler.uniform(100)
      >>> sample = sampler.sample(jax.random.key(0), 5, labels=jnp.array([7, 3]))
      >>> jnp.exp(sample.label_log_q)  # 5 draws among 100 ids
      Array([0.05, 0.05], dtype=float32)
    """

    ids: jax.Array
    log_q: jax.Array
    label_log_q: jax.Array | None = None


class AliasTable(NamedTuple):
    """A distribution of counts: V cells, each with its own id and an alias.

    Args:
      threshold: uint32 `[V]`; a cell yields its own id with probability
        `threshold / 2**32`.
      alias: int `[V]`, the id that the cell yields otherwise.
      log_probs: float32 `[V]`, log probability of each id, -inf if it is never drawn.
      lowest: float32, the lowest of `log_probs` that is finite.
    """

    threshold: jax.Array
    alias: jax.Array
    log_probs: jax.Array
    lowest: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NegativeSampler:
    """A distribution over ids, from which a jitted step draws negatives.

    `uniform`, `log_uniform` and `from_counts` create one. It is a pytree: pass it to a
    jitted function as an argument. (If the function closes over it, its arrays become
    constants of the program.)

    Args:
      num_ids: int V; ids are in `[0, V)`.
      distribution: `"uniform"`, `"log_uniform"` or `"counts"`.
      table: arrays `[V]` of the alias table of counts; otherwise None.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> sampler = sj.losses.NegativeSampler.from_counts([8, 0, 1, 1], power=1.0)
      >>> sampler
      NegativeSampler(counts of 4 ids)
      >>> ids = sampler.sample(jax.random.key(0), 1000).ids
      >>> jnp.round(jnp.bincount(ids, length=4) / 1000, 1)
      Array([0.8, 0. , 0.1, 0.1], dtype=float32)

    References:
      TensorFlow, `tf.random.uniform_candidate_sampler`,
      `log_uniform_candidate_sampler` and `fixed_unigram_candidate_sampler`; Mikolov et
      al., 2013, "Distributed Representations of Words and Phrases" (power 0.75);
      Walker, 1977, "An Efficient Method for Generating Discrete Random Variables".
    """

    num_ids: int = dataclasses.field(metadata={"static": True})
    distribution: str = dataclasses.field(default="uniform", metadata={"static": True})
    table: AliasTable | None = None

    def __post_init__(self) -> None:
        if self.distribution not in ("uniform", "log_uniform", "counts"):
            raise ValueError(
                "distribution must be 'uniform', 'log_uniform' or 'counts', got "
                f"{self.distribution!r}. Use a maker, such as .uniform(num_ids)."
            )

    # -- makers ------------------------------------------------------------------

    @classmethod
    def uniform(cls, num_ids: int) -> Self:
        """Makes a sampler in which each id has probability `1 / V`.

        Args:
          num_ids: int V.
        """
        return cls(_check_num_ids(num_ids), "uniform")

    @classmethod
    def log_uniform(cls, num_ids: int) -> Self:
        """Makes a Zipfian sampler, `log((id + 2) / (id + 1)) / log(V + 1)`.

        Ids must be sorted by frequency: id 0 is the most frequent. No array is stored.

        Args:
          num_ids: int V.
        """
        return cls(_check_num_ids(num_ids), "log_uniform")

    @classmethod
    def from_counts(cls, counts: ArrayLike, power: float = 0.75) -> Self:
        """Makes a sampler with probabilities proportional to `counts[id] ** power`.

        Args:
          counts: numbers `[V]` on the host, for example `Vocabulary.counts(column)`. An
            id with count 0 is never drawn; a label with count 0 has the `log_prob` of
            the rarest id that is drawn.
          power: 0.75 for negatives, as in word2vec; 1 for the frequencies of the data,
            which in-batch negatives have.

        Raises:
          ValueError: counts are negative, not finite, all 0, or not `[V]`; or `power`
            is negative or infinite.
        """
        counts = _check_counts(counts)
        if not 0 <= power < np.inf:
            raise ValueError(
                f"power must be a finite number of 0 or more, got {power}. 0.75 is the "
                "power of word2vec; 1 keeps the frequencies of the data."
            )
        weights = np.where(counts > 0, counts**power, 0.0)
        total = weights.sum()
        if not 0 < total < np.inf:
            raise ValueError(
                f"counts ** power must have a positive, finite sum, got {total} for "
                f"power={power}. Pass counts that are not all 0."
            )
        probs = weights / total
        threshold, alias = _alias_table(probs)
        with np.errstate(divide="ignore"):
            log_probs = np.log(probs).astype(np.float32)
        lowest = log_probs[probs > 0].min()
        alias = alias.astype(_arguments.index_dtype(len(probs)))
        table = AliasTable(*map(jnp.asarray, (threshold, alias, log_probs, lowest)))
        return cls(len(probs), "counts", table)

    # -- use ---------------------------------------------------------------------

    def sample(
        self,
        key: jax.Array,
        shape: int | Sequence[int],
        labels: ArrayLike | None = None,
        *,
        unique: bool = False,
        exclude: ArrayLike | None = None,
    ) -> NegativeSamples:
        """Draws ids, and returns them with the logs of their expected counts.

        The last axis of `shape` is a sample of n ids; the other axes are independent
        samples. The expected count of an id with probability p is `n p`. With `unique`,
        the ids of a sample are distinct: draws are repeated until n distinct ids are
        found in t draws, and an id is in the sample with probability `1 - (1 - p)^t`.
        With `exclude`, the probabilities of the other ids are scaled to sum to one.

        With `unique` or `exclude`, up to 64 n ids are drawn. An id that is still
        missing is -1: n is too close to the number of ids that can be drawn.

        Args:
          key: a PRNG key.
          shape: int n, or a tuple `(..., n)`.
          labels: ints `[*lead, ...]` whose expected counts are also returned; `lead`
            are the axes of `shape` before the last. Pass the labels that are passed to
            the loss, which checks only their shape.
          unique: if True, the ids of a sample are distinct.
          exclude: ints `[E]` or `[*lead, E]` that must not be drawn, such as the items
            that a user has seen. Ids out of range, such as -1 for padding, are ignored.
            Each draw is compared with E ids.

        Returns:
          `NegativeSamples(ids, log_q, label_log_q)`.

        Raises:
          TypeError: `key` is not a PRNG key, or ids are not integers.
          ValueError: `shape` is not a positive int or a tuple that ends with one, other
            shapes do not match, or `unique` is set and n exceeds V.
        """
        key, shape = _arguments.as_key(key), _check_shape(shape)
        if _arguments.check_bool("unique", unique) and shape[-1] > self.num_ids:
            raise ValueError(
                f"{shape[-1]} distinct ids do not exist in {self.num_ids}. Draw fewer."
            )
        log_kept = jnp.zeros((1,) * len(shape), jnp.float32)
        if exclude is not None:
            exclude = self._check_exclude(exclude, shape)
            log_kept = self._log_kept(exclude)
        if labels is not None:
            labels = _arguments.as_ids(labels, self.num_ids, "labels")
            if labels.shape[: len(shape) - 1] != shape[:-1]:
                raise ValueError(
                    f"labels must begin with the axes {shape[:-1]}, all axes of "
                    f"shape={shape} but the last, got labels of shape {labels.shape}."
                )
        tries = None
        if unique or exclude is not None:
            ids, tries = self._draw_until_full(key, shape, unique, exclude)
        else:
            ids = self._draw(key, shape)

        def log_expected(ids):
            """Returns the log of the expected count of ids `[*lead, ...]`."""
            like = lambda x: x.reshape(*x.shape[:-1], *(1,) * (ids.ndim - x.ndim + 1))
            log_p = self.log_prob(ids) - like(log_kept)
            if not unique:
                return log_p + np.float32(math.log(shape[-1]))
            never = like(tries) * jnp.log1p(-jnp.minimum(jnp.exp(log_p), 1))
            return jnp.log(-jnp.expm1(never))

        label_log_q = None if labels is None else log_expected(labels)
        log_q = jnp.where(ids < 0, 0, log_expected(ids))
        return NegativeSamples(ids, log_q, label_log_q)

    def log_prob(self, ids: ArrayLike) -> jax.Array:
        """Returns the log of the probability of each id in one draw.

        Args:
          ids: ints of any shape.

        Returns:
          float32 of the same shape; NaN for an id out of range.
        """
        ids = _arguments.as_ids(ids, self.num_ids)
        inside = indexing.in_range(ids, self.num_ids)
        if self.table is not None:
            args = indexing.take_rows, self.table.log_probs, ids
            log_p = indexing.sharded_like_ids(*args, ndim=ids.ndim)
            log_p = jnp.maximum(log_p, self.table.lowest)
        elif self.distribution == "log_uniform":
            safe = jnp.maximum(ids, 0).astype(jnp.float32)
            log_p = jnp.log(jnp.log1p(1 / (safe + 1)) / math.log(self.num_ids + 1))
        else:
            log_p = jnp.full(ids.shape, -math.log(self.num_ids), jnp.float32)
        return jnp.where(inside, log_p, jnp.nan)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.distribution} of {self.num_ids} ids)"

    # -- private -----------------------------------------------------------------

    def _draw(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draws independent ids of that shape."""
        dtype = _arguments.index_dtype(self.num_ids)
        if self.distribution == "log_uniform":
            return _draw_log_uniform(key, shape, self.num_ids, dtype)
        if self.table is None:
            return jax.random.randint(key, shape, 0, self.num_ids, dtype)
        of_cell, of_bits = jax.random.split(key)
        cell = jax.random.randint(of_cell, shape, 0, self.num_ids, dtype)
        bits = jax.random.bits(of_bits, shape, jnp.uint32)
        keeps_cell = bits < indexing.take_rows(self.table.threshold, cell)
        return jnp.where(keeps_cell, cell, indexing.take_rows(self.table.alias, cell))

    def _draw_until_full(
        self, key: jax.Array, shape: tuple[int, ...], unique: bool, exclude: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Draws ids of that shape, and counts the draws, `[*lead, 1]`."""

        def draw(state):
            turn, ids, tries = state
            drawn = self._draw(jax.random.fold_in(key, turn), shape)
            if exclude is not None:
                hits = jnp.any(drawn[..., None] == exclude[..., None, :], -1)
                drawn = jnp.where(hits, _arguments.scalar(-1, drawn), drawn)
            if unique:
                ids, used = _keep_distinct(ids, drawn)
                return turn + 1, ids, tries + used
            return turn + 1, jnp.where(ids < 0, drawn, ids), tries

        def is_short(state):
            turn, ids, _ = state
            return (turn < _MAX_ROUNDS) & jnp.any(ids < 0)

        none = jnp.full(shape, -1, _arguments.index_dtype(self.num_ids))
        tries = jnp.zeros((*shape[:-1], 1), jnp.float32)
        # The first round is before the loop, so that the carry has the type of draws:
        # inside `shard_map` draws vary over the axes of the key, and zeros do not.
        state = draw((jnp.int32(0), none, tries))
        _, ids, tries = lax.while_loop(is_short, draw, state)
        return ids, tries

    def _check_exclude(self, exclude: Any, shape: tuple[int, ...]) -> jax.Array:
        """Sorts `exclude` as ids `[*lead, E]`; duplicates become out of range."""
        exclude = _arguments.as_ids(exclude, self.num_ids, "exclude")
        if exclude.ndim == 1:
            exclude = exclude.reshape((1,) * (len(shape) - 1) + exclude.shape)
        elif exclude.shape[:-1] != shape[:-1]:
            raise ValueError(
                f"exclude must be [E], or [..., E] with the axes {shape[:-1]} of "
                f"shape={shape}, got shape {exclude.shape}."
            )
        exclude = jnp.sort(exclude, axis=-1)
        again = exclude[..., 1:] == exclude[..., :-1]
        again = jnp.pad(again, [(0, 0)] * (exclude.ndim - 1) + [(1, 0)])
        return jnp.where(again, _arguments.scalar(self.num_ids, exclude), exclude)

    def _log_kept(self, exclude: jax.Array) -> jax.Array:
        """Returns the log-probability that a draw is not excluded, `[*lead, 1]`."""
        log_probs = self.log_prob(exclude)
        if self.table is not None:  # -inf for an id that is never drawn
            log_probs = indexing.take_rows(self.table.log_probs, exclude)
        inside = indexing.in_range(exclude, self.num_ids)
        probs = jnp.where(inside, jnp.exp(log_probs), 0)
        kept = 1 - jnp.sum(probs, axis=-1, keepdims=True)
        return jnp.log(jnp.maximum(kept, jnp.finfo(jnp.float32).tiny))


# ------------------------------------------------------------------ drawing


def _draw_log_uniform(
    key: jax.Array, shape: tuple[int, ...], num_ids: int, dtype: Any
) -> jax.Array:
    """Draws ids with density `1 / (id + 1)`.

    With one float32 u, the floor of `exp(u * log(V + 1))` never reaches most of a
    million ids. So one random number selects an octave `[2^j, 2^(j + 1))` of `id + 1`,
    a second one a part of the octave, and a third one an id of the part.
    """
    octaves = num_ids.bit_length()
    of_octave, of_part, of_rest = jax.random.split(key, 3)
    limits = np.log(2.0 ** np.arange(1, octaves)) / math.log(num_ids + 1) * 2.0**32
    bits = jax.random.bits(of_octave, shape, jnp.uint32)
    octave = jnp.searchsorted(
        jnp.asarray(limits.astype(np.uint32)), bits, side="right", method="compare_all"
    ).astype(dtype)
    # The last octave ends before V + 1.
    width = math.log((num_ids + 1) / 2.0 ** (octaves - 1))
    width = jnp.where(octave == octaves - 1, np.float32(width), np.float32(np.log(2)))
    share = jnp.expm1(jax.random.uniform(of_part, shape, jnp.float32) * width)
    one = jnp.ones((), dtype)
    part_bits = jnp.minimum(octave, _PART_BITS)
    parts = one << part_bits
    part = (share * parts.astype(jnp.float32)).astype(dtype)
    part = jnp.minimum(part, parts - 1)  # expm1 may round up
    number = (one << octave) + (part << (octave - part_bits))
    if octaves - 1 > _PART_BITS:
        size = jnp.minimum(one << (octave - part_bits), num_ids - number + 1)
        number += jax.random.randint(of_rest, shape, 0, jnp.maximum(size, 1), dtype)
    return jnp.minimum(number, num_ids) - 1


def _keep_distinct(ids: jax.Array, drawn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keeps the first n distinct ids of `ids` and `drawn`, and counts the draws used.

    Both are `[..., n]`, and -1 stands for no id. `ids` are distinct, then -1.
    """
    n = ids.shape[-1]
    both = jnp.concatenate([ids, drawn], axis=-1)
    order = jnp.argsort(both, axis=-1, stable=True)
    ascending = jnp.take_along_axis(both, order, axis=-1)
    is_first = (ascending[..., 1:] != ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    is_first = jnp.concatenate([ascending[..., :1] >= 0, is_first], axis=-1)
    place = lax.broadcasted_iota(jnp.int32, both.shape, both.ndim - 1)
    # Positions of first occurrences, in the order of the draws, then 2 n.
    chosen = jnp.sort(jnp.where(is_first, order, 2 * n), axis=-1)[..., :n]
    kept = jnp.take_along_axis(both, jnp.minimum(chosen, 2 * n - 1), axis=-1)
    kept = jnp.where(chosen < 2 * n, kept, _arguments.scalar(-1, kept))
    used = (place >= n) & (place <= chosen[..., -1:]) & (both >= 0)
    return kept, jnp.sum(used, axis=-1, keepdims=True, dtype=jnp.float32)


# ------------------------------------------------------------------ the alias table


def _alias_table(probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `threshold` (uint32) and `alias` for probabilities that sum to one.

    Each cell is filled to 1 / V: a light id (below 1 / V) leaves a gap, and a heavy id
    fills it. Light and heavy ids are taken in order. If the excess of a heavy id is
    used up, the id is light itself, and the next heavy id fills its gap. So the
    cumulative sums of gaps and excesses determine the alias of each cell without a
    loop.
    """
    share = probs * len(probs)
    is_light = share < 1
    is_light[np.argmax(share)] = False  # rounding may make all of them light
    light, heavy = np.flatnonzero(is_light), np.flatnonzero(~is_light)
    gaps = np.concatenate([[0.0], np.cumsum(1 - share[light])])
    excess = np.cumsum(share[heavy] - 1)

    alias = np.arange(len(probs))
    by = np.searchsorted(excess, gaps[:-1], side="right")
    alias[light] = heavy[np.minimum(by, len(heavy) - 1)]
    alias[heavy[:-1]] = heavy[1:]
    # The last gap that a heavy id began to fill took more than its remaining excess.
    begun = np.searchsorted(gaps[:-1], excess, side="left")
    share[heavy] = 1 - (gaps[begun] - excess)
    share[heavy[-1]] = 1
    threshold = np.clip(np.rint(share * 2.0**32), 0, 2**32 - 1)
    return threshold.astype(np.uint32), alias


# ------------------------------------------------------------------ checks


def _check_num_ids(num_ids: Any) -> int:
    num_ids = _arguments.static_int("num_ids", num_ids, 1)
    _arguments.index_dtype(num_ids)  # raises for ids that JAX cannot hold
    return num_ids


def _check_shape(shape: Any) -> tuple[int, ...]:
    size = lambda n: n if _compat.is_symbolic_dim(n) else operator.index(n)
    try:
        sizes = tuple(map(size, shape if isinstance(shape, Sequence) else [shape]))
    except TypeError:
        sizes = ()
    if not sizes or any(n < 0 for n in sizes) or sizes[-1] < 1:
        raise (ValueError if sizes else TypeError)(
            "shape must be the number of ids, or a tuple that ends with it, such as "
            f"128 or (batch_size, 128), got {_arguments.show(shape)}."
        )
    return sizes


def _check_counts(counts: Any) -> np.ndarray:
    """Returns `counts` as float64 `[V]`."""
    array = np.asarray(counts, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"counts must be numbers [V], one per id, got {_arguments.kind_of(counts)}."
        )
    bad = ~((array >= 0) & (array < np.inf))
    if bad.any():
        raise ValueError(
            f"counts must be finite, >= 0, got {array[bad][0]} for id {np.argmax(bad)}."
        )
    return array
