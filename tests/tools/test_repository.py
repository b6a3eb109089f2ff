"""What several files say in common, they say alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import badges  # noqa: E402
import constraints  # noqa: E402
import wheelhouse  # noqa: E402

CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
# Somebody's home, or the very folder this runs in.
MACHINE_PATH = re.compile(rf"(?<![\w.:/-])/(?:home|Users|root)/[\w.-]+|{re.escape(str(ROOT))}/")
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cpp", ".json", ".ipynb", ".cfg", ""}


def tracked() -> list[Path]:
    """The repository's own files: what git knows, and what is new and not ignored.

    In an archive that was downloaded: what lies in the course's own folders.
    """
    if not (ROOT / ".git").exists():
        return [ROOT / name for name in wheelhouse.course_files(ROOT)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = done.stdout.decode().strip("\0").split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_conda_has_the_same_list() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    wanted = [Requirement(line) for line in project()["dependencies"]]
    renamed = [f"{CONDA_NAMES.get(need.name, need.name)}{need.specifier}" for need in wanted]
    assert environment["dependencies"] == [f"python{project()['requires-python']}", *renamed]
    assert environment["name"] == project()["name"]


def test_constraints_meet_the_lower_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for need in constraints.declared():
        assert need.specifier.contains(pins[need.name]), need
    assert not [name for name in pins if name.startswith(constraints.CHOSEN_BY_TORCH)]
    assert not [version for version in pins.values() if "+" in version or "/" in version]


def test_constraints_follow_extras_and_markers() -> None:
    versions = constraints.closure(constraints.declared())
    assert {"torch", "pytest", "jinja2", "pyzmq"} <= versions.keys()
    assert {"uv", "nbval"} <= versions.keys()
    text = constraints.render(versions)
    assert f"torch=={versions['torch']}\n" in text
    assert text.startswith("# The exact versions that were tested.")


def test_a_version_that_refuses_an_early_patch_of_python_binds_later_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = {"old": "~=3.8", "none": None, "new": ">=3.11.5,!=3.12.1"}
    monkeypatch.setattr(
        constraints,
        "distribution",
        lambda n: SimpleNamespace(metadata={"Requires-Python": needs[n]}),
    )
    pins = constraints.render(dict.fromkeys(needs, "1.0")).splitlines()[2:]
    assert pins == ['new==1.0 ; python_full_version >= "3.11.5"', "none==1.0", "old==1.0"]


def test_a_local_build_leaves_no_mark_in_the_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(version="2.15.0+cpu", requires=[])
    monkeypatch.setattr(constraints, "distribution", lambda _: installed)
    assert constraints.closure([Requirement("torch>=2.11")]) == {"torch": "2.15.0"}


def test_badges_and_addresses_follow_pyproject() -> None:
    assert badges.repository_url() == project().get("urls", {}).get("Repository", "")
    assert list(badges.outdated()) == [], "run `make badges`"


def test_badges_are_rewritten_from_one_setting(tmp_path: Path) -> None:
    for name in (*badges.CARRIERS, "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    settings = (tmp_path / "pyproject.toml").read_text()
    for address in ("https://github.com/someone/course", "https://github.com/another/name"):
        moved = re.sub(r"(?<=\[project\.urls\]\n)", f'Repository = "{address}"\n', settings)
        (tmp_path / "pyproject.toml").write_text(moved)
        changed = badges.outdated(tmp_path)
        assert set(changed) == {tmp_path / name for name in badges.CARRIERS}
        assert f"```\ngit clone {address}\n```" in changed[tmp_path / "README.md"]
        assert f'repository="{address}"' in changed[tmp_path / "sources/bootstrap.py"]
        assert changed[tmp_path / "README.md"].count("[![Open in Colab]") > 5
        for path, text in changed.items():
            path.write_text(text)
    (tmp_path / "pyproject.toml").write_text(settings)
    assert all(
        (ROOT / path.relative_to(tmp_path)).read_text(encoding="utf-8") == text
        for path, text in badges.outdated(tmp_path).items()
    ), "without an address the files are as they were"


def test_no_reader_meets_an_address_that_does_not_exist() -> None:
    shown = [
        p
        for p in tracked()
        if p.suffix in (".md", ".ipynb", ".toml", ".yml", ".py")
        and p.relative_to(ROOT).parts[0] != "tests"
    ]
    placeholder = re.compile(r"\b(OWNER|YOUR[_-]?(NAME|ACCOUNT)|example\.org/\w+/big-models)\b")
    found = [p for p in shown if placeholder.search(p.read_text(encoding="utf-8"))]
    assert found == []
    if not badges.repository_url():
        readers = [p for p in shown if p.suffix in (".md", ".ipynb")]
        badged = [p for p in readers if "colab-badge.svg" in p.read_text(encoding="utf-8")]
        assert badged == [], "badges need an address: run `make badges` and `make notebooks`"


def test_every_command_of_the_readme_works_as_typed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    url = badges.repository_url()
    assert commands == [f"git clone {url}"] * bool(url) + ["make lab"]


def lessons() -> set[str]:
    """The lessons of the course; a page, such as the glossary, has no row of its own."""
    pages = {f"notebooks/{path.parent.name}.ipynb" for path in (ROOT / "sources").rglob("page.py")}
    names = {str(path.relative_to(ROOT)) for path in tracked() if path.suffix == ".ipynb"}
    return {name for name in names if name.startswith("notebooks/")} - pages


def test_every_lesson_has_its_row_and_every_row_its_lesson() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| \[.*?\]\((notebooks/\S+\.ipynb)\)", text, flags=re.MULTILINE))
    badged = set(re.findall(r"<!-- badges: (\S+) -->", text))
    told = "README.md: its table of lessons has one row too many or too few"
    assert rows == badged == lessons(), f"{told}: {rows ^ lessons() or badged ^ lessons()}"


def test_nothing_is_promised_that_is_not_there() -> None:
    for name in ("README.md", "sources/00_start_here/lesson.py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "o come:" not in text, f"{name} names lessons to come, and all of them are there"


def test_lessons_take_the_minutes_that_the_readme_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = r"^\| \[.*?\]\(notebooks/(\S+)\.ipynb\).*?\| (\d+) \| (\d*) \|"
    rows = re.findall(row, text, re.MULTILINE)
    without = set(re.findall(r"^\| \[.*?\]\((notebooks/\S+\.ipynb)\)", text, re.MULTILINE)) - {
        f"notebooks/{name}.ipynb" for name, *_ in rows
    }
    assert not without, f"README.md: give the row its minutes, and those of its lab: {without}"
    for name, minutes, of_the_lab in rows:
        source = (ROOT / f"sources/{name}/lesson.py").read_text(encoding="utf-8")
        told = re.search(r"^# \| (\d+)(?:, and (\d+) for the lab)? \|", source, re.MULTILINE)
        differ = f"README.md and sources/{name}/lesson.py or lab.py tell other minutes"
        assert told and told[1] == minutes, differ
        lab = ROOT / f"sources/{name}/lab.py"
        head = lab.read_text(encoding="utf-8") if lab.is_file() else "# | 0 of 5 |  |"
        wanted = re.search(r"^# \| \d of 5 \| (\d*) \|", head, re.MULTILINE)
        assert wanted and wanted[1] == of_the_lab, differ
        assert told[2] in (None, of_the_lab), differ


@pytest.mark.parametrize("name", ["README.md", "sources/00_start_here/lesson.py"])
def test_ways_through_take_the_hours_of_their_lessons(name: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = r"^\| \[.*?\]\(notebooks/(?:\w+/)?(\w+?)_\w+\.ipynb\).*?\| (\d+) \| (\d*) \|"
    minutes = {n: (int(m), int(lab or 0)) for n, m, lab in re.findall(row, text, re.MULTILINE)}
    page = (ROOT / name).read_text(encoding="utf-8")
    ways = re.findall(
        r"^(?:# )?\| [^|]+ \| (\d\d\w?(?:, \d\d\w?)+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M
    )
    assert len(ways) >= 3, f"{name}: its table of ways through is gone"
    for lessons_, *told in ways:
        both = zip(*(minutes[number] for number in lessons_.split(", ")), strict=True)
        hours = [f"{sum(part) / 60:.1f}" for part in both]
        assert told == hours, f"{name}: {lessons_} take {hours} hours, and it says {told}"


def test_the_readme_says_whether_a_gpu_was_recorded() -> None:
    paths = (ROOT / "evidence/results").glob("*/*.json")
    recorded = [path for path in paths if not path.parent.name.startswith("cpu-")]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ("No GPU has been recorded yet" in text) == (not recorded)


def test_badges_need_an_address_of_github() -> None:
    assert badges.badge_markdown("notebooks/a.ipynb", "") == ""
    assert badges.badge_markdown("notebooks/a.ipynb", "https://example.org/a/b") == ""
    with pytest.raises(ValueError, match=r"Change Repository in pyproject\.toml"):
        badges.badge_markdown("notebooks/a.ipynb", "https://github.com/me")
    badge = badges.badge_markdown("notebooks/a.ipynb", "https://github.com/me/course")
    assert "colab.research.google.com/github/me/course/blob/main/notebooks/a.ipynb" in badge
    assert "mybinder.org/v2/gh/me/course/main?labpath=notebooks%2Fa.ipynb" in badge


@pytest.mark.parametrize(
    ("taken", "told"),
    [
        (10**9, ""),
        (12 * 10**8, " (takes 1.2 GB; Binder guarantees 1 GB and allows up to 2)"),
        (26 * 10**8, " (takes 2.6 GB, beyond the 2 GB that Binder allows)"),
    ],
)
def test_a_lesson_beyond_binder_says_so_at_its_badge(taken: int, told: str, tmp_path: Path) -> None:
    rows = {"lessons": {"notebooks/a.ipynb": {"peak_bytes": taken}}}
    (tmp_path / badges.MEASURED).parent.mkdir(parents=True)
    (tmp_path / badges.MEASURED).write_text(json.dumps(rows))
    assert badges.beyond_binder("notebooks/a.ipynb", tmp_path) == told
    assert badges.beyond_binder("notebooks/b.ipynb", tmp_path) == "", "it was not measured"


def test_the_readme_says_which_lessons_binder_does_not_allow() -> None:
    rows = json.loads((ROOT / badges.MEASURED).read_text(encoding="utf-8"))["lessons"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (
        name for name, row in rows.items() if row["peak_bytes"] > badges.BINDER_MOST_BYTES
    ):
        (line,) = (line for line in readme.splitlines() if f"]({name})" in line)
        assert "GB+" in line, f"{name} took {rows[name]['peak_bytes']:,} bytes"


def test_ci_starts_where_a_user_starts() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111, ".ci/run must be executable"
    lines = script.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands[:3] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]
    assert commands[-1] == "make optional", "then what that skipped, with all that it lacked"
    assert "`make test`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_workflow_installs_nothing_before_it_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    linux, other = (step for step in workflow["jobs"]["test"]["steps"] if "run" in step)
    assert linux["run"].endswith(" .ci/run") and linux["if"] == "runner.os == 'Linux'"
    assert other["run"] == "make test" and other["if"] == "runner.os != 'Linux'"


def test_every_action_of_the_workflows_is_pinned_to_a_commit() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    actions = re.findall(r"uses: *(.*)", workflows)
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action


def test_the_commands_in_contributing_are_those_of_make() -> None:
    for target in ("test", "optional", "soak", "record"):
        assert f"$(RUN) tools/stages.py {target}\n" in (ROOT / "Makefile").read_text()
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert ".venv/bin/python tools/stages.py test\n" in text


def test_make_lists_its_commands() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in ("setup", "lab", "test", "course", "bench", "notebooks", "my-labs", "badges"):
        assert f"make {command} " in done.stdout


def test_no_file_names_a_path_of_a_machine() -> None:
    found = {}
    for path in tracked():
        if path.suffix in TEXT and path != Path(__file__):
            hits = MACHINE_PATH.findall(path.read_text(encoding="utf-8"))
            if hits:
                found[path.relative_to(ROOT)] = hits[:3]
    assert found == {}


def test_hooks_call_what_the_set_up_installs() -> None:
    """They need no network: each is a command of .venv, over files that are there."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    [local] = hooks["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        program, *arguments = hook["entry"].split()
        assert hook["language"] == "system" and program.startswith(".venv/bin/"), hook
        assert all((ROOT / name).is_file() for name in arguments if name.endswith(".py")), hook
        assert any(
            re.search(hook.get("files", ""), str(path.relative_to(ROOT))) for path in tracked()
        )


def test_a_request_form_names_commands_that_exist() -> None:
    form = (ROOT / ".github/pull_request_template.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"`make ([a-z-]+)`", form)
    assert named and all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named), named
