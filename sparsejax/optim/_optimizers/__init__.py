"""Optimizers that optax does not have; `base.py` explains how to write one."""
