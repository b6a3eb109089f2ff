"""Builds the static site from the stored notebooks and their outputs: `make site`.

It runs no cell and asks no network. What Sphinx reads lies in build/site-source, the site itself in
build/site: open build/site/index.html, or put the folder on any server.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import nbformat
from _built import digest, mark
from _notebook import Target, targets
from _site_frame import mend_frames
from _site_icons import use_few_icons
from _site_notebooks import Figures, anchored, page
from _site_search import scorer

ROOT = Path(__file__).resolve().parents[1]
FRAME = Path("docs/site")
NO_SPHINX = (
    "The site needs Sphinx and its theme, which are not in .venv. `make site` adds them, or without "
    "make: .venv/bin/python tools/extra.py site"
)
NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton", "latex2mathml")
TIERS = (("beginner", "Beginner"), ("intermediate", "Intermediate"), ("advanced", "Advanced"))
# Prose that stands in files of its own; the site has it under the same names.
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
MANUALS = ("docs/simulator.md", "docs/architecture.md")
GUIDES = ("docs/instructor/*.md", "docs/cluster_owners.md")
SCORER = "scorer.js"
RANKED = ("lesson",)  # what search shows first
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NOT_A_PAGE = re.compile(r"\[([^\]]+)\]\((?:LICENSE|CITATION\.cff)\)")


def prepare(root: Path, folder: Path, chosen: Sequence[Target]) -> None:
    """Write what Sphinx reads: pages of notebooks, the front page, indexes, scripts.

    Args:
        root: The repository.
        folder: Where it goes; what is there is deleted first.
        chosen: The notebooks that become pages.
    """
    shutil.rmtree(folder, ignore_errors=True)
    figures = Figures(folder / "_vendor" / "figures", "_static/figures")
    for target in chosen:
        write(folder / target.path, notebook_text(root, target, figures))
    write(folder / SCORER, scorer(dict(spoken(root, t) for t in chosen if t.kind in RANKED)))
    for name in (*PAGES, *MANUALS):
        write(folder / name, on_site((root / name).read_text(encoding="utf-8")))
    for guide in guides(root):
        write(folder / guide, on_site((root / guide).read_text(encoding="utf-8")))
    for picture in sorted(p for kind in ("png", "svg") for p in (root / "docs").glob(f"*.{kind}")):
        (folder / "docs").mkdir(parents=True, exist_ok=True)
        shutil.copy2(picture, folder / "docs" / picture.name)
    write(folder / "index.md", front_page(root, chosen))
    for kind in ("lab", "solution"):
        write(folder / f"{kind}s/index.md", index_of(kind, chosen))


def spoken(root: Path, target: Target) -> tuple[str, str]:
    """A page's name, and its words and code."""
    cells = nbformat.read(root / target.path, as_version=4).cells
    text = "\n".join(c.source for c in cells if "bootstrap" not in c.metadata.get("tags", ()))
    return target.path.with_suffix("").as_posix(), text


def notebook_text(root: Path, target: Target, figures: Figures) -> str:
    """A notebook's page, as the text of a notebook."""
    stored = nbformat.read(root / target.path, as_version=4)
    made = page(stored, target.path, figures)
    first = made.cells[0]
    if target.kind == "solution":  # its lab has the same title, and search shows titles
        first.source = first.source.replace("# Lab ", "# Solution ", 1)
    return nbformat.writes(made)


def front_page(root: Path, chosen: Sequence[Target]) -> str:
    """The README, and what stands in the site's menu."""
    text = on_site((root / "README.md").read_text(encoding="utf-8"))
    paths = {target.path.as_posix() for target in chosen}
    text += contents("Start", [p for p in ("notebooks/00_start_here.ipynb",) if p in paths])
    for tier, title in TIERS:
        lessons = [
            t.path.as_posix()
            for t in chosen
            if t.kind in ("lesson", "page") and t.path.parts[1] == tier
        ]
        text += contents(title, lessons)
    last = sorted(
        path for path in paths if path.count("/") == 1 and not path.endswith("start_here.ipynb")
    )
    text += contents("Look up", [*last, *MANUALS, "labs/index.md", "solutions/index.md"])
    return text + contents("Teach", guides(root)) + contents("The project", PAGES)


def guides(root: Path) -> list[str]:
    """The pages for those who teach the course, or run the machines it is taught on."""
    found = (sorted(root.glob(pattern)) for pattern in GUIDES)
    return [path.relative_to(root).as_posix() for paths in found for path in paths]


def index_of(kind: str, chosen: Sequence[Target]) -> str:
    """The page that lists all labs, or all solutions."""
    paths = [t.path.relative_to(f"{kind}s").as_posix() for t in chosen if t.kind == kind]
    told = {
        "lab": "Each lab checks your answers. Work on a copy: `make my-labs` makes one.",
        "solution": "Each solution is the lab solved and run.",
    }[kind]
    return f"# {kind.title()}s\n\n{told}\n{contents('', paths, hidden=False)}"


def contents(caption: str, paths: Iterable[str], hidden: bool = True) -> str:
    """A table of contents as MyST writes it; nothing where it would be empty."""
    lines = [path.rpartition(".")[0] for path in paths]
    if not lines:
        return ""
    options = [f":caption: {caption}"] * bool(caption) + [":hidden:"] * hidden
    return "\n```{toctree}\n" + "\n".join([*options, "", *lines]) + "\n```\n"


def on_site(text: str) -> str:
    """Markdown of the repository with links to what the site has."""
    text = _COMMENT.sub("", text)
    text = re.sub(r"\]\((labs|solutions)\)", r"](\1/index.md)", anchored(text))
    return _NOT_A_PAGE.sub(r"\1", text)


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(
    root: Path, source: Path, site: Path, whole: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Sphinx. A link that leads nowhere is an error, where the whole site is built."""
    shutil.rmtree(site, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-j",
        "auto",
        "-q",
        "-W",
        "--keep-going",
        "-E",
        "-d",
        str(source / "_build"),
        "-c",
        str(root / FRAME),
        "-D",
        f"html_static_path={root / FRAME}/_static,{source}/_vendor",
        "-D",
        f"html_search_scorer={source / SCORER}",
        str(source),
        str(site),
    ]
    if not whole:
        command += ["-D", "suppress_warnings=myst.header,myst.xref_missing"]
    return subprocess.run(command, capture_output=True, text=True)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build all, or with PATHs only these notebooks; 0 if the site was built without a warning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="notebooks; default: all")
    parser.add_argument("--to", type=Path, default=root / "build", help="default: build/")
    options = parser.parse_args(arguments)
    if not all(map(importlib.util.find_spec, NEEDED)):
        print(NO_SPHINX, file=sys.stderr)
        return 1
    everything = targets(root)
    chosen = [t for t in everything if t.path.as_posix() in options.paths] or everything
    started, inputs = time.perf_counter(), digest(root)
    source, site = options.to / "site-source", options.to / "site"
    prepare(root, source, chosen)
    done = build(root, source, site, whole=chosen == everything)
    print(done.stdout + done.stderr, end="", file=sys.stderr)
    if done.returncode:
        return 1
    use_few_icons(site)
    mend_frames(site)
    if chosen == everything:
        mark(site, inputs)
    megabytes = sum(f.stat().st_size for f in site.rglob("*") if f.is_file()) / 1e6
    print(
        f"{site / 'index.html'}: {len(chosen)} notebooks, {megabytes:.0f} MB, "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
