"""Pictures: which rows are touched, and what the transformation does to a program."""

from sparsejax.viz._programs import ProgramDiff as ProgramDiff, compare as compare
from sparsejax.viz._touched import rows_touched as rows_touched
