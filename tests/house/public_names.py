"""The public names of sparsejax, and the methods of public classes."""

import ast
import functools
import importlib
import inspect
import pathlib
import types
from typing import Any


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


def names_of(module):
    """Names without an underscore that a module defines or takes from the package."""
    path = pathlib.Path(module.__file__)
    found = []
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom):
            if _absolute(path, node).split(".")[0] == "sparsejax":
                found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [t.id for t in node.targets if isinstance(t, ast.Name)]
    return [name for name in found if not name.startswith("_")]


def _walk(module, depth=1):
    for name in names_of(module):
        value = getattr(module, name)
        if not isinstance(value, types.ModuleType):
            yield f"{module.__name__}.{name}", value
        elif depth:
            yield from _walk(value, depth - 1)


# By qualified name: the public names of the package and of its sub-packages.
NAMES: dict[str, Any] = dict(_walk(importlib.import_module("sparsejax")))


def _functions():
    for name, value in NAMES.items():
        if inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value):
            continue
        yield name, value
        for key in dir(value):
            method = inspect.getattr_static(value, key)
            method = getattr(method, "__func__", method)
            ours = (getattr(method, "__module__", None) or "").startswith("sparsejax")
            if inspect.isfunction(method) and ours and not key.startswith("_"):
                yield f"{name}.{key}", method


# By qualified name: public functions, classes and their methods.
FUNCTIONS: dict[str, Any] = dict(_functions())


def parameters_of(value):
    """The parameters of a function or a class, but `self`, `cls` and private ones."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return {}
    found = inspect.signature(value).parameters
    hidden = ("self", "cls")
    return {k: p for k, p in found.items() if k not in hidden and k[0] != "_"}
