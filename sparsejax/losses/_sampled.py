"""Losses that read the rows of labels and sampled negatives in an output table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._lookup import lookup
from sparsejax._rows import Table, arithmetic, as_table
from sparsejax.losses._negatives import NegativeSampler, NegativeSamples


def sampled_softmax_loss(
    table: ArrayLike | Table,
    inputs: ArrayLike,
    labels: ArrayLike,
    negatives: NegativeSamples | ArrayLike,
    *,
    bias: ArrayLike | Table | None = None,
    remove_accidental_hits: bool = True,
) -> jax.Array:
    """Softmax cross-entropy over the label and sampled negatives, for large tables.

    The score of class c is `s(c) = inputs . table[c] + bias[c] - log Q(c)`, with Q(c)
    the expected number of occurrences of c in the sample. For a label y and a sample S

      loss = log(exp(s(y)) + sum_{c in S, c != y} exp(s(c))) - s(y)

    This estimates the softmax cross-entropy over all V classes from n + 1 rows. Log-Q
    corrects for classes that are sampled often. With T labels for an example, each has
    probability 1 / T: the second term is their mean.

    Args:
      table: `[V, D]`, the vectors of all classes: an array, a SelectedRows of pulled
        rows, a QuantizedTable, or a ShardedTable of `sparsejax.parallel.shard_rows`.
      inputs: `[..., D]`, the model's output for each example.
      labels: ints `[...]` or `[..., T]`. A label out of range gives NaN.
      negatives: from `NegativeSampler.sample(key, shape, labels)`, `[n]` for all
        examples or `[..., n]`; -1 is skipped. Or only ints, for no log-Q correction.
      bias: `[V, 1]`, or `[V]`, whose gradient is sparse only if `tables=` requires it.
      remove_accidental_hits: if True, a negative that equals a label of its example is
        skipped.

    Returns:
      `[...]`, one loss per example, at least float32.

    Raises:
      TypeError, ValueError: an argument is not as described.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> table, inputs = jnp.zeros((1000, 4)), jnp.ones((2, 4))
      >>> labels = jnp.array([7, 3])
      >>> sampler = sj.losses.NegativeSampler.uniform(1000)
      >>> negatives = sampler.sample(jax.random.key(0), 9, labels)
      >>> loss = lambda t: sj.losses.sampled_softmax_loss(t, inputs, labels, negatives)
      >>> loss(table)  # log(10)
      Array([2.302585, 2.302585], dtype=float32)
      >>> grads = jax.eval_shape(sj.grad(lambda t: loss(t).mean()), table)
      >>> grads.capacity  # rows of the 2 labels and the 9 negatives
      11

    References:
      Jean et al., 2015, "On Using Very Large Target Vocabulary"; TensorFlow,
      `tf.nn.sampled_softmax_loss`.
    """
    right, others, is_negative = _scores_of(
        table, inputs, labels, negatives, bias, remove_accidental_hits
    )
    others = jnp.where(is_negative, others, -jnp.inf)
    log_sum = jax.nn.logsumexp(jnp.concatenate([right, others], axis=-1), axis=-1)
    return log_sum - jnp.mean(right, axis=-1)


def nce_loss(
    table: ArrayLike | Table,
    inputs: ArrayLike,
    labels: ArrayLike,
    negatives: NegativeSamples | ArrayLike,
    *,
    bias: ArrayLike | Table | None = None,
    remove_accidental_hits: bool = False,
) -> jax.Array:
    """Noise-contrastive estimation: a logistic loss of labels and sampled negatives.

    With scores s as in `sampled_softmax_loss`, for a label y and a sample S

      loss = -log sigmoid(s(y)) - sum_{c in S} log sigmoid(-s(c))

    If negatives are only ints, the scores have no log-Q, and this is the negative
    sampling of word2vec. With T labels for an example, each has probability 1 / T, and
    the first term is the sum of their cross-entropies with it.

    Args:
      table: `[V, D]`; all arguments are as in `sampled_softmax_loss`.
      inputs: `[..., D]`.
      labels: ints `[...]` or `[..., T]`.
      negatives: from `NegativeSampler.sample(key, shape, labels)`, or ints.
      bias: `[V, 1]` or `[V]`.
      remove_accidental_hits: if True, a negative that equals a label of its example is
        skipped. The theory of NCE keeps it.

    Returns:
      `[...]`, one loss per example, at least float32.

    Raises:
      TypeError, ValueError: as `sampled_softmax_loss`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> table, inputs = jnp.zeros((1000, 4)), jnp.ones((2, 4))
      >>> sj.losses.nce_loss(table, inputs, jnp.array([7, 3]), jnp.array([1, 2]))
      Array([2.0794415, 2.0794415], dtype=float32)

    References:
      Gutmann and Hyvarinen, 2010, "Noise-contrastive estimation"; Mikolov et al., 2013,
      "Distributed Representations of Words and Phrases"; TensorFlow, `tf.nn.nce_loss`.
    """
    right, others, is_negative = _scores_of(
        table, inputs, labels, negatives, bias, remove_accidental_hits
    )
    # softplus(s) - z s is the cross-entropy with a probability z.
    first = jnp.sum(jax.nn.softplus(right), axis=-1) - jnp.mean(right, axis=-1)
    second = jnp.where(is_negative, jax.nn.softplus(others), 0)
    return first + jnp.sum(second, axis=-1)


# ------------------------------------------------------------------ private


def _scores_of(
    table: Any,
    inputs: Any,
    labels: Any,
    negatives: Any,
    bias: Any,
    remove_accidental_hits: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores the labels, `[..., T]`, and the negatives, `[..., n]`.

    The last result is True for the negatives that count.
    """
    table = _as_table(table, "table")
    inputs = _arguments.as_floats(inputs, "inputs")
    if table.ndim != 2 or inputs.ndim < 1 or inputs.shape[-1] != table.shape[1]:
        raise ValueError(
            f"table must be [V, D] and inputs [..., D], got shapes {table.shape} and "
            f"{inputs.shape}."
        )
    height, lead = table.shape[0], inputs.shape[:-1]
    labels = _arguments.as_ids(labels, height, "labels")
    if labels.shape[: len(lead)] != lead or labels.ndim > inputs.ndim:
        raise ValueError(
            f"labels must be {lead} for inputs {inputs.shape}, or have one more axis, "
            f"got shape {labels.shape}. The order is (table, inputs, labels, ...)."
        )
    ids, log_q, label_log_q = _parts_of(negatives, labels)
    ids = _arguments.as_ids(ids, height, "negatives")
    if ids.ndim != 1 and ids.shape[:-1] != lead:
        raise ValueError(
            f"negatives must be [n], or [..., n] with the axes {lead} of the examples, "
            f"got shape {ids.shape}."
        )
    if labels.ndim < inputs.ndim:
        labels = labels[..., None]

    # The gradients of the two reads become one SelectedRows.
    right = arithmetic.einsum("...d,...td->...t", inputs, lookup.lookup(table, labels))
    # If all examples share the negatives, their scores are one matrix product.
    subscripts = "...d,nd->...n" if ids.ndim == 1 else "...d,...nd->...n"
    negative_rows = lookup.lookup(table, ids, padding_id=-1)
    others = arithmetic.einsum(subscripts, inputs, negative_rows)
    like = lambda x: jnp.broadcast_to(x, others.shape)
    if bias is not None:
        bias = _as_table(bias, "bias")
        if bias.shape not in ((height,), (height, 1)):
            raise ValueError(
                f"bias must be [{height}, 1] or [{height}], got shape {bias.shape}."
            )
        flat = lambda x, ids: x.reshape(ids.shape).astype(right.dtype)
        right += flat(lookup.lookup(bias, labels), labels)
        others += like(flat(lookup.lookup(bias, ids, padding_id=-1), ids))
    if log_q is not None:
        right -= label_log_q.astype(right.dtype).reshape(right.shape)
        others -= like(log_q.astype(others.dtype))
    is_negative = like(ids != -1)
    if _arguments.check_bool("remove_accidental_hits", remove_accidental_hits):
        hits = labels[..., :, None] == like(ids)[..., None, :]
        is_negative &= ~jnp.any(hits, axis=-2)
    return right, others, is_negative


def _as_table(table: Any, name: str) -> Table:
    """Returns `table` as a table of floats; raises for anything else."""
    table = as_table(table, name)
    _arguments.check_floats(table, name)
    return table


def _parts_of(negatives: Any, labels: jax.Array) -> tuple[Any, Any, Any]:
    """Returns the ids of `negatives`, their log-Q, and the labels' log-Q, or None."""
    if isinstance(negatives, NegativeSampler):
        raise TypeError(
            "negatives must be sampled ids, got the NegativeSampler itself. Call "
            "sampler.sample(key, n, labels) in the step."
        )
    if not isinstance(negatives, NegativeSamples):
        return negatives, None, None
    ids, log_q, label_log_q = negatives
    if label_log_q is None:
        raise ValueError(
            "negatives have no label_log_q. Call sampler.sample(key, n, labels), or "
            "pass negatives.ids for no log-Q correction."
        )
    if label_log_q.shape != labels.shape or log_q.shape != ids.shape:
        raise ValueError(
            f"negatives are for labels {label_log_q.shape}, got {labels.shape}."
        )
    return ids, log_q, label_log_q
