"""Help pages: checks of the docstrings of public names.

`Args` name the parameters of a function and no others. A function that has a `raise`
lists its errors. Ruff (D) checks the form of docstrings; `tests/house/test_house.py`
requires examples, which run as doctests.
"""

import ast
import inspect
import re
import textwrap

import pytest

import public_names
import sparsejax as sj
from public_names import FUNCTIONS, parameters_of


PACKAGES = "cpu data desc extend losses nn optim parallel store viz".split()
SECTION = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
SECTIONS = {"Args", "Returns", "Raises", "Example", "References"}


def _sections(value):
    """The sections of a docstring by name; "" is the text before them."""
    parts = SECTION.split(inspect.getdoc(value) or "")
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def _named(section):
    """The names in front of the colons: `a, b: description`."""
    lines = re.split(r"^\S", section.strip("\n"), flags=re.MULTILINE)[0].splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    heads = [line.split(":")[0] for line in lines if line[indent : indent + 1].strip()]
    return {name.strip(" *") for head in heads for name in head.split(",")}


def _raises(function):
    """Whether it has a `raise`; those of inner functions are left out."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError):
        return False
    queue = list(getattr(body, "body", []))
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Raise) and node.exc:
            if "AssertionError" not in ast.unparse(node.exc):
                return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            queue.extend(ast.iter_child_nodes(node))
    return False


# ------------------------------------------------------------------ each name


def _complaints(check):
    """The complaints of `check` about public names, by name."""
    found = [(name, check(name, value)) for name, value in FUNCTIONS.items()]
    return "\n".join(f"{name}: {complaint}" for name, complaint in found if complaint)


def _is_method(name):
    return name.split(".")[-2][:1].isupper()


def _args(name, value):
    sections = _sections(value)
    unknown = sections.keys() - SECTIONS - {""}
    if unknown:
        return f"the sections {unknown} are not the house's"
    if inspect.isclass(value) and issubclass(value, Exception):
        return None
    own, fields = parameters_of(value).keys(), set()
    if inspect.isclass(value):
        fields = set(getattr(value, "__annotations__", {}))
    if "Args" not in sections:
        return "no Args" if own and not _is_method(name) else None
    named = _named(sections["Args"])
    if named - own - fields or own - named:
        return f"Args name {sorted(named)}, the parameters are {sorted(own)}"
    return None


def test_args_are_theparameters_of():
    assert not (found := _complaints(_args)), found


def _returns(name, value):
    if inspect.isclass(value) or _is_method(name):
        return None
    gives = inspect.signature(value).return_annotation not in (None, "None")
    return "no Returns" if gives and "Returns" not in _sections(value) else None


def test_what_functions_return_is_told():
    assert not (found := _complaints(_returns)), found


def _errors(name, value):
    function = vars(value).get("__init__") if inspect.isclass(value) else value
    if not inspect.isfunction(function) or "Raises" in _sections(value):
        return None
    return "raises, and does not say so" if _raises(function) else None


def test_errors_are_told():
    assert not (found := _complaints(_errors)), found


def test_the_walk_finds_what_it_should():
    """That the tests above look at something."""
    assert {"sparsejax.lookup", "sparsejax.SelectedRows.get"} <= FUNCTIONS.keys()
    assert parameters_of(sj.lookup).keys() == _named(_sections(sj.lookup)["Args"])
    assert _raises(sj.SelectedRows.from_dense)


# ------------------------------------------------------------------ packages


@pytest.mark.parametrize("package", ("", *PACKAGES))
def test_a_package_names_what_is_in_it(package):
    module = getattr(sj, package) if package else sj
    names = public_names.names_of(module)
    doc = module.__doc__ or ""
    missing = {name for name in names if not re.search(rf"`{name}[`(]", doc)}
    assert not missing, f"the docstring of {module.__name__} misses {sorted(missing)}"


def test_signatures_have_the_names_of_types():
    """`ArrayLike`, and not all that it stands for, which fills a screen."""
    errors = {k for k, v in FUNCTIONS.items() if inspect.isclass(v) and _is_error(v)}
    shown = {k: str(inspect.signature(FUNCTIONS[k])) for k in FUNCTIONS.keys() - errors}
    assert not {k: v for k, v in shown.items() if "jaxlib" in v or "Union[" in v}


def _is_error(kind):
    return issubclass(kind, Exception)
