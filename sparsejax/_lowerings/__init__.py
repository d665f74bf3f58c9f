"""How operations are lowered: `xla.py` is the reference, the others a platform each."""
