"""A checkpoint that would run code when it is read is refused, and none such is written."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMATS
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from utils.parallel import CheckpointError, Saves, list_checkpoints, load_newest, save_safely
from utils.parallel.checkpoint_folder import CHECKSUMS, write_list
from utils.shims.torch_checkpoint import read_metadata


class Runs:
    """Unpickled, it calls what it was given."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def with_a_fitting_list(path: Path) -> None:
    """What somebody does who changes a checkpoint on purpose."""
    (path / CHECKSUMS).unlink()
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    sums = {name: (len(data), zlib.crc32(data)) for name, data in files.items()}
    write_list(path, sums, 1)


def state() -> dict[str, Any]:
    return {"weight": torch.ones(4), "note": "plain"}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(folder: Path) -> None:
    load_newest(state(), folder)


def gone_on(folder: Path) -> None:
    model, optimizer = trained()
    Saves(str(folder), [model], optimizer)


@pytest.mark.parametrize("attempt", [loaded, gone_on])
def test_code_in_the_metadata_does_not_run(tmp_path: Path, attempt) -> None:
    path, ran = save_safely(state(), tmp_path, 1), tmp_path / "ran"
    (path / ".metadata").write_bytes(pickle.dumps(Runs(os.system, f"touch {ran}")))
    with_a_fitting_list(path)
    with pytest.raises(CheckpointError, match=r"asks for posix\.system: code, and no checkpoint"):
        attempt(tmp_path)
    assert not ran.exists(), "the command ran"


def test_code_in_an_entry_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = save_safely(state(), tmp_path, 1)
    hostile = {"weight": torch.ones(4), "note": Runs(os.system, f"touch {ran}")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone, and that something is there
        save(hostile, checkpoint_id=path)
    with_a_fitting_list(path)
    with pytest.raises(CheckpointError, match="'note' is no plain data"):
        loaded(tmp_path)
    assert not ran.exists(), "the command ran"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state(), checkpoint_id=path)
    assert ran.exists(), "that it would have run, as it does in PyTorch's own load"


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    path = save_safely(state(), tmp_path, 1)
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
    with_a_fitting_list(path)
    with pytest.raises(CheckpointError, match="none of its own, such as ../../secret"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "hostile",
    [
        Runs(eval, "1"),
        Runs(getattr, "a", "upper"),
        Metadata({}, Runs(getattr, torch.Size, "mro"), {}),
        Metadata({}, Runs(getattr, MEMORY_FORMATS, "mro"), {}),
        Runs(torch.load, "x"),
        os.system,
        Path,
        [1],
        b"",
        SimpleNamespace(a=1),
        torch.distributed.checkpoint.metadata.StorageMeta,
    ],
)
def test_what_is_no_metadata_is_refused(hostile: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"its \.metadata"):
        read_metadata(pickle.dumps(hostile) if hostile != b"" else b"")


def test_a_member_of_an_enumeration_reads_as_any_python_wrote_it() -> None:
    """Python before 3.11.4 writes `getattr` of the enumeration and a name."""
    for member in MEMORY_FORMATS:
        for written in (member, Runs(getattr, MEMORY_FORMATS, member.name)):
            assert read_metadata(pickle.dumps(Metadata({}, written, {}))).planner_data is member


def test_names_with_dots_lead_nowhere() -> None:
    """`Metadata.__init__.__globals__` would be a way to everything."""
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch", "serialization.os.system"),
        ("torch", "load"),
    ):
        asks = b"\x80\x04" + b"".join(
            b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)
        )
        with pytest.raises(pickle.UnpicklingError, match="code, and no checkpoint"):
            read_metadata(asks + b"\x93.")


def test_metadata_reads_as_pytorch_reads_it(tmp_path: Path) -> None:
    weights, moments = get_state_dict(*trained())
    path = save_safely({"model": weights, "optimizer": moments}, tmp_path, 1)
    data = (path / ".metadata").read_bytes()
    assert read_metadata(data) == pickle.load(io.BytesIO(data))


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save_safely(state(), tmp_path, 1)
    with pytest.raises(CheckpointError, match="'note', a Fraction, is no plain data: make it tens"):
        from fractions import Fraction

        save_safely({"note": Fraction(1, 3)}, tmp_path, 2)
    assert len([*tmp_path.iterdir()]) == 1 and len(list_checkpoints(tmp_path)) == 1
