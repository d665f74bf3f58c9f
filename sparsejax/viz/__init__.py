"""The rows that a step touches, and the bytes that a program sends.

- `rows_touched`: plots the rows that each step touches, and the skew of the
  reads.
- `wire_bytes`: counts the bytes that a compiled program sends between devices.
"""

from sparsejax.viz._touched import rows_touched as rows_touched
from sparsejax.viz._wire_bytes import wire_bytes as wire_bytes
