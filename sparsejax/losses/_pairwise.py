"""Losses on scores: the right item's should be above those of negatives.

All take the positive scores `[...]` and the negative ones, `[...]` or `[..., n]`, and
return `[...]`; where there are n negatives, their mean.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, Scalar
from sparsejax._rows import indexing
from sparsejax.losses import _scores


def bpr_loss(
    positive_scores: ArrayLike,
    negative_scores: ArrayLike,
    *,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Bayesian personalized ranking: `-log sigmoid(positive - negative)`.

    The loss is that of a logistic regression on which of two items was chosen. With n
    negatives, it is the mean over these.

    Args:
      positive_scores: `[...]`, scores of the right items.
      negative_scores: `[...]`, one negative per example; or `[..., n]`.
      where: booleans of the shape of `negative_scores`, which of them count, such as
        `negatives.ids != labels[:, None]`. An example without any has loss 0.

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
    call = "sparsejax.losses.bpr_loss"
    pairs = _Pairs(call, positive_scores, negative_scores, where)
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

    Zero for a pair once the positive score is above the negative one by `margin`. With
    n negatives, it is the mean over these.

    Args:
      positive_scores: `[...]`, scores of the right items.
      negative_scores: `[...]`, one negative per example; or `[..., n]`.
      margin: number, or scalar array.
      where: booleans of the shape of `negative_scores`, which of them count. An example
        without any has loss 0.
      hardest: whether only the negative with the highest score counts, in place of the
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
    call = "sparsejax.losses.margin_ranking_loss"
    pairs = _Pairs(call, positive_scores, negative_scores, where)
    margin = pairs.scalar("margin", margin)
    losses = jax.nn.relu(margin + pairs.negative - pairs.positive)
    if not _arguments.check_bool(call, "hardest", hardest):
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
    """Logistic loss in which a negative weighs the more, the higher its score is.

      loss = -log sigmoid(margin + positive)
             - sum_k w_k log sigmoid(-(margin + negative_k))
      w = softmax(temperature * negative)

    No gradient flows through the weights w.

    Args:
      positive_scores: `[...]`, scores of the right triples; for models of distance,
        such as RotatE, minus the distance.
      negative_scores: `[...]`, one negative per example; or `[..., n]`.
      margin: number, or scalar array; gamma in RotatE, added to all scores.
      temperature: number, or scalar array; alpha in RotatE. 0 weighs all the same.
      where: booleans of the shape of `negative_scores`, which of them count.

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
    call = "sparsejax.losses.self_adversarial_loss"
    pairs = _Pairs(call, positive_scores, negative_scores, where)
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
    """Checked scores: `positive` `[..., 1]`, `negative` `[..., n]`, `where` like it."""

    def __init__(self, call: str, positive: Any, negative: Any, where: Any):
        positive = _arguments.as_floats(call, positive, "positive_scores")
        negative = _arguments.as_floats(call, negative, "negative_scores")
        lead = positive.shape
        if negative.shape != lead and negative.shape[:-1] != lead:
            raise ValueError(
                f"{call}: negative_scores must be {lead}, as positive_scores, or have "
                f"one more axis of negatives, got shape {negative.shape}."
            )
        where = _scores.as_mask(call, where, negative.shape)
        if negative.shape == lead:
            negative = negative[..., None]
            where = None if where is None else where[..., None]
        dtype = indexing.promote(positive.dtype, negative.dtype)
        dtype = indexing.accumulator_dtype(dtype)
        self.call, self.where = call, where
        self.positive = positive.astype(dtype)[..., None]
        self.negative = negative.astype(dtype)

    def scalar(self, name: str, x: Any) -> jax.Array:
        """`x` as a scalar of the dtype of the scores."""
        return _scores.as_scalar(self.call, x, name, self.negative.dtype)

    def mean(self, losses: jax.Array) -> jax.Array:
        """The mean over the negatives that count; 0 if there are none."""
        if self.where is None:
            return jnp.mean(losses, axis=-1)
        count = jnp.sum(self.where, axis=-1, dtype=losses.dtype)
        total = jnp.sum(jnp.where(self.where, losses, 0), axis=-1)
        return total / jnp.maximum(count, 1)
