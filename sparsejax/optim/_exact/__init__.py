"""`exact`: dense training at sparse cost, by catching up the steps that a row missed.

- `exact.py`: the transformation and its state.
- `exact_value_and_grad.py`: finds the ids that a loss reads before it runs.
- `plan.py`: chooses the leaves that are tables, and finds the recurrence of each.
- `zero_gradient.py`: reads the step of a coordinate without a gradient from `tx`.
- `catch_up.py`: rows of one table brought to the present step.
- `closed_form.py`: the mathematics of a run of zero-gradient steps.
"""
