"""`lazy` lifts an optax transformation to rows.

A step with a SelectedRows gradient goes through `lazy.py`, which uses

- `trees.py`: leaves and paths of gradients and parameters;
- `checks.py`: argument checks;
- `judge.py`: decides from the traced program if a table can be lifted; `facts.py` walks
  the program, `primitives.py` lists the primitives that work row by row, `parts.py`
  names the part of a chain that prevents it;
- `state_leaves.py`: which leaves of the state follow a table;
- `row_passes.py`: runs the step in passes over the rows, inside `jit`; `row_program.py`
  splits it into functions of one row and reductions over all rows, `block_pass.py` has
  the loops over blocks of rows;
- `gather_scatter.py`: gathers and scatters rows of tables and state, for a step that is
  not run in passes;
- `state_sharding.py`: shards state like its tables.
"""
