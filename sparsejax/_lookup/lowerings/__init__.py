"""Lowerings of the primitives, one file a platform; `xla` is the reference."""
