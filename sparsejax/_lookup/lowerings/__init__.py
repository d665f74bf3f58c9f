"""Lowerings of the primitives, one file per platform; `xla` is the reference."""
