"""The public names, pinned."""

import inspect

import sparsejax as sj


NAMES = {
    # types
    "SelectedRows",
    "concatenate",
    # operations
    "lookup",
    "scatter_assign",
    "scatter_weighted_sum",
    # transformations
    "DensifyError",
    "explain",
    "grad",
    "value_and_grad",
    # packages
    "extend",
    "optim",
}


def _public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        # `import sparsejax` binds its sub-packages as well; `transform` is one whose
        # names are all at the top.
        and not (inspect.ismodule(value) and name in ("transform", "demo"))
    }


def test_names():
    assert _public(sj) == NAMES
    assert _public(sj.extend) - {"Any", "Callable"} == {
        "RuleContext",
        "TableRef",
        "register_flow",
        "register_rule",
    }
    optim = {n for n in _public(sj.optim) if not inspect.ismodule(getattr(sj.optim, n))}
    assert optim == {"global_norm", "is_row_separable", "lazy"}


def test_version():
    assert sj.__version__
