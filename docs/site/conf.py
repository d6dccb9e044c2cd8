"""Settings of Sphinx for the documentation site. `docs/site/build.py` calls it."""

project = "plait"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = "plait"
html_show_copyright = False
html_extra_path = ["extra"]
exclude_patterns = ["extra"]
myst_heading_anchors = 3
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}
# Documents link to lines of code and to headings of other renderers; those links are not checked.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure", "docutils"]
