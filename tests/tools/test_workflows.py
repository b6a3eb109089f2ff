"""Workflows and issue forms: they parse, and call what is there."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import failures  # noqa: E402
import release  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))


def jobs(path: Path) -> Iterator[tuple[str, dict]]:
    """The jobs of a workflow, each with its place."""
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items():
        yield f"{path.name}, {name}", job


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_asks_for_no_more_than_it_needs(path: Path) -> None:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert settings["permissions"] == {"contents": "read"}, "a job that writes says so itself"
    assert True in settings or "on" in settings, "YAML reads the key `on` as True"
    for place, job in jobs(path):
        assert job["timeout-minutes"] <= 180, f"{place} has a limit of its own"
        assert "ubuntu" in str(job["runs-on"]) or "matrix" in str(job["runs-on"]), place


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_commands_that_exist(path: Path) -> None:
    for place, job in jobs(path):
        for command in (step["run"] for step in job["steps"] if "run" in step):
            for target in re.findall(r"\bmake ([a-z-]+)", command):
                assert target in TARGETS, f"{place} calls make {target}, which is not there"
            for script in re.findall(r"\b(?:tools|tests)/\S+\.(?:py|sh)", command):
                assert (ROOT / script).is_file(), f"{place} calls {script}, which is not there"


def test_what_fails_weekly_becomes_an_issue() -> None:
    for place, job in jobs(ROOT / ".github/workflows/weekly.yml"):
        told = [step for step in job["steps"] if "open_issue.sh" in step.get("run", "")]
        if place.endswith(("newest", "colab", "links", "prices")):
            assert told and told[0]["if"] == "failure()", f"{place} opens an issue when it fails"
            assert job["permissions"]["issues"] == "write", f"{place} may open one"


def test_old_prices_are_looked_for_every_week() -> None:
    found = dict(jobs(ROOT / ".github/workflows/weekly.yml"))["weekly.yml, prices"]
    (command,) = (step["run"] for step in found["steps"] if "utils.catalog" in step.get("run", ""))
    assert "--strict" in command, "old ones fail the job, and so open an issue"


def test_the_newest_versions_are_not_the_pinned() -> None:
    _, job = next(iter(jobs(ROOT / ".github/workflows/weekly.yml")))
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[:2] == ["rm constraints.txt", "make course"], commands


def test_a_failed_run_is_reported_lesson_by_lesson(tmp_path: Path) -> None:
    rows = [
        {"notebook": "notebooks/a.ipynb", "error": ""},
        {"notebook": "notebooks/b.ipynb", "error": "KeyError:\n 'x'"},
    ]
    (tmp_path / "figures.json").write_text(json.dumps(rows))
    text = failures.report(tmp_path / "figures.json", "https://run")
    assert (
        text == "1 of 2 failed.\n\n- `notebooks/b.ipynb`: KeyError: 'x'\n\nThe run: https://run\n"
    )
    assert "failed before it wrote" in failures.report(tmp_path / "none.json"), "set-up failed"
    (tmp_path / "fine.json").write_text(json.dumps(rows[:1]))
    assert "None of the 1 rows" in failures.report(tmp_path / "fine.json"), "the job itself failed"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_in_words(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys(), "what GitHub asks of a form"
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)), "each field has an id of its own"
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    assert all(field["type"] in ("input", "textarea", "dropdown") for field in form["body"])


def test_there_is_a_form_for_each_kind_of_report() -> None:
    assert {path.stem for path in FORMS} == {"wrong_number", "broken_cell", "wish"}


def test_the_citation_agrees_with_the_project() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{cited["version"]}"' in project, "CITATION.cff has pyproject.toml's version"
    assert f'license = "{cited["license"]}"' in project
    assert {"cff-version", "message", "title", "authors"} <= cited.keys(), "what the format asks"


def test_a_release_packs_what_was_built(tmp_path: Path) -> None:
    course = "build/wheelhouse/course"
    for folder in (
        "build/site",
        f"{course}/notebooks",
        f"{course}/labs",
        f"{course}/solutions",
        "labs",
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.txt").write_text(folder)
    (tmp_path / "labs/anna.ipynb").write_text("handed in")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2\n\n- New.\n\n## 0.1\n\n- Old.\n")
    assert release.main(tmp_path) == 0
    folder = tmp_path / "build/release"
    assert (folder / "notes.md").read_text() == "## 0.2\n\n- New.\n", "the newest part alone"
    with tarfile.open(folder / f"{release.NAME}-notebooks.tar.gz") as archive:
        names = archive.getnames()
    assert f"{release.NAME}-notebooks/labs/file.txt" in names, names
    assert not any("anna" in name for name in names), "what was put beside the course stays here"


def test_a_release_without_a_part_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(tmp_path) == 1
    assert "build/site is not there; run make site first." in capsys.readouterr().err
