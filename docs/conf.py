"""How the pages are built: `make docs`."""

from __future__ import annotations

import metashard

project = "metashard"
author = "metashard"
copyright = "metashard contributors, Apache-2.0"
version = release = metashard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings: list[str] = []

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Memory"]
default_role = "code"  # docstrings put code between single backquotes, as Markdown does

html_theme = "furo"
html_title = "metashard"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sphinx = False
html_copy_source = False
