"""The running scoreboard: rows are kept, replaced, shown; a bad file or folder is a sentence."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils import files
from utils.labs import check
from utils.labs.scoreboard import ROOT, note, read_rows, score, scoreboard, scoreboard_path
from utils.labs.verdict import Report, check_failed, correct, not_yet
from utils.units import Evidence


@pytest.fixture(autouse=True)
def board(tmp_path, monkeypatch):
    path = tmp_path / "my_labs" / "scoreboard.json"
    monkeypatch.setenv("COURSE_SCOREBOARD", str(path))
    return path


def test_rows_are_kept_and_shown_by_lesson():
    score("02", "AMP", peak_bytes=3 * 2**30, step_seconds=0.25, evidence=Evidence.SIMULATED)
    score("01", "ResNet-50, batch <32>", peak_bytes=2**30)
    lines = str(scoreboard()).splitlines()
    assert [line.split()[0] for line in lines] == ["lesson", "01", "02"]
    assert lines[2].split() == ["02", "AMP", "3.00", "GiB", "250", "ms", "simulated"]
    html = scoreboard()._repr_html_()
    assert "batch &lt;32&gt;" in html and html.count("<tr>") == 3


def test_a_lesson_shows_its_own_rows():
    score("02", "AMP", peak_bytes=3)
    score("01", "ResNet-50", peak_bytes=2**30)
    assert [row.lesson for row in scoreboard("02").rows] == ["02"]
    assert [row.lesson for row in scoreboard().rows] == ["01", "02"]
    assert "no rows" in str(scoreboard("03"))


def test_a_measurement_is_a_row():
    measured = SimpleNamespace(
        name="Adam", peak_bytes=2**20, median_step_seconds=None, evidence=Evidence.MEASURED
    )
    score("01", measured)
    assert str(scoreboard()).splitlines()[1].split() == ["01", "Adam", "1.00", "MiB", "measured"]


def test_a_second_run_replaces_its_row():
    for peak in (2**20, 2**30):
        score("01", "Adam", peak_bytes=peak)
    assert [row.peak_bytes for row in scoreboard().rows] == [2**30]


def test_an_empty_board_says_so():
    assert "no rows" in str(scoreboard()) and "no rows" in scoreboard()._repr_html_()


@pytest.mark.parametrize("text", ["", "{", "3", '["x"]', '[{"lesson": 1}]', '{"a": 1}',
                                  '[{"lesson": 1, "what": "", "peak_bytes": null, '
                                  '"step_seconds": null, "evidence": ""}]'])  # fmt: skip
def test_a_damaged_file_is_a_sentence_and_left_alone(board, capsys, text):
    board.parent.mkdir()
    board.write_text(text)
    score("01", "Adam", peak_bytes=1)
    assert "is damaged" in capsys.readouterr().out
    assert "is damaged" in str(scoreboard()) and "is damaged" in scoreboard()._repr_html_()
    assert board.read_text() == text


def test_a_folder_that_cannot_be_written_is_a_sentence(board, capsys):
    board.parent.write_text("a file where the folder should be")
    score("01", "Adam", peak_bytes=1)
    assert "cannot be" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_a_sentence_and_left_alone(board, capsys, monkeypatch):
    score("01", "Adam", peak_bytes=1)
    before = board.read_bytes()

    def refused(path, **_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refused)
        score("01", "SGD", peak_bytes=1)
        assert "cannot be read: Permission denied" in str(scoreboard())
    assert "cannot be read: Permission denied" in capsys.readouterr().out
    assert board.read_bytes() == before


def test_a_full_disk_leaves_the_old_rows_and_no_part(board, capsys, monkeypatch):
    score("01", "Adam", peak_bytes=1)

    def no_space(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", no_space)
    score("01", "SGD", peak_bytes=1)
    assert "No space left" in capsys.readouterr().out
    assert [row["what"] for row in json.loads(board.read_text())] == ["Adam"]
    assert list(board.parent.iterdir()) == [board]


def test_forty_rows_at_once_are_all_kept(board):
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda number: score(f"{number:02}", "step", peak_bytes=number), range(40)))
    assert sorted(row.peak_bytes for row in scoreboard().rows) == list(range(40))
    assert list(board.parent.iterdir()) == [board]


def test_rows_of_other_processes_are_all_kept(board):
    write = "from utils.labs.scoreboard import score; [score('{}', str(i), peak_bytes=i) for i in range(20)]"
    runs = [subprocess.Popen([sys.executable, "-c", write.format(name)]) for name in ("01", "02")]
    assert [run.wait() for run in runs] == [0, 0]
    assert len(scoreboard().rows) == 40


def verdicts(board):
    return {(row.lesson, row.what): (row.verdict, row.score) for row in read_rows(board)}


def test_what_a_check_says_is_kept_and_what_was_solved_stays_so(board):
    note(Report("01.adam_states", not_yet("half of it")))
    assert verdicts(board) == {("01", "adam_states"): ("not yet", "")}
    note(Report("01.adam_states", correct(score="13 calls, par 14")))
    note(Report("01.adam_states", not_yet("spoiled again")))
    note(Report("01.adam_states", check_failed("of the course")))
    assert verdicts(board) == {("01", "adam_states"): ("correct", "13 calls, par 14")}
    note(Report("01.adam_states", correct(score="12 calls, par 14")))
    assert verdicts(board) == {("01", "adam_states"): ("correct", "12 calls, par 14")}
    (row,) = read_rows(board)
    assert row.evidence == "checked" and row.at.endswith("+00:00")


def test_verdicts_are_no_measurements(board):
    note(Report("01.adam_states", correct()))
    assert scoreboard().rows == ()
    score("01", "adam_states", peak_bytes=1)
    note(Report("01.adam_states", correct()))
    assert len(read_rows(board)) == 2 and [row.peak_bytes for row in scoreboard().rows] == [1]


def test_check_keeps_its_verdict(board):
    check("01.state_bytes", "no number")
    assert verdicts(board) == {("01", "state_bytes"): ("not yet", "")}
    check("01.state_bytes", ...)
    assert verdicts(board) == {("01", "state_bytes"): ("not yet", "")}, "not tried is no verdict"


def test_a_scoreboard_that_cannot_be_written_costs_no_verdict(board, capsys):
    board.parent.write_text("a file where the folder should be")
    assert "not yet" in str(check("01.state_bytes", "no number"))
    assert "cannot be written" in capsys.readouterr().out


def test_rows_of_an_earlier_version_are_read(board):
    board.parent.mkdir()
    row = {
        "lesson": "01",
        "what": "a",
        "peak_bytes": 1,
        "step_seconds": None,
        "evidence": "measured",
    }
    board.write_text(json.dumps([row]))
    note(Report("01.b", correct()))
    assert [row.what for row in read_rows(board)] == ["a", "b"]


def test_an_unknown_evidence_is_refused():
    with pytest.raises(ValueError, match="guessed"):
        score("01", "Adam", evidence="guessed")
    assert scoreboard().rows == ()


def test_the_default_file_is_ignored_by_git(monkeypatch):
    monkeypatch.delenv("COURSE_SCOREBOARD")
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"/{scoreboard_path().relative_to(ROOT).parts[0]}/" in ignored


def test_another_file_is_relative_to_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_SCOREBOARD", "build/rows.json")
    assert scoreboard_path() == ROOT / "build/rows.json"
