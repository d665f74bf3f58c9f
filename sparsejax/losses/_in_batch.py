"""in_batch_softmax_loss: for two towers, with negatives from the same batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, Scalar
from sparsejax._rows import arithmetic
from sparsejax._segments import elements
from sparsejax.losses._pairwise import as_mask


def in_batch_softmax_loss(
    queries: ArrayLike,
    candidates: ArrayLike,
    *,
    candidate_ids: ArrayLike | None = None,
    log_q: ArrayLike | None = None,
    temperature: Scalar = 1.0,
    where: ArrayLike | None = None,
    num_hard_negatives: int | None = None,
) -> jax.Array:
    """Softmax cross-entropy over the candidates of a batch; query i has candidate i.

    With scores `s(i, j) = queries[i] . candidates[j] / temperature - log_q[j]`

      loss[i] = log(sum_j exp(s(i, j))) - s(i, i)

    The sum is over j = i and over the negatives j of query i. Frequent items are in
    many batches, so they are negatives too often; `log_q` corrects for that.

    Args:
      queries: `[B, D]`, for example vectors of users.
      candidates: `[C, D]` with C >= B, vectors of items. Candidates B, B + 1, ... are
        negatives of all queries, for example sampled items.
      candidate_ids: ints `[C]`. If candidate j has the same id as candidate i, it is an
        accidental hit and not a negative of query i.
      log_q: `[C]`, log of the probability that each candidate is in a batch, up to a
        constant: `NegativeSampler.from_counts(counts, power=1).log_prob(ids)`.
      temperature: positive number, or scalar array, which may be a parameter.
      where: booleans `[C]` or `[B, C]`, False for candidates that are not negatives,
        such as padding. Candidate i always counts for query i.
      num_hard_negatives: int n; only the n negatives with the highest scores count.

    Returns:
      `[B]`, one loss per query, at least float32.

    Raises:
      TypeError: vectors are not floats, ids not integers, `where` not booleans, or
        `num_hard_negatives` is not an int.
      ValueError: shapes do not match, or `num_hard_negatives` is not positive.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> users = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
      >>> items = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
      >>> sj.losses.in_batch_softmax_loss(users, items)
      Array([0.86, 0.55, 0.86], dtype=float32)
      >>> ids = jnp.array([7, 3, 7])  # the third candidate is the first one again
      >>> sj.losses.in_batch_softmax_loss(users, items, candidate_ids=ids)
      Array([0.31, 0.55, 0.31], dtype=float32)

    References:
      Yi et al., 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
      Recommendations"; Yang et al., 2020, "Mixed Negative Sampling"; TensorFlow
      Recommenders, `tfrs.tasks.Retrieval`.
    """
    queries = _arguments.as_floats(queries, "queries")
    candidates = _arguments.as_floats(candidates, "candidates")
    is_matrix = queries.ndim == 2 and candidates.ndim == 2
    if not is_matrix or queries.shape[1] != candidates.shape[1]:
        raise ValueError(
            f"queries must be [B, D] and candidates [C, D], got shapes {queries.shape} "
            f"and {candidates.shape}."
        )
    size, count = queries.shape[0], candidates.shape[0]
    if count < size:
        raise ValueError(
            f"each query needs a candidate of its own, got {size} queries and {count} "
            "candidates. Row i of candidates belongs to row i of queries."
        )
    scores = arithmetic.einsum("bd,cd->bc", queries, candidates)
    if isinstance(temperature, (int, float, np.number)) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    scores /= _arguments.as_scalar(temperature, "temperature", scores.dtype)
    if log_q is not None:
        log_q = _arguments.as_floats(log_q, "log_q")
        scores -= _of_candidates("log_q", log_q, count).astype(scores.dtype)[None]

    is_own = jnp.eye(size, count, dtype=bool)
    is_negative = ~is_own
    if candidate_ids is not None:
        ids = _arguments.as_integers(candidate_ids, "candidate_ids")
        ids = jnp.asarray(elements.narrow(ids, "candidate_ids"))
        ids = _of_candidates("candidate_ids", ids, count)
        is_negative &= ids[:size, None] != ids[None]
    where = as_mask(where, (size, count))
    if where is not None:
        is_negative &= where
    right = jnp.diagonal(scores)
    if num_hard_negatives is not None:
        n = _arguments.static_int("num_hard_negatives", num_hard_negatives, 1)
        others = jnp.where(is_negative, scores, -jnp.inf)
        hardest, _ = jax.lax.top_k(others, _compat.min_dim(n, count))
        scores = jnp.concatenate([right[:, None], hardest], axis=1)
    else:
        scores = jnp.where(is_negative | is_own, scores, -jnp.inf)
    return jax.nn.logsumexp(scores, axis=1) - right


def _of_candidates(name: str, x: jax.Array, count: int) -> jax.Array:
    """Returns `x`; raises unless it has one element for each candidate."""
    if x.shape != (count,):
        raise ValueError(
            f"{name} must be [{count}], one for each candidate, got shape {x.shape}."
        )
    return x
