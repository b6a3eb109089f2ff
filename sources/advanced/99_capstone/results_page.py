"""The page that a learner can show: skills by tier, what they saved and sent, dollars, evidence.

One file without scripts, fonts or pictures from elsewhere; every text is escaped; a table has a caption
and headers with a scope; colours have a word beside them; a style for print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from utils.units import GB, format_bytes

from .cases import TIERS, Gains, Sheet

_HEAD = (
    "case",
    "skill",
    "result",
    "score and par",
    "minutes",
    "tries",
    "bytes saved",
    "bytes sent a step",
    "dollars",
    "evidence",
)
_BOARD = ("lesson", "what", "peak memory", "step time", "evidence")
LONGEST_NUMBER = 12  # letters: what is longer is a sentence, and begins at the left
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #767676; --done: #0b5394; }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f0f0; --paper: #121212; --line: #9a9a9a; --done: #8ab8ff; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 2rem; font-size: 0.9rem; }
caption { text-align: left; font-weight: 600; padding: 0.4rem 0; }
th, td { border: 1px solid var(--line); padding: 0.3rem 0.5rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.solved { color: var(--done); font-weight: 600; }
@media print { :root { --ink: #000; --paper: #fff; --done: #000; } body { margin: 0; max-width: none; font-size: 10pt; }
  .wide { overflow: visible; } tr { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Result:
    """One case's line on the page."""

    name: str
    sheet: Sheet
    state: str
    score: str = ""
    seconds: float | None = None
    tries: int = 0
    gains: Gains = field(default_factory=Gains)

    @property
    def is_solved(self) -> bool:
        return self.seconds is not None

    def cells(self) -> tuple[str, ...]:
        """As it is read."""
        saved, sent, usd = self.gains.bytes_saved, self.gains.bytes_sent, self.gains.usd
        return (
            self.sheet.title,
            self.sheet.skill,
            self.state,
            self.score,
            "" if self.seconds is None else _minutes(self.seconds),
            str(self.tries or ""),
            format_bytes(saved) if saved else "",
            f"{sent / GB:.1f} GB" if sent else "",
            f"${usd:,.0f}" if usd else "",
            str(self.gains.evidence) if self.is_solved else "",
        )


def _minutes(seconds: float) -> str:
    return "under 1" if seconds < 60 else f"{seconds / 60:.0f}"


def results_html(
    learner: str, seed: int, results: Sequence[Result], board: Iterable[Sequence[str]]
) -> str:
    """The page, as HTML.

    Args:
        learner: Who sat.
        seed: Of the sitting.
        results: All cases.
        board: Rows of the course's scoreboard: lesson, what, peak memory, step time, evidence.
    """
    solved = [result for result in results if result.is_solved]
    who = learner.strip()
    title = f"{f'{who}: r' if who else 'R'}esults of the capstone, Big Models, Small Memory"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{len(solved)} of {len(results)} cases solved, with the data of seed {seed}. {_totals(solved)}</p>",
    ]
    for tier in TIERS:
        rows = [result for result in results if result.sheet.tier == tier]
        done = sum(result.is_solved for result in rows)
        parts += [
            f"<h2>{tier.capitalize()}: {done} of {len(rows)}</h2>",
            _table(f"Cases of the {tier} tier", _HEAD, [row.cells() for row in rows]),
        ]
    rows = list(board)
    if rows:
        parts += [
            "<h2>From the lessons</h2>",
            _table("Rows of the scoreboard, by lesson", _BOARD, rows),
        ]
    parts += [
        "<h2>What the words mean</h2>",
        f"<p>{escape(_WORDS)}</p>",
        "</main>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


_WORDS = (
    "Bytes saved: on the fullest device, against what the case came with. Bytes sent: by one rank in one step. Dollars: of the "
    "whole run, at the price of the brief. Measured: counted on the learner's machine. Simulated: the same code on tensors "
    "without data. Predicted: by the course's planner. A par is what the course's own search finds for the same data."
)


def _totals(solved: Sequence[Result]) -> str:
    saved = sum(result.gains.bytes_saved for result in solved)
    usd = sum(result.gains.usd for result in solved)
    parts = [
        f"{format_bytes(saved)} saved over all cases" if saved else "",
        f"${usd:,.0f} of runs laid out" if usd else "",
    ]
    said = " and ".join(filter(None, parts))
    return escape(f"{said[0].upper()}{said[1:]}." if said else "")


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{_row(cells)}</tr>" for cells in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    first, *rest = cells
    return f'<th scope="row">{escape(first)}</th>' + "".join(_cell(text) for text in rest)


def _cell(text: str) -> str:
    is_number = text[:1].isdigit() or text[:1] == "$"
    name = (
        "solved"
        if text.startswith("solved")
        else "number"
        if is_number and len(text) <= LONGEST_NUMBER
        else ""
    )
    return f'<td class="{name}">{escape(text)}</td>' if name else f"<td>{escape(text)}</td>"
