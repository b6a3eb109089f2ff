"""Sphinx's settings for the site: `make site` builds it from build/site-source.

No page may call out: MathJax is vendored, widgets stand as what they last showed, and the theme
brings its fonts and scripts along.
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
release = _PROJECT["version"]
language = "en"
extensions = ["myst_nb", "_site_terms"]
exclude_patterns = ["_build"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3
# Notebooks and guides begin their sections where they like.
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type", "misc.highlighting_failure"]

mathjax_path = "vendor/mathjax-tex-svg.js"
mathjax3_config = {
    # Its menu would put each formula into the order of the Tab key.
    "options": {"enableMenu": False, "ignoreHtmlClass": "tex2jax_ignore|mathjax_ignore|document",
                "processHtmlClass": "tex2jax_process|mathjax_process|math|output_area"},
    "svg": {"fontCache": "local"},
}  # fmt: skip

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]  # and the vendored scripts, which `make site` unpacks
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
