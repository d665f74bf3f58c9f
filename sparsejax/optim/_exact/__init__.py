"""`exact`: dense training at sparse cost, by catching up the steps that a row missed.

- `exact.py`: the transformation and its state.
- `exact_value_and_grad.py`: finds the ids that a loss reads before it runs.
- `plan.py`: chooses the leaves that are tables, and knows the recurrence of each.
- `catch_up.py`: rows of one table brought to the present step.
- `closed_form.py`: the mathematics of a run of zero-gradient steps.
- `identify.py`: finds the recurrence of a zero-gradient step by experiment.
- `shadow_model.py`: `tx` on a few probe coordinates.
"""
