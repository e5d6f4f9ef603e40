"""How the documentation is built: ``python -m sphinx -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the directives beside this file

from tba_offload import __version__

project = "tba-offload"
copyright = "the authors of tba-offload"  # noqa: A001 - Sphinx gives it this name
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "generated",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # it would make one dash of the two of an option

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"tba-offload {__version__}"
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # summaries are fetched, which a browser does not do on a disk
