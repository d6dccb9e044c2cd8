"""Settings of Sphinx for the documentation site. `docs/site/build.py` calls it."""

import re

project = "plait"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "plait"
html_show_copyright = False
html_extra_path = ["extra"]
exclude_patterns = ["extra"]
myst_heading_anchors = 3
default_role = "literal"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}
# Documents link to lines of code and to headings of other renderers; those links are not checked.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure", "docutils"]


def setup(app):
    """Sphinx calls this with its application."""
    app.connect("autodoc-process-signature", readable)


DEFAULT = re.compile(r"<\w[^<>]*(?:<[^<>]*>[^<>]*)?>")
"""A default value that is no Python: `<factory>`, `<function <lambda>>`."""


def readable(*event):
    """A signature that Sphinx can read as Python, so that it shortens the names of types."""
    signature, returns = event[-2:]
    return signature and DEFAULT.sub("...", signature), returns
