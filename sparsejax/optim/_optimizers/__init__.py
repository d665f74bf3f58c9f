"""Optimizers that optax does not have, for dense and SelectedRows gradients."""
