"""`python -m sparsejax.demo`: word vectors from real text, with sparse gradients."""

from sparsejax.demo._train import main as main
