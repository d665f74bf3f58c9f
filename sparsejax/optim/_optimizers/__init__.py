"""Optimizers that optax does not have; `base.py` says how to write one."""
