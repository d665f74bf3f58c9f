"""`lazy` lifts an optax transformation to rows.

A step with a SelectedRows gradient goes through `lazy.py`, which uses

- `trees.py`: leaves and paths of gradients and parameters;
- `checks.py`: errors for what is passed in;
- `row_separable.py`: may this table be lifted, and what forbids it; `probe.py` runs the
  transformation to find out, `optax_internals.py` names its parts;
- `state_leaves.py`: which leaves of the state follow a table;
- `gather_scatter.py`: rows of tables and state;
- `state_sharding.py`: state is sharded as its tables are.

`lazy_exact.py` answers whether lifting changes anything.
"""
