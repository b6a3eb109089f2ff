"""Forty hand-ins of a class, good ones and damaged ones, at once: the table is right, each bad file has a sentence."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import nbformat
import pytest
from score_cases import hand_in, row, solved

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import scores  # noqa: E402

GOOD_TEXT = json.dumps([row(), solved()])
NONE = "it is no scoreboard of the course; ask for my_labs/scoreboard.json"
# Of hostile names: a formula, a command, wide signs, pieces of a path, signs that steer a terminal.
NAMES = ("=1+1", "+cmd", "-2", "@SUM(A1)", "\uff1dHYPERLINK", "..json", "a\tb", "O'Neil, Mia", "x\x1b[2J", "two\nlines")  # fmt: skip
GOOD: dict[str, object] = {
    **{f"{name}.json": [row(peak_bytes=index), solved()] for index, name in enumerate(NAMES)},
    "anna.json": [row(peak_bytes=500), solved("components", lesson="99")],
    "ben/my_labs/scoreboard.json": [row(peak_bytes=400)],
    "carla.JSON": [row(peak_bytes=300, step_seconds=0.25)],
    "dora.json": [row("nothing held", 0), solved(verdict="not yet", score="")],
    "emil.json": [row(peak_bytes=2**62)],
    "zo\u00eb.json": [row(peak_bytes=50)],
}
BAD: dict[str, tuple[object, str]] = {
    "b01.json": ("no JSON at all", NONE),
    "b02.json": ("", NONE),
    "b03.json": (GOOD_TEXT[:-20], NONE),
    "b04.json": (GOOD_TEXT.encode("utf-16"), NONE),
    "b05.json": (json.dumps([row("caf\u00e9")], ensure_ascii=False).encode("latin-1"), NONE),
    "b06.json": (b"\x00" * 64, NONE),
    "b07.json": ("null", NONE),
    "b08.json": ([row(learner="anna")], NONE),
    "b09.json": ([row(peak_bytes="many")], NONE),
    "b10.json": ([row(score=float("nan"))], NONE),
    "b11.json": ([row(step_seconds=float("nan"))], "the row 'leanest' of lesson '01' holds no amount"),
    "b12.json": ([row(step_seconds=float("inf"))], "the row 'leanest' of lesson '01' holds no amount"),
    "b13.json": ([row(peak_bytes=10**300)], "the row 'leanest' of lesson '01' holds no amount"),
    "b14.json": (f'[{{"lesson": "01", "what": "x", "peak_bytes": {"9" * 5000}}}]', NONE),
    "b15.json": ([row(evidence="re-checked", verdict="correct")], "the row 'leanest' of lesson '01' claims to be 're-checked', which no scoreboard says"),
    "b16.json": ([solved(verdict="excellent")], "the row 'saved_bytes' of lesson '01' has the verdict 'excellent', which no check says"),
    "b17.json": ([solved("../../grades")], "the row '../../grades' of lesson '01' is of no exercise of the course"),
    "b18.json": ([row(score="0 calls, par 14")], "the row 'leanest' of lesson '01' is a measurement with a verdict"),
    "b19.json": ([row(), row(peak_bytes=1)], "the row 'leanest' of lesson '01' stands there twice"),
    "b20.ipynb": ("{}", "it is no notebook; ask for my_labs/advanced/99_capstone.ipynb"),
    "b21.txt": (GOOD_TEXT, "its name ends neither in .json nor in .ipynb"),
    "b22.json.txt": (GOOD_TEXT, "its name ends neither in .json nor in .ipynb"),
    "ben.json": ([row(peak_bytes=1)], "ben has ben/my_labs/scoreboard.json already; keep one of the two"),
}  # fmt: skip


def overclaimer() -> str:
    """Anna's notebook of lab 99: a wrong answer, handed in under the name of Ben."""
    code = (
        "from utils.lessons.lesson_99.sitting import Sitting\n"
        "sitting = Sitting(learner='Ben', seed=1)\nsitting.open('components', widget=False)\n"
        "sitting.hand_in('components', {'all': 'wrong'})"
    )
    return nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]))


def the_class(folder: Path) -> dict[str, str]:
    """Hand in all of it; each file that is to be left out, with why."""
    told = {name: why for name, (_, why) in BAD.items()}
    for name, content in GOOD.items():
        hand_in(folder, name, content)
    for name, (content, _) in BAD.items():
        hand_in(folder, name, content)
    hand_in(folder, "anna.ipynb", overclaimer())
    (folder / "b23.json").mkdir()
    told["b23.json"] = "it is a folder; ask for the file itself"
    with (folder / "b24.ipynb").open("wb") as sparse:
        sparse.truncate(10**9)  # takes no room on the disk
    told["b24.ipynb"] = "it has over 100 MB, and a notebook of the course has less"
    return told


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses such names")
def test_forty_hand_ins_become_the_right_table_and_a_sentence_for_each_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, table = tmp_path / "in", tmp_path / "scores.csv"
    told = the_class(folder)
    assert len(GOOD) + len(told) >= 40, "and Anna's notebook"
    assert scores.main([str(folder), "--to", str(table)]) == 1
    said = capsys.readouterr().err.splitlines()
    left_out = dict(
        line.removesuffix(".").split(" was left out: ")
        for line in said
        if " was left out: " in line
    )
    assert left_out == told
    others = [line for line in said if " was left out: " not in line]
    assert others == [
        "anna.ipynb is in the table as anna's, and names Ben inside: ask whose it is.",
        "anna's scoreboard says correct of components in lab 99, and the answer that was handed in, checked "
        "again, is not: the row re-checked counts.",
    ]  # fmt: skip
    with table.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines))
    assert all(row.keys() == set(scores.HEAD) for row in found), "no cell is torn"
    learners = [name.partition("/")[0].removesuffix(".json").removesuffix(".JSON") for name in GOOD]
    assert {scores.plain(name) for name in learners} == {line["learner"] for line in found}
    assert len(found) == sum(len(list(rows)) for rows in GOOD.values()) + 1  # type: ignore[call-overload]
    assert not [cell for line in found for cell in line.values() if cell.startswith(scores.FORMULA)]
    leanest = [int(line["peak_bytes"]) for line in found if line["what"] == "leanest"]
    assert leanest == sorted(leanest) and len(leanest) == len(GOOD) - 1
    (again,) = (line for line in found if line["evidence"] == scores.RE_CHECKED)
    assert (again["learner"], again["what"]) == ("anna", "components, seed 1")
    assert again["result"].startswith("not yet")


def test_names_that_two_systems_write_in_two_ways_are_one_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path, "zo\u00eb/a.json", [row()])
    hand_in(tmp_path, "Zoe\u0308/b.json", [row()])
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 1
    assert "keep one of the two" in capsys.readouterr().err
