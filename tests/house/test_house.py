"""The house: `import sparsejax` is light, and every public name has an example.

`make lint` checks the direction of imports (import-linter) and that only `_compat.py`
touches JAX's internals (ruff, TID251): see pyproject.toml.
"""

import collections
import inspect
import textwrap

import public_names
from helpers import run_python


# ------------------------------------------------------------------ weight


def test_import_is_light():
    """No optional package is loaded, and no device is touched, before it is needed."""
    code = """
        import sys
        import sparsejax
        from jax._src import xla_bridge

        optional = "flax equinox orbax scipy matplotlib tqdm grain chex".split()
        optional += "pandas polars pyarrow datasets sklearn".split()
        print(*(name for name in optional if name in sys.modules))
        print(xla_bridge.backends_are_initialized())
    """
    printed = run_python("-c", textwrap.dedent(code))
    loaded, initialized = printed.split("\n")[:2]
    assert loaded == "", f"import sparsejax also imports {loaded}"
    assert initialized == "False", "import sparsejax initialises a JAX backend"


# ------------------------------------------------------------------ documentation


def test_public_names_are_documented_with_an_example():
    missing = collections.defaultdict(list)
    for name, value in public_names.NAMES.items():
        if not callable(value):
            continue
        doc = inspect.getdoc(value) or ""
        if not doc:
            missing["a docstring"].append(name)
        elif "Example" not in doc or ">>>" not in doc.split("Example", 1)[1]:
            missing["an Example section with >>>"].append(name)
    assert not missing, "\n".join(
        f"without {what}: {', '.join(names)}" for what, names in missing.items()
    )
