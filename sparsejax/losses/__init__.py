"""Losses that score the right item against a few others, not against all.

As in `optax.losses`, each returns one loss per example; take the mean
yourself. They read only the rows of labels and negatives, so under
`sparsejax.value_and_grad` the gradients of their tables are SelectedRows.

On rows of an output table

- `sampled_softmax_loss`: the softmax over the label and sampled negatives.
- `nce_loss`: a logistic loss of the label and of each sampled negative;
  word2vec's negative sampling.

On vectors of a batch

- `in_batch_softmax_loss`: two towers; the other pairs' candidates are the
  negatives.

On scores of any model

- `bpr_loss`: the logistic loss of differences, for rankings.
- `margin_ranking_loss`: the hinge loss of differences.
- `self_adversarial_loss`: a logistic loss that weighs hard negatives more.

Negatives, drawn on the device

- `NegativeSampler`: draws ids inside a step, uniformly or by frequency; it
  returns `NegativeSamples`, which the first two losses accept.

`sparsejax.top_k` finds the best items of all.
"""

from sparsejax.losses._in_batch import in_batch_softmax_loss as in_batch_softmax_loss
from sparsejax.losses._negatives import (
    NegativeSampler as NegativeSampler,
    NegativeSamples as NegativeSamples,
)
from sparsejax.losses._pairwise import (
    bpr_loss as bpr_loss,
    margin_ranking_loss as margin_ranking_loss,
    self_adversarial_loss as self_adversarial_loss,
)
from sparsejax.losses._sampled import (
    nce_loss as nce_loss,
    sampled_softmax_loss as sampled_softmax_loss,
)
