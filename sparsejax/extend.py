"""Semi-public: teach sparsejax how to handle your own primitives.

`value_and_grad` walks the traced program and calls, for every equation that
takes a table, the rule of that equation's primitive. A primitive without a
rule uses the whole table. Then the table's gradient is dense, or a
`DensifyError` is raised if `tables=` requires a sparse gradient. A rule can
read rows (`ctx.read`) or pass the table on (`ref.then`). The built-in rules
are registered in the same way.

- `register_rule`: how a primitive reads rows of a table, or passes it on.
- `register_flow`: the inputs of a primitive that the loss is differentiated
  through.
- `RuleContext`: `ctx`, the first argument of a rule.
- `TableRef`: `ref`, a table that has not been read yet.

These names stay the same between releases as far as JAX's own internals allow;
`sparsejax.transform.interpreter` explains the contract of a rule.
"""

from sparsejax.transform.interpreter import (
    RuleContext as RuleContext,
    register_rule as register_rule,
)
from sparsejax.transform.liveness import register_flow as register_flow
from sparsejax.transform.table import TableRef as TableRef
