"""Records on disk: `evidence/results/<device>/<experiment>.json`, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.record.registry import RecordError, check_name
from utils.units import Evidence

RESULTS = Path(__file__).resolve().parents[1] / "results"

# What a record must say about where it comes from.
PROVENANCE = (
    "device", "device_type", "memory_bytes", "driver", "torch", "cuda", "cudnn", "python",
    "system", "date", "command", "commit", "tree",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What one run of an experiment found on one device, and where that comes from."""

    experiment: str
    provenance: Mapping[str, Any]
    configuration: Mapping[str, Any]
    rows: Sequence[Row]
    evidence: Evidence = Evidence.RECORDED

    @property
    def device(self) -> str:
        return self.provenance["device"]

    @property
    def date(self) -> str:
        """The day of the run in UTC, such as "2026-03-01"."""
        return self.provenance["date"][:10]

    @property
    def on_gpu(self) -> bool:
        return self.provenance["device_type"] == "cuda"


def recorded(experiment: str, root: Path | None = None) -> list[Record]:
    """All records of an experiment, one per device, in order of the devices' names.

    Raises:
        RecordError: no experiment has this name, or a file is damaged or incomplete.
    """
    check_name(experiment)
    return [read(path) for path in sorted((root or RESULTS).glob(f"*/{experiment}.json"))]


def read(path: Path) -> Record:
    """Read one record.

    Raises:
        RecordError: the file is damaged, or does not say where its rows come from.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unusable(path, f"is damaged ({error})") from error
    if not isinstance(data, dict):
        raise _unusable(path, "holds no record")
    wanted = {"experiment": str, "provenance": dict, "configuration": dict, "rows": list}
    wrong = [key for key, kind in wanted.items() if not isinstance(data.get(key), kind)]
    if wrong or data.get("evidence") != str(Evidence.RECORDED):
        raise _unusable(path, f"lacks {', '.join(wrong) or 'its evidence'}")
    missing = [key for key in PROVENANCE if data["provenance"].get(key) in (None, "")]
    if missing:
        raise _unusable(path, f"does not say where it comes from: {', '.join(missing)} missing")
    return Record(*(data[key] for key in wanted))


def write(record: Record, root: Path | None = None) -> Path:
    """Write a record beside those of its device, in place of an earlier one; return the path.

    Raises:
        RecordError: the folder cannot be written, the disk is full, or a row holds what JSON has
            no word for, as NaN. The earlier file stays.
    """
    path = _path(record.experiment, record.device, root)
    data = {
        "experiment": record.experiment,
        "evidence": str(record.evidence),
        "provenance": record.provenance,
        "configuration": record.configuration,
        "rows": record.rows,
    }
    try:
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"{path} is not written: JSON has no word for a value ({error})."
        ) from error
    with _draft(path) as draft:
        draft.write_text(text, encoding="utf-8")
        with draft.open("rb+") as file:
            os.fsync(file.fileno())  # a disk that is full may say so only here
        draft.chmod(0o644)  # temporary files are private
        draft.replace(path)
    return path


def check_writable(experiment: str, device: str, root: Path | None = None) -> None:
    """Find out before an experiment, not after it, that its record could not be written.

    Raises:
        RecordError: the folder cannot be written.
    """
    with _draft(_path(experiment, device, root)):
        pass


def slug(device: str) -> str:
    """A device's name as a folder: "NVIDIA H200" is "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _path(experiment: str, device: str, root: Path | None) -> Path:
    return (root or RESULTS) / slug(device) / f"{experiment}.json"


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; whatever happens, it does not stay."""
    draft: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        draft = Path(name)
        yield draft
    except OSError as error:
        raise RecordError(
            f"{_short(path)} cannot be written ({error.strerror or error}). Make room, or make "
            "the results folder writable, and run again; earlier records are untouched."
        ) from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def _unusable(path: Path, problem: str) -> RecordError:
    return RecordError(
        f"{_short(path)} {problem}. Restore it with git, or delete it and record it again: "
        f"python -m evidence.record {path.stem}"
    )


def _short(path: Path) -> str:
    """The path as a reader finds it in the repository."""
    return "/".join(["evidence/results", *path.parts[-2:]])
