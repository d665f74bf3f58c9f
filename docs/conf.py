"""The site: `make docs`, strict. Its sources are the repository's own pages.

The source folder is the root of the repository, so that a link between pages is the
same here as where the repository is read.
"""

import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import sparsejax  # noqa: E402


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
    "benchmarks/NOTES.md",
]
exclude_patterns = [".*", "**/.*", "build", "dist", "sparsejax", "tests"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
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
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    # What pytrees need, and fields that would show the text of JAX's initializers.
    "exclude-members": "tree_flatten_with_keys, tree_unflatten, param_dtype, "
    "initializer, bias_init, linear_init, kernel_init",
}
_SECTION = re.compile(r"(Args|Returns|Raises|Example|References|Yields):$")

# ------------------------------------------------------------------ pages

# Notebooks are kept with their outputs, and the tests run them.
nb_execution_mode = "off"
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# ------------------------------------------------------------------ looks

html_theme = "furo"
html_title = "sparsejax"
html_show_sourcelink = False
templates_path = ["_templates"]
# The root of the site leads to docs/index.
html_additional_pages = {"index": "to_index.html"}


def _formulas_as_they_stand(app, what, name, obj, options, lines):
    """What is indented in a docstring's text is a formula, or code: a literal block."""
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


def setup(app):
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", _formulas_as_they_stand, priority=1)
