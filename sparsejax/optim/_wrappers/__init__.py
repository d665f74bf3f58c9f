"""Wrappers: gradient accumulation, rounding of 16-bit tables, loss scaling."""
