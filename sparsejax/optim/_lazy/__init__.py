"""`lazy` lifts an optax transformation to rows.

A step with a SelectedRows gradient goes through `lazy.py`:

- `step.py`: the arguments of `update` as leaves;
- `separability.py`: decides from the traced program if the tables can be lifted, with
  `state_leaves.py`, which leaves of the state follow a table, `row_program.py`, which
  splits a program into functions of one row and reductions over all rows,
  `two_programs.py`, which compares the programs of one row and of all rows, and
  `parts.py`, which names the part of a chain that prevents it;
- `passes.py`: inside `jit`, runs the functions of one row in passes over the rows;
  `block_pass.py` has the loops over blocks of rows;
- `gather_scatter.py`: gathers and scatters rows of tables and state, for a step that is
  not run in passes;
- `state_sharding.py`: shards state like its tables.
"""
