"""Transformations around a transformation: accumulate, rounding, loss scale."""
