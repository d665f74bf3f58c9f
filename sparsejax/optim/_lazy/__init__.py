"""`lazy` lifts an optax transformation to rows.

A step with a SelectedRows gradient goes through `lazy.py`, which uses

- `trees.py`: leaves and paths of gradients and parameters;
- `checks.py`: argument checks;
- `row_separable.py`: whether a table can be lifted and, if not, which part prevents it;
  `probe.py` runs the transformation to find out, `optax_internals.py` names its parts;
- `state_leaves.py`: which leaves of the state follow a table;
- `gather_scatter.py`: gathers and scatters rows of tables and state;
- `state_sharding.py`: shards state like its tables.

`is_lazy_exact.py` determines whether lazy training equals dense training.
"""
