"""How Sphinx builds these pages."""

from importlib.metadata import version as version_of

# Before sphinx-click replaces modules by stand-ins, which a mapped class can't be built with.
import cyclone_sqla.cli.demo_shop  # noqa: F401

project = "cyclone-sqla"
author = "cyclone-sqla contributors"
copyright = "2026, cyclone-sqla contributors"  # noqa: A001 - Sphinx's own name
version = release = version_of("cyclone-sqla")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = "cyclone-sqla"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
suppress_warnings = ["ref.python"]
