"""Benchmarks: `python -m benchmarks`, or `make bench`. What they found: NOTES.md."""
