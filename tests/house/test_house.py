"""The house: `import sparsejax` is light, and every public name has an example.

`make lint` checks the direction of imports (import-linter) and that only `_compat.py`
touches JAX's internals (ruff, TID251): see pyproject.toml.
"""

import ast
import collections
import functools
import importlib
import inspect
import pathlib
import textwrap
import types

from helpers import run_python


PACKAGE = pathlib.Path(__file__).parent.parent.parent / "sparsejax"


@functools.cache
def _parse(path):
    return ast.parse(path.read_text(), filename=str(path))


def _absolute(path, node):
    """The module that `from ... import` names, with relative names resolved."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    parts = package[: len(package) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _dotted(node):
    """The name that an expression like `jax.extend.core` spells, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


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


def _public_names(module):
    """Names without an underscore that a module defines or takes from the package."""
    path = pathlib.Path(module.__file__)
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom):
            if _absolute(path, node).split(".")[0] == "sparsejax":
                yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))


def _public(module, depth=1):
    """(qualified name, value) of what is public in a module and one level below."""
    for name in _public_names(module):
        value = getattr(module, name)
        if name.startswith("_"):
            continue
        if isinstance(value, types.ModuleType):
            if depth:
                yield from _public(value, depth - 1)
        else:
            yield f"{module.__name__}.{name}", value


def test_public_names_are_documented_with_an_example():
    missing = collections.defaultdict(list)
    for name, value in _public(importlib.import_module("sparsejax")):
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
