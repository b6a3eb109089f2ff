"""The site's icons: the dozen that its pages use, as a style sheet in place of a library of 1.5 MB."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

LIBRARY = "_static/scripts/fontawesome.js"
SHEET = "_static/icons.css"
_USED = re.compile(r"fa-solid(?: fa-(?:lg|fw))* fa-([a-z-]+)")
_TAG = re.compile(r"\s*<(?:script|link)[^>]*fontawesome\.js[^>]*>(?:</script>)?")
_RULE = """.fa-{name}::before {{
  content: ""; display: inline-block; width: 1em; height: 1em; background: currentColor;
  mask: url("data:image/svg+xml,{svg}") center / contain no-repeat; vertical-align: -.125em;
}}
"""


class IconError(Exception):
    """The theme's library of icons is not as it was; the text says what to mend."""


def use_few_icons(site: Path) -> int:
    """Replace the library on all pages of a built site; returns how many icons there are.

    Raises:
        IconError: there is no such library, or it has no icon of that name.
    """
    pages = [(page, page.read_text(encoding="utf-8")) for page in sorted(site.rglob("*.html"))]
    scripts = (file for file in (site / "_static").rglob("*.js") if file.name != "fontawesome.js")
    texts = [text for _, text in pages] + [s.read_text(encoding="utf-8") for s in scripts]
    names = sorted({name for text in texts for name in _USED.findall(text)})
    library = site / LIBRARY
    if not library.is_file():
        raise IconError(f"The theme has no {LIBRARY} any more: see what brings its icons now.")
    source = library.read_text(encoding="utf-8")
    sheet = "".join(_RULE.format(name=name, svg=quote(picture(name, source))) for name in names)
    (site / SHEET).write_text(sheet, encoding="utf-8")
    for page, text in pages:
        up = "../" * (len(page.relative_to(site).parts) - 1)
        link = f'<link rel="stylesheet" href="{up}{SHEET}" />\n</head>'
        page.write_text(_TAG.sub("", text).replace("</head>", link, 1), encoding="utf-8")
    for file in library.parent.glob("*.map"):
        file.unlink()
    library.unlink()
    return len(names)


def picture(name: str, library: str) -> str:
    """One icon as SVG.

    Raises:
        IconError: the library has none of that name.
    """
    key = rf'(?:"{name}"|(?<![\w-]){name}):\[(\d+),(\d+),\[[^\]]*\],"\w+","([^"]+)"\]'
    found = re.findall(key, library)
    if not found:
        raise IconError(f"The theme's library of icons has no {name!r}: mend tools/_site_icons.py.")
    width, height, path = found[-1]  # outlined ones come before solid ones
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<path d="{path}"/></svg>'
    )
