"""Guides for instructors: their minutes add up, and their tables are those of the lessons."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import workshop  # noqa: E402

GUIDES = sorted((ROOT / workshop.GUIDES).glob("*.md"))
PLANS = [path for path in GUIDES if "minutes in all" in path.read_text(encoding="utf-8")]
LESSON = re.compile(r"(?<![\w.])(\d\d[a-z]?)(?![\w:])")


def test_there_is_a_plan_for_half_a_day_one_day_and_three() -> None:
    assert {path.stem for path in PLANS} == {"half_day", "one_day", "three_days"}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_minutes_of_a_plan_add_up(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "The minutes are estimates" in text, "a plan says what its minutes are"
    parts = re.split(r"\*\*(\d+) minutes in all\.\*\*", text)
    for rows, told in zip(parts[0::2], parts[1::2], strict=False):
        total = sum(map(int, re.findall(r"^\| (\d+) \|", rows, re.MULTILINE)))
        assert total == int(told), f"{path.stem}: the rows add up to {total}, not to {told}"


WEEK = re.compile(r"^\| (\d+) \| ([\d\wa, ]+) \| (\d\d) \| (\d+) \|", re.MULTILINE)
SESSION_MINUTES = 90


def test_a_week_fits_its_session_and_its_lab_takes_what_the_readme_says() -> None:
    text = (ROOT / "docs/instructor/semester.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    labs = dict(re.findall(r"/(\d\d\w?)_\w+\.ipynb\).*?\| \d+ \| (\d+) \|", readme))
    pages = {path.rpartition("/")[2].partition("_")[0]: path for path in workshop.lessons(ROOT)}
    measured, weeks = workshop.load(ROOT), WEEK.findall(text)
    assert [int(week) for week, *_ in weeks] == list(range(1, 13))
    for week, lessons, lab, minutes in weeks:
        assert labs[lab] == minutes, f"week {week}: lab {lab} takes {labs[lab]} minutes"
        parts = [
            s for n in lessons.split(", ") for s in workshop.sections(ROOT, pages[n], measured)
        ]
        spoken = sum(2 * part.reading_minutes + (part.seconds or 0) / 60 for part in parts)
        assert spoken <= SESSION_MINUTES, (
            f"week {week} takes {spoken:.0f} minutes of {SESSION_MINUTES}"
        )


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guides_lead_to_lessons_that_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for lesson in re.findall(r"<!-- sections: (\S+) -->", text):
        assert (ROOT / lesson).is_file(), f"{path.stem} lays out {lesson}, which is not there"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / link).exists(), f"{path.stem} leads to {link}"


def test_the_commands_of_the_guides_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in GUIDES:
        code = re.findall(r"^```.*?^```|`[^`\n]+`", path.read_text(encoding="utf-8"), re.M | re.S)
        for target in re.findall(r"(?<![\w-])make ([a-z-]+)", "\n".join(code)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.stem}: make {target}"


def test_tables_are_those_of_the_lessons() -> None:
    stale = [path.name for path in workshop.outdated(ROOT)]
    assert stale == [], f"{stale}: run `.venv/bin/python tools/workshop.py tables`"


def test_what_a_lesson_says_of_binder_is_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in workshop.lessons(ROOT):
        opening = nbformat.read(ROOT / path, as_version=4).cells[0].source
        row = next((line for line in readme.splitlines() if f"]({path})" in line), "")
        assert row, f"README.md: add a row that links {path} to the table of lessons"
        said = re.findall(r"beyond Binder's (\d GB)", opening)
        assert said == re.findall(r"(\d GB)\+[,*]", row), f"{path} says {said}: {row[:160]}"


def test_the_readme_marks_the_lessons_that_need_wsl2_on_windows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Any laptop will do." in readme
    for path in workshop.lessons(ROOT):
        opening = nbformat.read(ROOT / path, as_version=4).cells[0].source
        rows = (line for line in readme.splitlines() if line.startswith("| ["))
        row = next((line for line in rows if f"]({path})" in line), "")
        assert ("WSL2" in row) >= ("WSL2" in opening), f"README.md: mark {path} with *WSL2*"


def test_measured_minutes_name_their_machine() -> None:
    measured = workshop.load(ROOT)
    assert measured["lessons"], "lessons were measured"
    found = [*measured["lessons"].values(), *workshop.without_cuda(measured).values()]
    for row in [*found, *measured.get("together", [])]:
        assert row["machine"] and row["torch"] and row["date"], f"no origin: {row}"
        assert row["peak_bytes"] > 10**8, "a kernel with torch holds more"


def lesson(folder: Path) -> str:
    """A small lesson: an opening of 130 words, a section of 65 with a cell."""
    cells = [
        nbformat.v4.new_markdown_cell("# 01 Title\n\n" + "word " * 128),
        nbformat.v4.new_markdown_cell("## 1. Idea\n\n" + "word " * 63),
        nbformat.v4.new_code_cell("1"),
    ]
    (folder / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "notebooks/01.ipynb")
    return "notebooks/01.ipynb"


def test_reading_is_counted_and_running_is_measured(tmp_path: Path) -> None:
    path = lesson(tmp_path)
    measured = {"lessons": {path: {"sections": {"1. Idea": 12.4}}}}
    opening, idea = workshop.sections(tmp_path, path, measured)
    assert opening.reading_minutes == pytest.approx(1.0, abs=0.02), "130 words a minute"
    assert (opening.seconds, idea.seconds) == (None, 12.4), "what was not measured is not told"
    table = workshop.section_table([opening, idea])
    assert "| Opening | 1 | not measured |" in table, table
    assert "| **all** | **1** | **12** |" in table or "| **all** | **2** | **12** |" in table, table


@pytest.mark.parametrize(
    ("taken", "told"), [(9 * 10**8, ""), (12 * 10**8, "1 GB+"), (26 * 10**8, "2 GB+")]
)
@pytest.mark.parametrize("before", ["", "1 GB+", "2 GB+"])
@pytest.mark.parametrize("other", ["", "WSL2"])
def test_the_readmes_row_says_how_a_lesson_stands_to_binder(
    taken: int, told: str, before: str, other: str
) -> None:
    def text(*marks: str) -> str:
        shown = [f" *{', '.join(filter(None, pair))}*" if any(pair) else "" for pair in
                 ((other, mark) for mark in marks)]  # fmt: skip
        return "".join(
            f"| [0{i} A](notebooks/{i}.ipynb) <!-- badges: x --><!-- /badges -->{mark} | 5 |  | do it |\n"
            for i, mark in enumerate(shown)
        )

    measured = {"lessons": {"notebooks/0.ipynb": {"peak_bytes": taken}}}
    new = workshop.beyond_binder(text(before, "1 GB+"), measured)
    assert new == text(told, "1 GB+"), "only the measured row is written anew"
    small = {"cpu_build": {"notebooks/0.ipynb": {"peak_bytes": 9 * 10**8}}}
    new = workshop.beyond_binder(text(before, "1 GB+"), measured | small)
    assert new == text("", "1 GB+"), "Binder installs the CPU build: its memory counts"


def test_a_cpu_build_is_kept_beside_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lesson(tmp_path)
    (tmp_path / workshop.GUIDES).mkdir(parents=True)
    for cpu, taken in ((False, 3 * workshop.MIB), (True, 2 * workshop.MIB)):
        found = {"seconds": 2.0, "peak_bytes": taken, "sections": {}}
        monkeypatch.setattr(workshop, "is_cpu_build", lambda cpu=cpu: cpu)
        monkeypatch.setattr(workshop, "measure", lambda *_, row=found: row)
        monkeypatch.setattr(
            workshop, "measure_memory", lambda *_, row=found: {"peak_bytes": row["peak_bytes"]}
        )
        assert workshop.measure_all(tmp_path, [path], "") == 0
    table = workshop.summary_table(tmp_path, workshop.load(tmp_path))
    assert "| 2 | 3 | 2 |" in table, table
    assert "CPU build" in table.rpartition("\n")[2], "and says where each was measured"


def test_measuring_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / workshop.GUIDES).mkdir(parents=True)
    old = {"ended": "2026-01-01T10:00:00", "seconds": 1.0}
    workshop.save(
        tmp_path, {"lessons": {"early": old, "late": old | {"ended": "2026-01-02T10:00:00"}}}
    )

    def run(_: Path, path: str) -> dict:
        if path == "broken":
            raise workshop.DeadKernelError("Kernel died")
        return {"seconds": 2.0, "peak_bytes": 10**9}

    monkeypatch.setattr(workshop, "measure", run)
    monkeypatch.setattr(workshop, "is_cpu_build", lambda: False)
    failed = workshop.measure_all(tmp_path, ["early", "broken", "late", "new"], "2026-01-02T09:00")
    rows = workshop.load(tmp_path)["lessons"]
    assert {name: row["seconds"] for name, row in rows.items()} == {
        "early": 2.0,
        "late": 1.0,
        "new": 2.0,
    }, rows
    assert failed == 1 and "broken  failed: Kernel died" in capsys.readouterr().out


def test_a_cell_takes_what_its_kernel_says() -> None:
    cell = nbformat.v4.new_code_cell("1")
    assert workshop.seconds_of(cell) == 0.0, "a cell that was not run"
    cell.metadata["execution"] = {
        "iopub.status.busy": "2026-01-01T00:00:01.500000Z",
        "iopub.status.idle": "2026-01-01T00:00:03.000000Z",
    }
    assert workshop.seconds_of(cell) == 1.5
