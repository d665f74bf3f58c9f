"""Rules: what the walk does with each primitive that a table goes into."""
