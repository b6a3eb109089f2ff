"""Writes badges, clone lines and the public address from the one line in pyproject.toml, if any.

`python tools/badges.py` rewrites the files that carry it; the builder
calls `badge_markdown` for the notebooks. Standard library only.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
MEASURED = Path("docs/instructor/measured.json")
# What mybinder.org guarantees and what it allows (published: its user guidelines).
BINDER_BYTES, BINDER_MOST_BYTES = 10**9, 2 * 10**9
CARRIERS = ("README.md", "CONTRIBUTING.md", "sources/bootstrap.py")
_BADGES = re.compile(r"<!-- badges: (?P<notebook>\S+) -->.*?<!-- /badges -->")
_CLONE = re.compile(r"<!-- clone -->.*?<!-- /clone -->", re.DOTALL)
_ADDRESS = re.compile(r'(?<=repository=")[^"]*(?=")')


def repository_url(root: Path = ROOT) -> str:
    """The public address of the repository, from pyproject.toml; "" while it has none."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["project"].get("urls", {}).get("Repository", "").rstrip("/")


def badge_markdown(notebook_path: str, repository_url: str) -> str:
    """The Colab and Binder badges of one notebook, such as "notebooks/00_start_here.ipynb".

    None, "", while there is no address, or where it is not one of GitHub, which both services need.

    Raises:
        ValueError: an address of GitHub that names no repository.
    """
    if not repository_url.startswith("https://github.com/"):
        return ""
    match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", repository_url)
    if not match:
        raise ValueError(
            f"{repository_url!r} names no repository: write https://github.com/ACCOUNT/NAME. "
            "Change Repository in pyproject.toml."
        )
    colab = f"https://colab.research.google.com/github/{match[1]}/blob/main/{quote(notebook_path)}"
    binder = f"https://mybinder.org/v2/gh/{match[1]}/main?labpath={quote(notebook_path, safe='')}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})"
        f"{beyond_binder(notebook_path)}"
    )


def beyond_binder(notebook_path: str, root: Path = ROOT) -> str:
    """What to say at the badge of a lesson that was measured to take more than Binder guarantees."""
    file = root / MEASURED
    rows = on_binder(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    taken = rows.get(notebook_path, {}).get("peak_bytes", 0)
    if taken <= BINDER_BYTES:
        return ""
    if taken <= BINDER_MOST_BYTES:
        return f" (takes {taken / 10**9:.1f} GB; Binder guarantees 1 GB and allows up to 2)"
    return f" (takes {taken / 10**9:.1f} GB, beyond the 2 GB that Binder allows)"


def on_binder(measured: dict) -> dict:
    """By lesson, the row that holds for Binder: it has no GPU, and environment.yml gives it the CPU build."""
    return measured.get("lessons", {}) | measured.get("cpu_build", {})


def with_badges(text: str, url: str) -> str:
    """The text with its badges, its clone lines and the bootstrap's address filled anew."""

    def rewrite(match: re.Match[str]) -> str:
        badges = badge_markdown(match["notebook"], url)
        return f"<!-- badges: {match['notebook']} -->{badges}<!-- /badges -->"

    clone = f"```\ngit clone {url}\n```\n" if url else ""
    text = _CLONE.sub(f"<!-- clone -->\n{clone}<!-- /clone -->", text)
    return _ADDRESS.sub(url, _BADGES.sub(rewrite, text))


def outdated(root: Path = ROOT) -> dict[Path, str]:
    """The files that differ from pyproject.toml's address, with the text they should have."""
    url = repository_url(root)
    old = {root / name: (root / name).read_text(encoding="utf-8") for name in CARRIERS}
    new = {path: with_badges(text, url) for path, text in old.items()}
    return {path: text for path, text in new.items() if text != old[path]}


def main() -> None:
    """Rewrite what is outdated, and say what was."""
    changed = outdated()
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"rewrote {path.relative_to(ROOT)}")
    if not changed:
        print("badges already agree with pyproject.toml")
    else:
        print("now run `make notebooks`: the notebooks carry the same address")


if __name__ == "__main__":
    main()
