"""NegativeSampler: draws ids on the device, and returns their expected counts.

A sampler holds a distribution over `[0, V)`. The uniform and the log-uniform one have a
formula and hold no arrays. A distribution of counts is an alias table (Walker, 1977):
each of V equal cells has at most two ids, its own and its alias, so that a draw reads
one cell and makes one comparison for any V. The table is built once, on the host, in
float64.

Sharp edge: a sampler that a jitted function closes over becomes a constant of the
program, V numbers long. Pass it as an argument.
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
from jax.core import Tracer

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing


_CALL = "sparsejax.losses.NegativeSampler"
# A sample is drawn again at most this many times; slots that are empty then stay empty.
_MAX_ROUNDS = 64
# The log-uniform density is taken as constant over 2^-12 of an octave [2^j, 2^(j + 1)).
# float32 has 2048 numbers in such a part, so rounding does not change the frequencies.
_PART_BITS = 12


class NegativeSamples(NamedTuple):
    """Drawn ids, and the logs of their expected counts.

    Args:
      ids: int `[..., n]`; -1 in an empty slot, which losses skip.
      log_q: float32 `[..., n]`, log of the expected number of occurrences of each id in
        the sample; 0 for an empty slot.
      label_log_q: float32, the same for each label; None without labels.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> sampler = sj.losses.NegativeSampler.uniform(100)
      >>> found = sampler.sample(jax.random.key(0), 5, labels=jnp.array([7, 3]))
      >>> jnp.exp(found.label_log_q)  # 5 draws among 100 ids
      Array([0.05, 0.05], dtype=float32)
    """

    ids: jax.Array
    log_q: jax.Array
    label_log_q: jax.Array | None = None


class AliasTable(NamedTuple):
    """A distribution of counts: V cells, each with an id and an alias.

    Args:
      threshold: uint32 `[V]`: a draw of a cell returns its own id with probability
        `threshold / 2**32`, else its alias.
      alias: int `[V]`, the alias of each cell.
      log_probs: float32 `[V]`, log probability of each id, -inf for an id that is never
        drawn.
      lowest: float32, the smallest finite entry of `log_probs`.
    """

    threshold: jax.Array
    alias: jax.Array
    log_probs: jax.Array
    lowest: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NegativeSampler:
    """A distribution over ids from which a jitted step draws negatives.

    Make one with `uniform`, `log_uniform` or `from_counts`. A sampler is a pytree: pass
    it to a jitted function as an argument. A function that closes over it holds its
    arrays as constants.

    Args:
      num_ids: int V; ids are in `[0, V)`.
      distribution: `"uniform"`, `"log_uniform"` or `"counts"`.
      table: arrays `[V]` of the alias table, for `"counts"`; else None.

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
                f"{_CALL}: distribution must be 'uniform', 'log_uniform' or 'counts', "
                f"got {self.distribution!r}. Use NegativeSampler.uniform(num_ids), "
                ".log_uniform(num_ids) or .from_counts(counts)."
            )

    # -- makers ------------------------------------------------------------------

    @classmethod
    def uniform(cls, num_ids: int) -> Self:
        """Returns a sampler that draws each id with probability `1 / V`.

        Args:
          num_ids: int V.
        """
        return cls(_check_num_ids(f"{_CALL}.uniform", num_ids), "uniform")

    @classmethod
    def log_uniform(cls, num_ids: int) -> Self:
        """Returns a sampler by Zipf's law, for ids in the order of falling frequency.

        The probability of an id is `log((id + 2) / (id + 1)) / log(V + 1)`. The sampler
        needs no memory.

        Args:
          num_ids: int V.
        """
        return cls(_check_num_ids(f"{_CALL}.log_uniform", num_ids), "log_uniform")

    @classmethod
    def from_counts(cls, counts: ArrayLike, power: float = 0.75) -> Self:
        """Returns a sampler with probabilities proportional to `counts[id] ** power`.

        Args:
          counts: numbers `[V]` on the host, for example `Vocabulary.counts(column)`.
            An id with count 0 is never drawn; as a label it has the `log_prob` of the
            rarest id that can be drawn.
          power: 0.75 for negatives, as in word2vec; 1 for the distribution of the data,
            which in-batch negatives follow.

        Raises:
          TypeError: the counts are traced, or `power` is not a number.
          ValueError: counts are negative, not finite, all 0, or not `[V]`; or `power`
            is negative.
        """
        call = f"{_CALL}.from_counts"
        counts, power = _check_counts(call, counts), _check_power(call, power)
        weights = np.where(counts > 0, counts**power, 0.0)
        total = weights.sum()
        if not 0 < total < np.inf:
            raise ValueError(
                f"{call}: counts ** power must have a positive, finite sum, got "
                f"{total} for power={power}. Pass counts that are not all 0."
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
        """Draws ids, and computes the expected count of each.

        The last axis of `shape` is one sample of n ids; the other axes are independent
        samples. An id with probability p occurs `n p` times in a sample on average.
        With `unique`, ids are drawn until n of them are distinct; after t draws, the
        sample has an id with probability `1 - (1 - p)^t`. With `exclude`, the
        probabilities of the other ids are scaled so that they sum to one.

        `unique` and `exclude` repeat draws, at most 64 times n. Slots that are empty
        after that have the id -1: n is close to the number of ids that can be drawn.

        Args:
          key: a PRNG key.
          shape: int n, or a tuple `(*lead, n)`.
          labels: ints `[*lead, ...]`, the labels of the loss, whose expected counts are
            returned in `label_log_q`. Pass the same labels to the loss, which checks
            only their shape.
          unique: True for distinct ids in each sample.
          exclude: ints `[E]` or `[*lead, E]` that are not drawn, for example the items
            that a user has seen. Ids out of range, such as -1 for padding, are ignored.
            Each draw is compared with all E of them.

        Returns:
          `NegativeSamples(ids, log_q, label_log_q)`.

        Raises:
          TypeError: `key` is not a PRNG key, or ids are not integers.
          ValueError: a size in `shape` is not positive, another shape does not fit, or
            `unique` needs more than V ids.
        """
        call = f"{_CALL}.sample"
        key, shape = _arguments.as_key(call, key), _check_shape(call, shape)
        if _arguments.check_bool(call, "unique", unique) and shape[-1] > self.num_ids:
            raise ValueError(
                f"{call}: {shape[-1]} distinct ids cannot be drawn of {self.num_ids}. "
                "Draw fewer, or leave unique out."
            )
        log_kept = jnp.zeros((1,) * len(shape), jnp.float32)
        if exclude is not None:
            exclude = self._check_exclude(call, exclude, shape)
            log_kept = self._log_kept(exclude)
        if labels is not None:
            labels = _arguments.as_ids(call, labels, self.num_ids, "labels")
            if labels.shape[: len(shape) - 1] != shape[:-1]:
                raise ValueError(
                    f"{call}: labels must begin with the axes {shape[:-1]}, which "
                    f"are all but the last of shape={shape}, got labels of shape "
                    f"{labels.shape}."
                )
        tries = None
        if unique or exclude is not None:
            ids, tries = self._draw_until_full(key, shape, unique, exclude)
        else:
            ids = self._draw(key, shape)

        def log_expected(ids):
            """Log of the expected count of ids `[*lead, ...]` in their samples."""
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
        """Returns the log of the probability that one draw returns an id.

        Args:
          ids: ints of any shape.

        Returns:
          float32 of the same shape; NaN for ids out of range.
        """
        ids = _arguments.as_ids(f"{_CALL}.log_prob", ids, self.num_ids)
        inside = indexing.in_range(ids, self.num_ids)
        if self.table is not None:
            log_p = indexing.take_rows(self.table.log_probs, ids)
            log_p = jnp.maximum(log_p, self.table.lowest)
        elif self.distribution == "uniform":
            log_p = jnp.full(ids.shape, -math.log(self.num_ids), jnp.float32)
        else:
            safe = jnp.maximum(ids, 0).astype(jnp.float32)
            log_p = jnp.log(jnp.log1p(1 / (safe + 1)) / math.log(self.num_ids + 1))
        return jnp.where(inside, log_p, jnp.nan)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.distribution} of {self.num_ids} ids)"

    # -- private -----------------------------------------------------------------

    def _draw(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Independent draws of this shape."""
        dtype = _arguments.index_dtype(self.num_ids)
        if self.distribution == "log_uniform":
            return _draw_log_uniform(key, shape, self.num_ids, dtype)
        if self.table is None:
            return jax.random.randint(key, shape, 0, self.num_ids, dtype)
        of_cell, of_bits = jax.random.split(key)
        cell = jax.random.randint(of_cell, shape, 0, self.num_ids, dtype)
        bits = jax.random.bits(of_bits, shape, jnp.uint32)
        own = bits < indexing.take_rows(self.table.threshold, cell)
        return jnp.where(own, cell, indexing.take_rows(self.table.alias, cell))

    def _draw_until_full(
        self, key: jax.Array, shape: tuple[int, ...], unique: bool, exclude: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Ids of this shape, and the number of draws of each sample, `[*lead, 1]`."""

        def draw(state):
            turn, found, tries = state
            drawn = self._draw(jax.random.fold_in(key, turn), shape)
            if exclude is not None:
                hits = jnp.any(drawn[..., None] == exclude[..., None, :], -1)
                drawn = jnp.where(hits, _arguments.scalar(-1, drawn), drawn)
            if unique:
                found, used = _keep_distinct(found, drawn)
                return turn + 1, found, tries + used
            return turn + 1, jnp.where(found < 0, drawn, found), tries

        def is_short(state):
            turn, found, _ = state
            return (turn < _MAX_ROUNDS) & jnp.any(found < 0)

        none = jnp.full(shape, -1, _arguments.index_dtype(self.num_ids))
        tries = jnp.zeros((*shape[:-1], 1), jnp.float32)
        # The first round is outside the loop, so that the carry varies over the same
        # axes as the key inside `shard_map`; zeros vary over none.
        state = draw((jnp.int32(0), none, tries))
        _, ids, tries = lax.while_loop(is_short, draw, state)
        return ids, tries

    def _check_exclude(
        self, call: str, exclude: Any, shape: tuple[int, ...]
    ) -> jax.Array:
        """`exclude` as ascending ids `[*lead, E]`; duplicates are out of range."""
        exclude = _arguments.as_ids(call, exclude, self.num_ids, "exclude")
        if exclude.ndim == 1:
            exclude = exclude.reshape((1,) * (len(shape) - 1) + exclude.shape)
        elif exclude.shape[:-1] != shape[:-1]:
            raise ValueError(
                f"{call}: exclude must be [E], or [..., E] with the axes {shape[:-1]}, "
                f"which are all but the last of shape={shape}, got exclude of shape "
                f"{exclude.shape}."
            )
        exclude = jnp.sort(exclude, axis=-1)
        again = exclude[..., 1:] == exclude[..., :-1]
        again = jnp.pad(again, [(0, 0)] * (exclude.ndim - 1) + [(1, 0)])
        return jnp.where(again, _arguments.scalar(self.num_ids, exclude), exclude)

    def _log_kept(self, exclude: jax.Array) -> jax.Array:
        """Log of the probability that a draw is not excluded, `[*lead, 1]`."""
        log_probs = self.log_prob(exclude)
        if self.table is not None:  # -inf for ids that are never drawn
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

    `floor(exp(u * log(V + 1)))` of a float32 u cannot reach most ids of a million. So
    one random number chooses an octave `[2^j, 2^(j + 1))` of `id + 1`, a second one a
    part of the octave, and a random integer chooses among the ids of that part.
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


def _keep_distinct(found: jax.Array, drawn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first n distinct ids of both `[..., n]`, and the number of draws used.

    -1 marks an empty slot. `found` has distinct ids, followed by empty slots.
    """
    n = found.shape[-1]
    both = jnp.concatenate([found, drawn], axis=-1)
    order = jnp.argsort(both, axis=-1, stable=True)
    ascending = jnp.take_along_axis(both, order, axis=-1)
    is_first = (ascending[..., 1:] != ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    is_first = jnp.concatenate([ascending[..., :1] >= 0, is_first], axis=-1)
    place = lax.broadcasted_iota(jnp.int32, both.shape, both.ndim - 1)
    # Places of first occurrences, in the order of the draws; other places come last.
    left_over = jnp.where(is_first, order, 2 * n)
    chosen = jnp.sort(left_over, axis=-1)[..., :n]
    kept = jnp.take_along_axis(both, jnp.minimum(chosen, 2 * n - 1), axis=-1)
    kept = jnp.where(chosen < 2 * n, kept, _arguments.scalar(-1, kept))
    used = (place >= n) & (place <= chosen[..., -1:]) & (both >= 0)
    return kept, jnp.sum(used, axis=-1, keepdims=True, dtype=jnp.float32)


# ------------------------------------------------------------------ the alias table


def _alias_table(probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`threshold` (uint32) and `alias` for probabilities that sum to one.

    Each cell holds a probability of 1 / V. An id with less (light) leaves a gap in its
    cell, which an id with more (heavy) fills. Gaps and heavy ids are matched in order.
    A heavy id whose excess is used up leaves a gap in its own cell, which the next
    heavy id fills. So the running sums of gaps and excesses determine all aliases, and
    no loop is needed.
    """
    share = probs * len(probs)
    is_light = share < 1
    is_light[np.argmax(share)] = False  # rounding may make all light
    light, heavy = np.flatnonzero(is_light), np.flatnonzero(~is_light)
    gaps = np.concatenate([[0.0], np.cumsum(1 - share[light])])
    excess = np.cumsum(share[heavy] - 1)

    alias = np.arange(len(probs))
    by = np.searchsorted(excess, gaps[:-1], side="right")
    alias[light] = heavy[np.minimum(by, len(heavy) - 1)]
    alias[heavy[:-1]] = heavy[1:]
    # The last gap that a heavy id begins to fill may be larger than its remaining
    # excess; the difference is the gap in the cell of the heavy id.
    begun = np.searchsorted(gaps[:-1], excess, side="left")
    share[heavy] = 1 - (gaps[begun] - excess)
    share[heavy[-1]] = 1
    threshold = np.clip(np.rint(share * 2.0**32), 0, 2**32 - 1)
    return threshold.astype(np.uint32), alias


# ------------------------------------------------------------------ checks


def _check_num_ids(call: str, num_ids: Any) -> int:
    num_ids = _arguments.static_int(call, "num_ids", num_ids, 1)
    _arguments.index_dtype(num_ids)  # raises for ids that JAX cannot hold
    return num_ids


def _check_shape(call: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = (operator.index(shape),)
    except TypeError:
        try:
            sizes = tuple(map(operator.index, shape))
        except TypeError:
            sizes = ()
    if not sizes or min(sizes) < 0 or sizes[-1] < 1:
        raise _arguments.wrong(
            call,
            "shape",
            "the number of ids, or a tuple that ends with it",
            _arguments.show(shape),
            "For example 128, or (batch_size, 128).",
        )
    return sizes


def _check_counts(call: str, counts: Any) -> np.ndarray:
    """`counts` as float64 `[V]`."""
    if isinstance(counts, Tracer):
        raise _arguments.wrong_type(
            call,
            "counts",
            "known on the host",
            _arguments.show(counts),
            "Make the sampler outside of jit, and pass it to the step as an argument.",
        )
    try:
        found = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim != 1 or not found.size:
        raise _arguments.wrong(
            call,
            "counts",
            "an array of numbers [V], one for each id",
            _arguments.kind_of(counts),
            "Vocabulary.counts(column) returns such an array.",
        )
    bad = ~((found >= 0) & (found < np.inf))
    if bad.any():
        raise ValueError(
            f"{call}: counts must be finite and 0 or more, got {found[bad][0]} for id "
            f"{np.argmax(bad)}."
        )
    return found


def _check_power(call: str, power: Any) -> float:
    if isinstance(power, (int, float, np.number)) and 0 <= power < np.inf:
        return float(power)
    is_number = isinstance(power, (int, float, np.number))
    error = _arguments.wrong if is_number else _arguments.wrong_type
    raise error(
        call,
        "power",
        "a number of 0 or more",
        _arguments.show(power),
        "word2vec uses 0.75; 1 draws by the counts themselves.",
    )
