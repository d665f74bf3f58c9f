"""The site: `make docs`, strict. Its sources are the repository's own pages.

The source folder is the root of the repository, so that a link between pages is the
same here as where the repository is read.
"""

import collections
import json
import os
import re
import sys
import tomllib
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("KERAS_BACKEND", "jax")  # autodoc imports sparsejax.nn.keras

import sparsejax  # noqa: E402


_ROOT = Path(__file__).parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]

project = "sparsejax"
copyright = "the sparsejax authors"
version = release = sparsejax.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "**/.*", "build", "dist", "sparsejax", "tests"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# ------------------------------------------------------------------ docstrings

# `x` in a docstring is code, as in markdown.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # "Args:" says more than they do
autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    # Methods of pytrees, and fields that would show the text of JAX's initializers.
    "exclude-members": "tree_flatten, tree_flatten_with_keys, tree_unflatten, "
    "param_dtype, "
    "embedding_init, initializer, bias_init, linear_init, kernel_init",
}
autosummary_generate = False  # the tables lead to entries of the same page
_SECTION = re.compile(r"(Args|Returns|Raises|Example|References|Yields):$")
_ENTRY = re.compile(r"\.\. (currentmodule|auto\w+):: (\S+)")

# ------------------------------------------------------------------ pages

# Notebooks are kept with their outputs, and the tests run them.
nb_execution_mode = "off"
myst_heading_anchors = 4
highlight_language = "none"  # a block that names no language is what was printed
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# ------------------------------------------------------------------ looks

pygments_style = "friendly"  # green and red where a step changes

html_theme = "furo"
html_title = "sparsejax"
html_show_sourcelink = False
html_theme_options = {
    "source_repository": _PROJECT["urls"]["Repository"] + "/",
    "source_branch": "main",
    "source_directory": "",
    "top_of_page_buttons": ["view"],
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
# The root of the site leads to docs/index.
html_additional_pages = {"index": "to_index.html"}


def _formulas_as_they_stand(app, what, name, obj, options, lines):
    """Makes a literal block of an indented part of a docstring: a formula, or code."""
    end = next((k for k, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    for k in reversed(range(1, end)):
        if not lines[k].startswith("  ") or lines[k - 1].strip():
            continue
        # A space: further down in such a block. Colons: it is one already.
        before = _before(lines, k)
        if not before.startswith((" ", "- ")) and not before.endswith("::"):
            lines[k:k] = ["::", ""]


def _before(lines, k):
    """The last line of text above line `k`."""
    return next((line for line in reversed(lines[:k]) if line.strip()), "")


def _returns_have_no_type(app, what, name, obj, options, lines):
    """The words before a colon in "Returns:" are no type: they may be half a shape.

    napoleon cuts the first line of the section at its first colon. This gives it one of
    its own, with nothing before it.
    """
    for k, line in enumerate(lines[:-1]):
        if line in ("Returns:", "Yields:"):
            text = lines[k + 1].lstrip()
            lines[k + 1] = lines[k + 1].removesuffix(text) + ": " + text


def _summaries(app, docname, source):
    """A page of the reference has a line for each of its names, before the first."""
    if not docname.startswith("docs/reference/"):
        return
    names, module = [], None
    for kind, name in _ENTRY.findall(source[0]):
        if kind == "currentmodule":
            module = name
        else:
            names.append((module, name))
    if not names:
        return
    known = collections.Counter(name for _, name in names)
    table = [
        f"   {'~' if known[name] == 1 else ''}{module}.{name}" for module, name in names
    ]
    block = [
        "```{eval-rst}",
        ".. autosummary::",
        "   :nosignatures:",
        "",
        *table,
        "```",
    ]
    start = re.search(r"^(## |```)", source[0], re.MULTILINE).start()
    source[0] = source[0][:start] + "\n".join(block) + "\n\n" + source[0][start:]


def _navigation(app, docname, source):
    """Makes the navigation from the tables of the home page, one part a section."""
    if docname != root_doc:
        return
    trees = []
    for section in source[0].split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        rows = [line for line in text.splitlines() if line.startswith("| [")]
        pages = [re.match(r"\| \[(.*?)\]\((.*?)\)", row).groups() for row in rows]
        entries = [f"{title} <{page}>" for title, page in pages]
        options = [":hidden:", f":caption: {caption}", ""]
        trees += ["```{toctree}", *options, *entries, "```", ""]
    source[0] += "\n" + "\n".join(trees)


def _title_first(app, docname, source):
    """A notebook's first cell, which installs, is not shown on the site."""
    if docname.startswith("notebooks/"):
        notebook = json.loads(source[0])
        first = notebook["cells"][0]
        assert first["cell_type"] == "code", docname
        first["metadata"]["tags"] = ["remove-cell"]
        source[0] = json.dumps(notebook)


def setup(app):
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", _formulas_as_they_stand, priority=1)
    app.connect("autodoc-process-docstring", _returns_have_no_type, priority=2)
    app.connect("source-read", _summaries)
    app.connect("source-read", _title_first)
    app.connect("source-read", _navigation)
