"""Makes a deck of each lesson from its own cells and figures: `make slides`.

The decks lie in build/slides, with reveal.js and MathJax beside them: open build/slides/index.html,
with or without a network. `s` opens the speaker's view, whose notes are the lesson's prose and how long
each section takes. A question's answer stands on the slide after it.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import posixpath
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import nbformat
from _built import digest, mark
from _notebook import Target, targets
from _site_notebooks import Figures, page
from _slide_cells import linked, slides
from nbconvert import SlidesExporter
from pygments.formatters import HtmlFormatter
from traitlets.config import Config
from workshop import MEASURED, WORDS_PER_MINUTE, sections

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.labs.cases import Question  # noqa: E402
from utils.labs.checking import find  # noqa: E402

VENDOR = Path("docs/vendor")
TEMPLATES = Path("docs/slides")
INDEX = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Slides: Big Models, Small Memory</title>
<style>body {{ font: 18px/1.6 sans-serif; max-width: 40em; margin: 2em auto; padding: 0 1em }}</style>
<h1>Slides</h1>
<p>One deck a lesson. The arrow keys turn the slides, s opens the speaker's view, and ?print-pdf
behind a deck's address lays it out for printing.</p>
<ul>
{rows}
</ul>
</html>
"""


def exporter(root: Path, up: str) -> SlidesExporter:
    """Writes decks that find reveal.js in the folder `up`."""
    settings = Config()
    settings.TagRemovePreprocessor.enabled = True
    settings.TagRemovePreprocessor.remove_input_tags = {"remove_input"}
    settings.SlidesExporter.reveal_url_prefix = up
    settings.SlidesExporter.reveal_theme = "course"
    return SlidesExporter(
        config=settings, template_name="course", extra_template_basedirs=[str(root / TEMPLATES)]
    )


def answer(name: str) -> str:
    """What a room is told after the question of an exercise's name; "" where more than one answer is right."""
    question = find(name)
    if not isinstance(question, Question):
        return ""
    right = question.right
    shown = (
        f"{right:,}"
        if isinstance(right, int)
        else f"{right:,.4g}"
        if isinstance(right, float)
        else str(right)
    )
    return f"**{shown}**. {question.note[:1].upper()}{question.note[1:]}."


def minutes(root: Path, path: Path) -> dict[str, str]:
    """For the speaker, by section's title: how long to read it aloud, and how long its cells run."""
    measured = json.loads((root / MEASURED).read_text(encoding="utf-8"))
    return {
        part.title: f"*{max(1, round(part.words / WORDS_PER_MINUTE))} min of words"
        + (f", {part.seconds:.0f} s of running (measured)*" if part.seconds else "*")
        for part in sections(root, path.as_posix(), measured)
    }


def place_of(target: Target) -> Path:
    """Where a lesson's deck lies below the folder of all decks."""
    return target.path.relative_to("notebooks").with_suffix(".html")


def deck(root: Path, target: Target, folder: Path, decks: Collection[str]) -> tuple[str, Path]:
    """Write one deck, with links to other `decks`; returns its title, and its place below `folder`."""
    place = place_of(target)
    stored = nbformat.read(root / target.path, as_version=4)
    for cell in stored.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, place, decks)
    title = stored.cells[0].source.partition("\n")[0].lstrip("# ")
    made = slides(
        page(stored, place, Figures(folder / "figures", "figures")),
        answer,
        minutes(root, target.path),
    )
    made.metadata["title"] = title
    up = posixpath.relpath("reveal", place.parent.as_posix())
    style = {"course_code_css": HtmlFormatter().get_style_defs(".highlight")}
    text, _ = exporter(root, up).from_notebook_node(made, style)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).write_text(text, encoding="utf-8")
    return title, place


def put_scripts(root: Path, folder: Path) -> None:
    """reveal.js, the theme and MathJax, beside the decks."""
    shutil.copytree(root / VENDOR / "reveal", folder / "reveal", dirs_exist_ok=True)
    mathjax = gzip.decompress((root / VENDOR / "mathjax-tex-svg.js.gz").read_bytes())
    (folder / "reveal/mathjax-tex-svg.js").write_bytes(mathjax)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the decks of all lessons, or of those that PATHs name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="lessons' notebooks; default: all")
    parser.add_argument(
        "--to", type=Path, default=root / "build/slides", help="default: build/slides"
    )
    options = parser.parse_args(arguments)
    lessons = [t for t in targets(root) if t.kind == "lesson"]
    unknown = set(options.paths) - {t.path.as_posix() for t in lessons}
    if unknown:
        print(
            f"{min(unknown)} is no lesson: give a path such as {lessons[0].path}.", file=sys.stderr
        )
        return 1
    shutil.rmtree(options.to, ignore_errors=True)
    inputs = digest(root)
    chosen = [t for t in lessons if t.path.as_posix() in options.paths] or lessons
    decks = {place_of(target).as_posix() for target in chosen}
    made = [deck(root, target, options.to, decks) for target in chosen]
    put_scripts(root, options.to)
    rows = [f'<li><a href="{place}">{html.escape(title)}</a></li>' for title, place in made]
    (options.to / "index.html").write_text(INDEX.format(rows="\n".join(rows)), encoding="utf-8")
    if chosen == lessons:
        mark(options.to, inputs)
    print(f"{options.to / 'index.html'}: {len(made)} decks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
