"""Pictures: which rows a step touches, and what the transformation does to a program.

- `rows_touched`: plots the rows that each step touches, and the skew of the
  reads.
- `compare`: the programs of `jax.grad` and `sparsejax.grad` side by side; a
  `ProgramDiff`.
"""

from sparsejax.viz._programs import ProgramDiff as ProgramDiff, compare as compare
from sparsejax.viz._touched import rows_touched as rows_touched
