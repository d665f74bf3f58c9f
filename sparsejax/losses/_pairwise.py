"""Losses on the scores of a positive item and of negatives.

Each loss accepts positive scores `[...]` and negative scores `[...]` or `[..., n]`, and
returns `[...]`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, Scalar
from sparsejax._rows import indexing


def bpr_loss(
    positive_scores: ArrayLike,
    negative_scores: ArrayLike,
    *,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Bayesian personalized ranking: `-log sigmoid(positive - negative)`.

    This is the loss of a logistic regression that predicts the item chosen of two. With
    n negatives, it is the mean over the n pairs.

    Args:
      positive_scores: `[...]`, scores of the positive items.
      negative_scores: `[...]`, one negative per example; or `[..., n]`.
      where: booleans with the shape of `negative_scores`, True for negatives that
        count, such as `negatives.ids != labels[:, None]`. An example with no negative
        has loss 0.

    Returns:
      `[...]`, one loss per example, at least float32.

    Raises:
      TypeError: scores are not floats, or `where` is not booleans.
      ValueError: shapes do not match.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.losses.bpr_loss(jnp.array([2.0]), jnp.array([[0.0, 2.0]]))
      Array([0.41003], dtype=float32)

    References:
      Rendle et al., 2009, "BPR: Bayesian Personalized Ranking from Implicit Feedback".
    """
    pairs = _Pairs(positive_scores, negative_scores, where)
    return pairs.mean(jax.nn.softplus(pairs.negative - pairs.positive))


def margin_ranking_loss(
    positive_scores: ArrayLike,
    negative_scores: ArrayLike,
    margin: Scalar = 1.0,
    *,
    where: ArrayLike | None = None,
    hardest: bool = False,
) -> jax.Array:
    """Hinge loss of pairs: `max(0, margin + negative - positive)`.

    The loss of a pair is 0 if the positive score exceeds the negative score by
    `margin`. With n negatives, it is the mean over the n pairs.

    Args:
      positive_scores: `[...]`, scores of the positive items.
      negative_scores: `[...]`, one negative per example; or `[..., n]`.
      margin: number, or scalar array.
      where: booleans with the shape of `negative_scores`, True for negatives that
        count. An example with no negative has loss 0.
      hardest: if True, the loss of the negative with the highest score replaces the
        mean.

    Returns:
      `[...]`, one loss per example, at least float32.

    Raises:
      TypeError: scores are not floats, or `where` is not booleans.
      ValueError: shapes do not match, or `margin` is not a scalar.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> positive, negative = jnp.array([2.0]), jnp.array([[0.0, 1.5]])
      >>> sj.losses.margin_ranking_loss(positive, negative)
      Array([0.25], dtype=float32)
      >>> sj.losses.margin_ranking_loss(positive, negative, hardest=True)
      Array([0.5], dtype=float32)

    References:
      PyTorch, `margin_ranking_loss(positive, negative, target=1, margin)`; Bordes et
      al., 2013, "Translating Embeddings for Modeling Multi-relational Data"; Spotlight,
      `hinge_loss` and `adaptive_hinge_loss` (`hardest`).
    """
    pairs = _Pairs(positive_scores, negative_scores, where)
    margin = pairs.scalar("margin", margin)
    losses = jax.nn.relu(margin + pairs.negative - pairs.positive)
    if not _arguments.check_bool("hardest", hardest):
        return pairs.mean(losses)
    return jnp.max(losses, axis=-1, initial=0, where=pairs.where)


def self_adversarial_loss(
    positive_scores: ArrayLike,
    negative_scores: ArrayLike,
    margin: Scalar = 0.0,
    *,
    temperature: Scalar = 1.0,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Logistic loss in which negatives with higher scores have larger weights.

      loss = -log sigmoid(margin + positive)
             - sum_k w_k log sigmoid(-(margin + negative_k))
      w = softmax(temperature * negative)

    No gradient flows through the weights w.

    Args:
      positive_scores: `[...]`, scores of the positive triples; minus the distance for
        distance models such as RotatE.
      negative_scores: `[...]`, one negative per example; or `[..., n]`.
      margin: number or scalar array, added to all scores; gamma in RotatE.
      temperature: number or scalar array; alpha in RotatE. 0 gives equal weights.
      where: booleans with the shape of `negative_scores`, True for negatives that
        count.

    Returns:
      `[...]`, one loss per example, at least float32.

    Raises:
      TypeError: scores are not floats, or `where` is not booleans.
      ValueError: shapes do not match, or `margin` or `temperature` is not a scalar.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> distances = jnp.array([[9.0, 1.0]])  # of two corrupted triples
      >>> sj.losses.self_adversarial_loss(jnp.array([-1.0]), -distances, margin=6.0)
      Array([5.0118], dtype=float32)

    References:
      Sun et al., 2019, "RotatE: Knowledge Graph Embedding by Relational Rotation in
      Complex Space", equations 4 and 5 (the code divides by 2); DGL-KE, `-adv`.
    """
    pairs = _Pairs(positive_scores, negative_scores, where)
    margin = pairs.scalar("margin", margin)
    logits = pairs.scalar("temperature", temperature) * pairs.negative
    if pairs.where is not None:
        logits = jnp.where(pairs.where, logits, jnp.finfo(logits.dtype).min)
    weights = jax.lax.stop_gradient(jax.nn.softmax(logits, axis=-1))
    if pairs.where is not None:
        weights = jnp.where(pairs.where, weights, 0)
    first = jax.nn.softplus(-(margin + pairs.positive[..., 0]))
    return first + jnp.sum(weights * jax.nn.softplus(margin + pairs.negative), axis=-1)


class _Pairs:
    """Checked scores: `positive` `[..., 1]`, `negative` and `where` `[..., n]`."""

    def __init__(self, positive: Any, negative: Any, where: Any):
        positive = _arguments.as_floats(positive, "positive_scores")
        negative = _arguments.as_floats(negative, "negative_scores")
        lead = positive.shape
        if negative.shape != lead and negative.shape[:-1] != lead:
            raise ValueError(
                f"negative_scores must have the shape of positive_scores, {lead}, or "
                f"one more axis of negatives, got shape {negative.shape}."
            )
        where = as_mask(where, negative.shape)
        if negative.shape == lead:
            negative = negative[..., None]
            where = None if where is None else where[..., None]
        dtype = indexing.promote(positive.dtype, negative.dtype)
        dtype = indexing.accumulator_dtype(dtype)
        self.where = where
        self.positive = positive.astype(dtype)[..., None]
        self.negative = negative.astype(dtype)

    def scalar(self, name: str, x: Any) -> jax.Array:
        """Returns `x` as a scalar of the dtype of the scores."""
        return _arguments.as_scalar(x, name, self.negative.dtype)

    def mean(self, losses: jax.Array) -> jax.Array:
        """Averages over the negatives that count; 0 if there are none."""
        if self.where is None:
            return jnp.mean(losses, axis=-1)
        count = jnp.sum(self.where, axis=-1, dtype=losses.dtype)
        total = jnp.sum(jnp.where(self.where, losses, 0), axis=-1)
        return total / jnp.maximum(count, 1)


def as_mask(where: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns `where` as booleans, broadcast to `shape`; None stays None."""
    if where is None:
        return None
    where = _arguments.to_array(where, "where", "an array of booleans")
    if where.dtype != jnp.bool_:
        raise TypeError(f"where must be booleans, got {_arguments.kind_of(where)}.")
    return jnp.broadcast_to(where, shape)
