"""Benchmarks: `python -m benchmarks`, or `make bench`. NOTES.md has the results."""
