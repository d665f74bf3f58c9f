"""`exact`: dense optax on touched rows, by catching up the steps a row missed."""
