"""`lazy` lifts an optax transformation to rows.

A step with a SelectedRows gradient goes through these files in this order:

- `lazy.py`: makes a `Step` of the arguments of `update`, and updates it;
- `separability.py`: decides, once for a tree, if the tables can be lifted. `judge.py`
  has the proof, from the traced program, `state_leaves.py` the leaves of the state that
  follow a table, `two_programs.py` the programs of one row and of all rows side by
  side, and `parts.py` names the part of a chain that prevents it;
- `passes.py`: inside `jit`, splits the program into functions of one row and reductions
  over all rows (`row_program.py`), and runs them in passes over the rows;
  `block_pass.py` has the loops over blocks of rows;
- `gather_scatter.py`: gathers and scatters rows of tables and state, for a step that is
  not run in passes.

`state_sharding.py` shards state like its tables.
"""
