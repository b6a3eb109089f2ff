"""What a learner has solved so far: `progress()`, as a table with links and as a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.labs.scoreboard import CHECKED, Row, ScoreboardError, read_rows, scoreboard_path
from utils.views.style import course_style

__all__ = ["Lab", "Progress", "draw_progress", "progress"]

ROOT = Path(__file__).resolve().parents[2]
CHECKS = re.compile(r'(?:check\(\s*"\w+\.|hand_in\(\s*")(\w+)"')  # lab 99 hands answers in
SOLVED, TRIED, OPEN = "#1170aa", "#f3d2c8", "white"


@dataclass(frozen=True)
class Lab:
    """One lab.

    Attributes:
        number, title: Of the lesson.
        path: Of the notebook, in `labs/`.
        exercises: In the order of the page.
        said: What the check last said of those that were tried.
    """

    number: str
    title: str
    path: Path
    exercises: tuple[str, ...]
    said: dict[str, Row]

    @property
    def solved(self) -> list[str]:
        """Exercises with a right answer."""
        return [
            name for name in self.exercises if name in self.said and _is_solved(self.said[name])
        ]

    @property
    def next(self) -> str:
        """The first exercise that is not solved; empty where all are."""
        return next((name for name in self.exercises if name not in self.solved), "")

    @property
    def scores(self) -> list[str]:
        """Scores beside their pars, of exercises that have one."""
        return [f"{name}: {self.said[name].score}" for name in self.solved if self.said[name].score]


@dataclass(frozen=True)
class Progress:
    """All labs; shows itself as the last line of a cell."""

    labs: tuple[Lab, ...]
    problem: str = ""

    @property
    def sentence(self) -> str:
        """How many of all, and what comes next."""
        if self.problem:
            return self.problem
        count = sum(len(lab.exercises) for lab in self.labs)
        done = sum(len(lab.solved) for lab in self.labs)
        following = next((f"{lab.number}.{lab.next}" for lab in self.labs if lab.next), "")
        return f"{done} of {count} exercises solved. " + (
            f"Next: {following}." if following else "That is all of them."
        )

    def __str__(self) -> str:
        lines = [
            f"{lab.number:<4}{lab.title:<44}{len(lab.solved):>3} of {len(lab.exercises):<4}"
            + "; ".join(lab.scores)
            for lab in self.labs
        ]
        return "\n".join([self.sentence, *(line.rstrip() for line in lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "<tr><th>lab</th><th>solved</th><th>next</th><th>scores</th></tr>"
        rows = "".join(map(_html_row, self.labs))
        return f"<p>{escape(self.sentence)}</p><table>{head}{rows}</table>"


def progress() -> Progress:
    """What the scoreboard knows of each lab's exercises."""
    try:
        rows = read_rows(scoreboard_path())
    except ScoreboardError as error:
        return Progress(tuple(_labs([])), str(error))
    return Progress(tuple(_labs([row for row in rows if row.evidence == CHECKED])))


def _labs(rows: list[Row]) -> Iterator[Lab]:
    for path in sorted((ROOT / "labs").rglob("*.ipynb"), key=lambda path: path.name):
        if path.parent.name == ".ipynb_checkpoints":
            continue
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        number = path.name.partition("_")[0]
        title = text.partition("\n")[0].lstrip("# ")
        exercises = tuple(dict.fromkeys(CHECKS.findall(text)))
        said = {row.what: row for row in rows if row.lesson == number}
        yield Lab(number, title, path.relative_to(ROOT / "labs"), exercises, said)


def _is_solved(row: Row) -> bool:
    return row.verdict == "correct"


def _html_row(lab: Lab) -> str:
    copied = (ROOT / "my_labs" / lab.path).is_file()
    place = f"../{'my_labs' if copied else 'labs'}/{lab.path.as_posix()}"
    cells = (
        f'<a href="{escape(place)}">{escape(lab.title)}</a>',
        f"{len(lab.solved)} of {len(lab.exercises)}",
        escape(lab.next),
        escape("; ".join(lab.scores)),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def draw_progress(found: Progress) -> Figure:
    """A row of squares for each lab: filled what is solved, pale what was tried, empty the rest."""
    with course_style():
        figure = Figure(figsize=(8, 0.32 * len(found.labs) + 1), layout="constrained")
        axes = figure.subplots()
        for row, lab in enumerate(found.labs):
            for column, name in enumerate(lab.exercises):
                color = SOLVED if name in lab.solved else TRIED if name in lab.said else OPEN
                axes.add_patch(
                    Rectangle((column, row - 0.35), 0.8, 0.7, facecolor=color, edgecolor="#717581")
                )
        widest = max((len(lab.exercises) for lab in found.labs), default=1)
        axes.set(xlim=(-0.2, widest), ylim=(len(found.labs) - 0.4, -0.6), xticks=[])
        axes.set_yticks(range(len(found.labs)), [lab.title for lab in found.labs])
        axes.tick_params(axis="y", length=0)
        axes.grid(False)
        axes.set_title(found.sentence, fontsize=12)
    return figure


check_public(globals())
