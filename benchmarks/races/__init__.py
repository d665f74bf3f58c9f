"""Whole programs against the programs people use, each in an environment of its own."""
