"""Pictures and tables: the rows that a step touches, its programs, the bytes it sends.

- `rows_touched`: plots the rows that each step touches, and the skew of the
  reads.
- `compare`: the programs of `jax.grad` and `sparsejax.grad` side by side; a
  `ProgramDiff`.
- `wire_bytes`: counts the bytes that a compiled program sends between devices.
"""

from sparsejax.viz._programs import ProgramDiff as ProgramDiff, compare as compare
from sparsejax.viz._touched import rows_touched as rows_touched
from sparsejax.viz._wire_bytes import wire_bytes as wire_bytes
