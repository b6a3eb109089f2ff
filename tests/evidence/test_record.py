"""Records: complete, written whole or not at all, and a row also where memory ran out."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evidence.record import __main__ as command
from evidence.record import provenance as origin
from evidence.record import registry, store
from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.provenance import driver_version, git_state, provenance
from evidence.record.registry import EXPERIMENTS, load
from evidence.record.store import PROVENANCE, RESULTS, Record, RecordError, recorded, write

CPU = torch.device("cpu")
HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def a_record(device: str = "NVIDIA H200", rows: list | None = None, **changes: Any) -> Record:
    """A record with everything that one must have."""
    known = dict.fromkeys(PROVENANCE, "known") | {"device": device, "device_type": "cuda"}
    known |= {"memory_bytes": 1, "date": "2026-03-01T10:00:00+00:00", **changes}
    return Record("resnet50", known, {"optimizer": "Adam"}, rows or [{"batch": 64}])


def an_experiment(run: Callable[[Stage], dict], name: str = "resnet50") -> Experiment:
    """An experiment of one row."""
    return Experiment(name, "for the test", {"made": "up"}, lambda _: [Trial({"batch": 1}, run)])


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# Where a record comes from


def test_provenance_on_a_cpu_is_complete() -> None:
    is_clone = Path(__file__).parents[2].joinpath(".git").exists()
    told = "" if is_clone else HASH  # an archive that was downloaded has no git
    found = provenance(CPU, "python -m evidence.record resnet50", told)
    assert set(PROVENANCE) <= found.keys()
    assert not [key for key, value in found.items() if value in (None, "")]
    assert re.fullmatch(r"[0-9a-f]{40}", found["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert found["command"] == "python -m evidence.record resnet50"


def test_provenance_on_a_gpu_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(origin, "_output", lambda _: "580.65.06\n580.65.06")
    found = provenance(torch.device("cuda", 0), "command", commit=HASH)
    assert set(PROVENANCE) <= found.keys()
    assert (found["device"], found["driver"], found["compute_capability"]) == (
        "NVIDIA H200",
        "580.65.06",
        "9.0",
    )
    assert found["memory_bytes"] == 150_000_000_000
    assert (found["commit"], found["tree"]) == (HASH, "not checked")


def test_driver_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC"
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(origin, "_output", lambda _: None)
    monkeypatch.setattr(origin, "_DRIVER_FILE", tmp_path / "version")
    assert driver_version() == "535.183.01"
    monkeypatch.setattr(origin, "_DRIVER_FILE", tmp_path / "absent")
    with pytest.raises(RecordError, match="nvidia-smi does not answer"):
        driver_version()


def test_commit_and_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(RecordError, match="--commit HASH"):
        git_state()
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    commit, tree = git_state()
    assert (len(commit), tree) == (40, "clean")
    (tmp_path / "evidence/results").mkdir(parents=True)
    (tmp_path / "evidence/results/row.json").write_text("{}")
    assert git_state() == (commit, "clean"), "a record does not change the code that wrote it"
    (tmp_path / "code.py").write_text("")
    assert git_state() == (commit, "dirty")


# The files


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write(a_record("NVIDIA H200"), tmp_path)
    assert path == tmp_path / "nvidia-h200" / "resnet50.json"
    write(a_record("CPU x86_64", device_type="cpu"), tmp_path)
    assert recorded("resnet50", tmp_path) == [
        a_record("CPU x86_64", device_type="cpu"),
        a_record("NVIDIA H200"),
    ]
    assert json.loads(path.read_text())["evidence"] == "recorded"
    assert recorded("device_speed", tmp_path) == []


def test_a_new_record_replaces_the_old_one(tmp_path: Path) -> None:
    with write(a_record(rows=[{"batch": 1}]), tmp_path).open() as reader:
        write(a_record(rows=[{"batch": 2}]), tmp_path)
        assert json.load(reader)["rows"] == [{"batch": 1}], "who reads the old one reads all of it"
    assert [record.rows for record in recorded("resnet50", tmp_path)] == [[{"batch": 2}]]
    assert files(tmp_path) == ["nvidia-h200/resnet50.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_earlier_file(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(a_record(rows=[{"batch": 1}]), tmp_path)

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RecordError, match=r"evidence/results/nvidia-h200/resnet50.json cannot be written"
    ):
        write(a_record(rows=[{"batch": 2}]), tmp_path)
    assert files(tmp_path) == ["nvidia-h200/resnet50.json"]
    assert recorded("resnet50", tmp_path)[0].rows == [{"batch": 1}]


@pytest.mark.parametrize("value", [object(), math.nan, math.inf])
def test_rows_that_are_no_json_leave_the_earlier_file(value: object, tmp_path: Path) -> None:
    write(a_record(rows=[{"batch": 1}]), tmp_path)
    with pytest.raises(RecordError, match="is not written: JSON has no word for a value"):
        write(a_record(rows=[{"batch": value}]), tmp_path)
    assert recorded("resnet50", tmp_path)[0].rows == [{"batch": 1}]


def test_a_read_only_folder_is_found_out_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Stage] = []
    monkeypatch.setattr(command, "load", lambda _: an_experiment(lambda s: ran.append(s) or {}))

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store.tempfile, "mkstemp", read_only)
    assert command.main(["resnet50", "--commit", HASH], root=tmp_path) == 1
    told = capsys.readouterr().err
    assert "Read-only file system" in told and "Traceback" not in told
    assert not ran and files(tmp_path) == []


def test_a_results_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("in the way")
    with pytest.raises(RecordError, match="cannot be written"):
        write(a_record(), tmp_path / "results")
    assert (tmp_path / "results").read_text() == "in the way"


def broken(change: Callable[[dict], Any]) -> Callable[[str], str]:
    """A change of a record's text by way of its data."""

    def changed(text: str) -> str:
        data = json.loads(text)
        replaced = change(data)
        return json.dumps(data if replaced is None else replaced)

    return changed


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (broken(lambda data: []), "holds no record"),
        (broken(lambda data: data.pop("rows") and None), "lacks rows"),
        (broken(lambda data: data.update(evidence="measured")), "lacks its evidence"),
        (broken(lambda data: data["provenance"].pop("driver") and None), "driver missing"),
        (broken(lambda data: data["provenance"].update(commit="")), "commit missing"),
    ],
)
def test_a_damaged_file_is_a_sentence(
    damage: Callable[[str], str], sentence: str, tmp_path: Path
) -> None:
    path = write(a_record(), tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(
        RecordError, match=rf"evidence/results/nvidia-h200/resnet50.json .*{sentence}"
    ):
        recorded("resnet50", tmp_path)


def test_the_repositorys_own_records_are_whole() -> None:
    paths = sorted(RESULTS.glob("*/*.json"))
    assert {path.stem for path in paths} <= set(EXPERIMENTS)
    gpus = [record for record in map(store.read, paths) if record.on_gpu]
    says_none = "No GPU row exists yet" in (RESULTS / "README.md").read_text(encoding="utf-8")
    assert says_none == (not gpus)


# The command


def test_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["--list"], root=tmp_path) == 0
    told = capsys.readouterr().out
    assert all(name in told and load(name).summary in told for name in EXPERIMENTS)
    assert re.search(r"resnet50 +4 rows", told)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet", "'resnet' is no experiment. Did you mean resnet50?"),
        ("device-sped", "'device-sped' is no experiment. Did you mean device_speed?"),
        (
            "qqq",
            "'qqq' is no experiment. There is "
            "cifar_accuracy, cluster_runs, cluster_troubles, device_speed, gloo_ranks, gpt1b_recompute, "
            "llama7b_adapters, oom_fragmentation, resnet50, survive.",
        ),
    ],
)
def test_an_unknown_name(
    name: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["device_speed", name], root=tmp_path) == 1
    assert capsys.readouterr().err.strip() == sentence
    assert files(tmp_path) == [], "nothing runs before all names are known"
    with pytest.raises(RecordError, match=re.escape(sentence)):
        recorded(name, tmp_path)


def test_without_a_name_all_that_suit_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suited = an_experiment(lambda _: {"seen": 1})
    other = Experiment("device_speed", "for another device", {}, lambda _: [])
    chosen = dict.fromkeys(registry.EXPERIMENTS, other) | {"resnet50": suited}
    monkeypatch.setattr(command, "load", chosen.__getitem__)
    monkeypatch.setattr(command, "EXPERIMENTS", tuple(chosen))
    assert command.main(["--commit", HASH], root=tmp_path) == 0
    (record,) = recorded("resnet50", tmp_path)
    assert record.rows == [{"batch": 1, "completed": True, "seen": 1}]
    assert record.configuration == {"made": "up"}
    assert record.provenance["command"] == "python -m evidence.record resnet50"
    assert [Path(name).name for name in files(tmp_path)] == ["resnet50.json"]
    assert command.main(["device_speed"], root=tmp_path) == 1
    assert "device_speed: nothing to measure on CPU" in capsys.readouterr().err


def test_an_interrupted_run_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: Stage) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load", lambda _: an_experiment(interrupt))
    assert command.main(["resnet50", "--commit", HASH], root=tmp_path) == 130
    assert "Stopped" in capsys.readouterr().err
    assert files(tmp_path) == []
