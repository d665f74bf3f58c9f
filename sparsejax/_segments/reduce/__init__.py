"""The `segment_*` functions, one file for each family."""
