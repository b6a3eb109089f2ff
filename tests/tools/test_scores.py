"""Scoreboards of a class: one CSV, and a sentence for each file that cannot be used."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path

import capstone_cases
import nbformat
import pytest
from score_cases import hand_in, row

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import _handed_in  # noqa: E402
import scores  # noqa: E402


def test_a_class_becomes_one_table_with_the_leanest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, table = tmp_path / "in", tmp_path / "out/scores.csv"
    hand_in(folder, "anna.json", [row(peak_bytes=300)])
    hand_in(folder, "ben/my_labs/scoreboard.json", [row(peak_bytes=200), row("other", None)])
    hand_in(folder, "=cmd.json", [row(peak_bytes=250)])
    assert scores.main([str(folder), "--to", str(table)]) == 0, capsys.readouterr().err
    with table.open(encoding="utf-8", newline="") as lines:
        read = list(csv.DictReader(lines))
    assert [(r["learner"], r["peak_bytes"]) for r in read] == [
        ("ben", "200"),
        ("'=cmd", "250"),
        ("anna", "300"),
        ("ben", ""),
    ], "by lesson and name, fewest bytes first, and no formula for a spreadsheet"
    assert "4 rows of 3 learners" in capsys.readouterr().out


def test_what_checks_said_is_a_row_for_each_learner_and_exercise(tmp_path: Path) -> None:
    said = {"evidence": "checked", "at": "2026-11-26T18:00:00+00:00"}
    right = row("saved_bytes", None, verdict="correct", score="=13 calls, par 14", **said)
    hand_in(tmp_path, "anna.json", [right, row("state_bytes", None, verdict="not yet", **said)])
    hand_in(tmp_path, "ben.json", [row("state_bytes", None, verdict="correct", **said)])
    table = tmp_path / "scores.csv"
    assert scores.main([str(tmp_path), "--to", str(table)]) == 0
    with table.open(encoding="utf-8", newline="") as lines:
        read = {(r["learner"], r["what"]): (r["result"], r["at"]) for r in csv.DictReader(lines)}
    at = "2026-11-26T18:00:00+00:00"
    assert read == {
        ("anna", "saved_bytes"): ("correct: =13 calls, par 14", at),
        ("anna", "state_bytes"): ("not yet", at),
        ("ben", "state_bytes"): ("correct", at),
    }


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "it is no scoreboard of the course; ask for my_labs/scoreboard.json"),
        ([5], "it is no scoreboard of the course"),
        ({"cells": []}, "it is no scoreboard of the course"),
        ([row(extra=1)], "it is no scoreboard of the course"),
        ("[" * 100_000, "it is no scoreboard of the course"),
        ([row(verdict=3)], "it is no scoreboard of the course"),
        ([row(verdict="correct")], "is a measurement with a verdict"),
        ([row(evidence="re-checked")], "claims to be 're-checked', which no scoreboard says"),
        ([row(evidence="checked", verdict="perfect")], "has the verdict 'perfect'"),
        ([row(evidence="checked", verdict="correct")], "is of no exercise of the course"),
        ([row(), row(peak_bytes=1)], "stands there twice"),
        ([row(score="\ud800")], "holds half a letter"),
        ([row(peak_bytes=-1)], "the row 'leanest' of lesson '01' holds no amount"),
        ([row(peak_bytes=float("nan"))], "holds no amount"),
        ([row(peak_bytes=True)], "holds no amount"),
        ([row(peak_bytes=10**400)], "holds no amount"),
        ([row(what="\ud800")], "holds half a letter"),
        ([row(evidence="\udfff")], "holds half a letter"),
        ([], "it has no rows yet"),
        ("x" * (_handed_in.MOST_BYTES + 1), "it has over 1 MB"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_the_rest_goes_on(
    content: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path, "bad.json", content)
    hand_in(tmp_path, "good.json", [row()])
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("bad.json was left out: ") and told in said.err, said.err
    assert "1 rows of 1 learners" in said.out, "the good file is in the table"


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither such links nor pipes")
@pytest.mark.parametrize(
    ("make", "told"),
    [(dangling, "a link that leads nowhere"), (os.mkfifo, "it is no file")],
)
@pytest.mark.parametrize("name", ["anna.json", "anna.ipynb"])
def test_what_is_no_file_is_named_and_the_rest_goes_on(
    make: Callable[[Path], None],
    told: str,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, table = tmp_path / "in", tmp_path / "all.csv"
    hand_in(folder, "good.json", [row()])
    make(folder / name)
    assert scores.main([str(folder), "--to", str(table)]) == 1
    said = capsys.readouterr()
    assert said.err == f"{name} was left out: {told}.\n"
    assert table.read_text().splitlines()[1].startswith("good,01,leanest,100")


def test_a_damaged_notebook_is_named_and_one_of_another_lab_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path, "anna/99_capstone.ipynb", '{"cells": 5}')
    hand_in(tmp_path, "ben/labs/01.ipynb", nbformat.writes(nbformat.v4.new_notebook()))
    hand_in(tmp_path, "ben/scoreboard.json", [row()])
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("anna/99_capstone.ipynb was left out: it is no notebook;")
    assert said.err.count("\n") == 1 and "1 rows of 1 learners" in said.out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps names that are no text")
def test_a_name_that_is_no_text_is_written_as_one(tmp_path: Path) -> None:
    hand_in(tmp_path, os.fsdecode(b"ann\xff.json"), [row()])
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 0
    assert "ann\ufffd,01" in (tmp_path / "all.csv").read_text(encoding="utf-8")


def test_a_table_that_cannot_be_written_is_a_sentence_and_the_old_one_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path, "in/good.json", [row()])
    (tmp_path / "file").write_text("in the way")
    assert scores.main([str(tmp_path / "in"), "--to", str(tmp_path / "file/all.csv")]) == 1
    assert "all.csv cannot be written: " in capsys.readouterr().err


def test_answers_to_lab_99_are_checked_again_where_the_learner_cannot_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = capstone_cases.right("components", 2)
    cells = [
        "from utils.lessons.lesson_99.sitting import Sitting\nsitting = Sitting(seed=2)\nsitting.open('components')",
        f"sitting.hand_in('components', {right!r})",
        "raise SystemExit",
        "import utils.lessons.lesson_99.sitting as theirs\nfrom utils.labs.verdict import Report, correct\n"
        "theirs.check = lambda name, _: Report(name, correct('mine'))\n"
        "sitting.open('two_offers'); sitting.open('four_ranks'); sitting.open('lay_out')",
        "assert sitting.hand_in('two_offers', {'all': 'wrong'}).is_correct",
        "class Yes(float):\n    __eq__ = lambda *_: True",
        "sitting.hand_in('four_ranks', {'efficiency': Yes(), 'cause': 'one slow rank', 'rank': Yes(), "
        "'efficiency without it': Yes()})",
        "from utils import Plan\nsitting.hand_in('lay_out', {'plan': Plan(), 'days': (1, 2), 'usd': 10**400})",
        "import os\nos._exit(1)",
    ]
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    hand_in(tmp_path, "anna/99.ipynb", nbformat.writes(book))
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 0, capsys.readouterr()
    with (tmp_path / "all.csv").open(encoding="utf-8", newline="") as lines:
        found = {
            r["what"]: (r["evidence"], r["result"].split(":")[0]) for r in csv.DictReader(lines)
        }
    assert found == {
        "components, seed 2": ("re-checked", "correct"),
        "two_offers, seed 2": ("re-checked", "not yet"),
        "four_ranks, seed 2": ("re-checked", "not yet"),
        "lay_out, seed 2": ("re-checked", "not yet"),
    }


def test_a_notebook_that_hands_in_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("1 / 0; sitting.hand_in('x', 1)")]
    )
    hand_in(tmp_path, "anna.ipynb", nbformat.writes(book))
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 1
    assert (
        "anna.ipynb was left out: run from top to bottom, it hands in no answer."
        in capsys.readouterr().err
    )


def test_two_files_of_one_learner_are_not_added_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path, "anna/a.json", [row()])
    hand_in(tmp_path, "anna/b.json", [row()])
    assert scores.main([str(tmp_path), "--to", str(tmp_path / "all.csv")]) == 1
    assert "anna/b.json was left out: anna has anna/a.json already" in capsys.readouterr().err


def test_no_folder_and_no_scoreboard_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scores.main([str(tmp_path / "none")]) == 1
    assert "is no folder. Put what was handed in into one" in capsys.readouterr().err
    assert scores.main([str(tmp_path)]) == 1
    assert (
        "holds nothing to collect. Learners hand in my_labs/scoreboard.json"
        in capsys.readouterr().err
    )
