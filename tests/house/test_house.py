"""The house: which file may import which, and what is documented.

Imports point one way: packages -> optim -> transform -> _lookup -> _segments -> _rows
-> _arguments, _files, _hashing -> _compat. They are read from the source, so
an import inside a function counts as well; one for type checkers alone does not.
"""

import ast
import collections
import functools
import importlib
import inspect
import pathlib
import textwrap
import types

import pytest

from helpers import run_python


PACKAGE = pathlib.Path(__file__).parent.parent.parent / "sparsejax"
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters")

# Each may import what is in a line above its own. Rooms of one line do not import each
# other, but for the packages, which may as long as no circle comes of it.
LAYERS = [
    {"_compat"},
    {"_arguments", "_files", "_hashing"},
    {"_progress"},
    {"_rows"},
    {"_segments", "_index"},
    {"_lookup"},
    {"transform"},
    {"optim", "extend", "cpu"},
    {"nn", "data", "store", "parallel", "desc", "viz", "losses"},
    {""},  # sparsejax/__init__.py, which imports all of them
]
PACKAGES = LAYERS[-2]

# Inside a room: what is in the left part must not import what is in the right one.
INSIDE = [
    ("_rows.indexing", "_rows.selected_rows"),
    ("_rows.selected_rows", "_rows.scatter"),
    ("_segments.segment_tensor", "_segments.reduce"),
    ("_segments.segment_tensor", "_segments.pack"),
    ("_segments.segment_tensor", "_segments.unique"),
    ("_lookup.lowerings", "_lookup.lookup"),
    ("_lookup.lowerings", "_lookup.embedding_bag"),
    ("_lookup.lookup", "_lookup.embedding_bag"),
    ("_lookup.lookup", "_lookup.top_k"),
    ("transform.interpreter", "transform.rules"),
    ("transform.table", "transform.interpreter"),
    ("optim._lazy", "optim._exact"),
    ("optim._lazy", "optim._optimizers"),
    ("optim._lazy", "optim._wrappers"),
    ("optim._optimizers", "optim._exact"),
    ("optim._optimizers", "optim._wrappers"),
    ("optim._exact", "optim._optimizers"),
    ("optim._exact", "optim._wrappers"),
]

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


def _nodes_that_run(node):
    """All nodes but those under `if TYPE_CHECKING:`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield from _nodes_that_run(child)


def _imported(path):
    """Full names of all that a file imports: modules, or names out of them."""
    for node in _nodes_that_run(_parse(path)):
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
    """The name right under the package: _rows, _lowerings, transform, nn."""
    return module.split(".")[1] if "." in module else ""


def _is_in(module, part):
    return f"{module}.".startswith(f"sparsejax.{part}.")


@functools.cache
def _graph():
    """What each file imports, itself and the packages' `__init__` left out.

    An `__init__` only hands on names, and importing a module runs the `__init__` above
    it: what counts is the file that a name comes from.
    """
    inits = {m for m, path in MODULES.items() if path.name == "__init__.py"}
    graph = {}
    for module in MODULES.keys() - inits:
        found = set(_house_imports(MODULES[module]))
        while passed_on := found & inits:
            found -= passed_on
            for package in passed_on - {"sparsejax"}:
                found |= set(_house_imports(MODULES[package])) - {package}
        graph[module] = found - {module}
    return graph


# ------------------------------------------------------------------ import direction


@each_file
def test_imports_point_one_way(path):
    room = _room(_module_name(path))
    (level,) = (k for k, rooms in enumerate(LAYERS) if room in rooms)
    allowed = {room}.union(*LAYERS[:level])
    if room in PACKAGES:
        allowed |= PACKAGES
    wrong = sorted(m for m in _house_imports(path) if _room(m) not in allowed)
    assert not wrong, f"{path.name} must not import {wrong}: see LAYERS"


@pytest.mark.parametrize("part, other", INSIDE)
def test_imports_point_one_way_inside_a_room(part, other):
    assert any(_is_in(m, part) for m in MODULES), f"no file {part}"
    assert any(_is_in(m, other) for m in MODULES), f"no file {other}"
    graph = _graph()
    for module in (m for m in graph if _is_in(m, part)):
        seen, queue = set(), {module}
        while queue:
            seen |= queue
            queue = set().union(*(graph[m] for m in queue)) - seen
        wrong = sorted(m for m in seen if _is_in(m, other))
        assert not wrong, f"{module} reaches {wrong}"


def test_no_file_imports_itself_through_others():
    graph = dict(_graph())
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
