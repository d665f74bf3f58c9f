"""The house: which file may import which, how long a file may be, what is documented.

Imports point one way: packages -> transform, optim -> operations -> types -> _compat.
They are read from the source, so an import inside a function counts as well.
"""

import ast
import collections
import functools
import importlib
import inspect
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest


PACKAGE = pathlib.Path(__file__).parent.parent / "sparsejax"
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters")
MAX_LINES = 400

# Whatever else is called `_x` at the top is a part of one of the two.
TYPES = {"_rows", "_segments"}
OPERATIONS = {
    "_lookup",
    "_scatter",
    "_reduce",
    "_reduce_args",
    "_reduce_counts",
    "_reduce_exp",
    "_reduce_extremes",
    "_reduce_moments",
    "_reduce_scan",
    "_reduce_top_k",
    "_bag",
    "_dot",
    "_pack",
    "_unique",
    "_lowerings",
}
CORE_PACKAGES = {"transform", "optim"}
PACKAGES = {"nn", "data", "store", "parallel", "desc", "viz"}

FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize(
    "path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES]
)


# ------------------------------------------------------------------ reading imports


def _module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in FILES}


@functools.cache
def _parse(path):
    return ast.parse(path.read_text(), filename=str(path))


def _absolute(path, node):
    """The module that `from ... import` names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    parts = package[: len(package) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _imported(path):
    """Full names of all that a file imports: modules, or names out of them."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _house_imports(path):
    """The modules of the package that a file imports; "sparsejax" is its __init__."""
    found = set()
    for name in _imported(path):
        if name.split(".")[0] != "sparsejax":
            continue
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        found.add(name)
    return found


def _room(module):
    """The name right under the package: _rows, _lowerings, transform, nn, demo."""
    return module.split(".")[1] if "." in module else ""


def _reachable(room):
    """The rooms that a room imports, directly or through others."""
    seen, queue = set(), [room]
    while queue:
        for path in (p for m, p in MODULES.items() if _room(m) == queue[0]):
            new = {_room(module) for module in _house_imports(path)} - seen
            seen |= new
            queue.extend(new)
        queue.pop(0)
    return seen


# ------------------------------------------------------------------ import direction


@each_file
def test_imports_point_one_way(path):
    imports = {_room(module): module for module in _house_imports(path)}
    room = _room(_module_name(path))
    if room == "_compat":
        allowed = set()
    elif room.startswith("_"):
        allowed = {other for other in imports if other.startswith("_")}
    elif room in CORE_PACKAGES:
        allowed = imports.keys() - PACKAGES - {"", "demo"}
    else:
        allowed = imports.keys() - ({"demo"} - {room})
    wrong = sorted(module for other, module in imports.items() if other not in allowed)
    assert not wrong, (
        f"{path.name} must not import {wrong}: imports point from packages to "
        "transform and optim, to operations, to types, to _compat"
    )


@pytest.mark.parametrize("room", sorted(TYPES))
def test_types_know_no_operation(room):
    wrong = sorted(_reachable(room) & OPERATIONS)
    assert not wrong, f"{room} reaches the operations {wrong}"


def test_types_and_operations_import_in_no_circle():
    graph = {
        module: {m for m in _house_imports(path) if m != module}
        for module, path in MODULES.items()
        if _room(module).startswith("_")
    }
    # Take away what imports nothing that is left; a circle is what never goes.
    while leaves := [m for m, imports in graph.items() if not imports & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"these import each other in a circle: {sorted(graph)}"


def _dotted(node):
    """The name that an expression like `jax.extend.core` spells, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


@each_file
def test_only_compat_touches_jax_internals(path):
    if path == PACKAGE / "_compat.py":
        return
    spelled = {_dotted(node) for node in ast.walk(_parse(path))}
    names = {*_imported(path), *filter(None, spelled)}
    internals = tuple(f"{name}." for name in INTERNALS)
    wrong = sorted(name for name in names if f"{name}.".startswith(internals))
    assert not wrong, f"{wrong}: JAX internals only in sparsejax/_compat.py"


# ------------------------------------------------------------------ size and weight


@each_file
def test_files_stay_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path.name} has {lines} lines; split it by idea"


def test_import_is_light():
    """No optional package is loaded, and no device is touched, before it is needed."""
    code = """
        import sys
        import sparsejax
        from jax._src import xla_bridge

        optional = "flax equinox orbax scipy matplotlib tqdm grain".split()
        print(*(name for name in optional if name in sys.modules))
        print(xla_bridge.backends_are_initialized())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded, initialized = done.stdout.split("\n")[:2]
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
