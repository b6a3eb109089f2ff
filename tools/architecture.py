"""Draws the rooms of the package into docs/architecture.svg, from the contracts and the docstrings.

python tools/architecture.py          write the picture
python tools/architecture.py --check  say whether it is what the code would give

A band is a layer of the contract in pyproject.toml: what stands in it may import what stands below.
The two lines are what happens to a step and to a plan; each dot is a module that it passes.
"""

from __future__ import annotations

import argparse
import ast
import html
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = Path("docs/architecture.svg")
CONTRACT = "imports run one way"
ROW, LEFT, ROOM, WIDTH = 26, 80, 150, 900  # pixels
STEP, PLAN = "#0072B2", "#D55E00"  # of Okabe and Ito's palette, as in the course's figures
# Module by module, as `docs/architecture.md` tells it; a module that is gone is an error.
FLOWS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "step": (
        STEP,
        (
            "utils.techniques.checkpointing",
            "utils.simulation.simulator",
            "utils.memory.source",
            "utils.memory.meter",
            "utils.memory.timeline",
            "utils.views.timeline",
        ),
    ),
    "plan": (
        PLAN,
        (
            "utils.catalog.models",
            "utils.planner.plan_estimate",
            "utils.planner.plan_search",
            "utils.views.plan_figures",
        ),
    ),
}


@dataclass(frozen=True)
class Room:
    """A package or module of a layer, and the first sentence of its docstring."""

    name: str
    says: str


def layers(root: Path = ROOT) -> list[list[str]]:
    """The modules of each layer, from the top down, as the contract has them."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [contract] = [one for one in contracts if one["name"] == CONTRACT]
    [package] = contract["containers"]
    return [
        [f"{package}.{name.strip()}" for name in layer.split("|")] for layer in contract["layers"]
    ]


def room(name: str, root: Path = ROOT) -> Room:
    """What stands at a dotted name.

    Raises:
        FileNotFoundError: nothing does.
    """
    file = module_file(name, root)
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return Room(name, text.split("\n", 1)[0])


def module_file(name: str, root: Path = ROOT) -> Path:
    """The file behind a dotted name.

    Raises:
        FileNotFoundError: no file is.
    """
    place = root.joinpath(*name.split("."))
    for file in (place / "__init__.py", place.with_suffix(".py")):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{name}: no such module. Mend its name in tools/architecture.py.")


def picture(root: Path = ROOT) -> str:
    """The whole drawing, as SVG."""
    bands = [[room(name, root) for name in layer] for layer in layers(root)]
    height = ROW * (sum(map(len, bands)) + 3)
    rows = {one.name: y for one, y in _placed(bands)}
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *_bands(bands),
            *(line for one, y in _placed(bands) for line in _row(one, y)),
            *(
                line
                for x, (name, (colour, modules)) in zip((20, 56), FLOWS.items(), strict=True)
                for line in _flow(
                    x, name, colour, [_row_of(module, rows, root) for module in modules]
                )
            ),
            "</svg>",
            "",
        ]
    )


def _placed(bands: Sequence[Sequence[Room]]) -> Iterator[tuple[Room, int]]:
    y = 2 * ROW
    for band in bands:
        for one in band:
            yield one, y
            y += ROW


def _bands(bands: Sequence[Sequence[Room]]) -> Iterator[str]:
    y = 2 * ROW
    for number, band in enumerate(bands):
        shade = "#f2f2f2" if number % 2 == 0 else "white"
        yield f'<rect x="0" y="{y}" width="{WIDTH}" height="{ROW * len(band)}" fill="{shade}"/>'
        y += ROW * len(band)
    yield (
        f'<text x="{LEFT}" y="{ROW + 8}" fill="#444">'
        "What stands in a band may import what stands below it, and nothing above.</text>"
    )


def _row(one: Room, y: int) -> Iterator[str]:
    yield (
        f'<rect x="{LEFT}" y="{y + 3}" width="{ROOM}" height="{ROW - 6}" rx="3" '
        'fill="white" stroke="#666"/>'
    )
    yield f'<text x="{LEFT + 8}" y="{y + 17}">{one.name.partition(".")[2] or one.name}</text>'
    yield f'<text x="{LEFT + ROOM + 12}" y="{y + 17}" fill="#444">{html.escape(one.says)}</text>'


def _row_of(module: str, rows: Mapping[str, int], root: Path) -> int:
    module_file(module, root)
    return rows[".".join(module.split(".")[:2])]


def _flow(x: int, name: str, colour: str, ys: Sequence[int]) -> Iterator[str]:
    top, low = min(ys) + ROW // 2, max(ys) + ROW // 2
    yield f'<line x1="{x}" y1="{top}" x2="{x}" y2="{low}" stroke="{colour}" stroke-width="3"/>'
    for y in sorted(set(ys)):
        yield f'<circle cx="{x}" cy="{y + ROW // 2}" r="5" fill="{colour}"/>'
    yield f'<text x="{x}" y="{top - 14}" fill="{colour}" text-anchor="middle">{name}</text>'


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the picture, or compare it; 1 where it is another one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only")
    drawn, file = picture(root), root / PICTURE
    if not parser.parse_args(arguments).check:
        file.write_text(drawn, encoding="utf-8")
    elif not file.is_file() or file.read_text(encoding="utf-8") != drawn:
        print(f"{PICTURE} is not what the code gives: run `python tools/architecture.py`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
