"""Sphinx's settings for the site: `make site` builds it from build/site-source.

No page may call out: formulas are MathML, widgets stand as what they last showed, and the theme brings its
scripts along. Its library of icons is replaced by those that are used (`tools/_site_icons.py`).
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_REPOSITORY = _PROJECT.get("urls", {}).get("Repository", "")

project = "Big Models, Small Memory"
html_title = project
author = "the authors of the course"
project_copyright = "the authors of the course. Apache License 2.0"
release = _PROJECT["version"]
language = "en"
extensions = ["myst_nb", "sphinx_copybutton", "_site_terms", "_site_math", "_site_order"]
exclude_patterns = ["_build"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3
# Notebooks and guides begin their sections where they like.
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type", "misc.highlighting_failure"]

html_math_renderer = "mathml"

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]  # and the figures, which `make site` stores
html_favicon = "_static/favicon.svg"
copybutton_selector = "div.cell_input pre, div.highlight pre"
copybutton_exclude = ".linenos, .gp"
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_last_updated_fmt = None
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "use_source_button": False,
    "navbar_persistent": [],  # one search field, in the side bar
    "repository_url": _REPOSITORY,
    "use_repository_button": bool(_REPOSITORY),
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
