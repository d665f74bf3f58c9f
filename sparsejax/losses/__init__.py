"""Losses that compare the positive item with a few negatives, not with all items.

As in `optax.losses`, each returns one loss per example; the caller takes the mean.
A loss reads only the rows of labels and negatives, so under
`sparsejax.value_and_grad` the gradient of its table is a SelectedRows.

On rows of an output table

- `sampled_softmax_loss`: the softmax over the label and sampled negatives.
- `nce_loss`: a logistic loss of the label and of each sampled negative, as in
  word2vec.

On vectors of a batch

- `in_batch_softmax_loss`: for two towers; the candidates of the other examples are
  the negatives.

On scores of any model

- `bpr_loss`: the logistic loss of score differences.
- `margin_ranking_loss`: the hinge loss of score differences.
- `self_adversarial_loss`: a logistic loss with larger weights for hard negatives.

Negatives, drawn on the device

- `NegativeSampler`: draws ids inside a step, uniformly or by frequency. It returns
  `NegativeSamples`, which the first two losses accept.

`sparsejax.top_k` finds the items with the highest scores.
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
