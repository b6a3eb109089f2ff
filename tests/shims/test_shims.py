"""The private names of other libraries that the course stands on: all there, all still called.

Run it first after an upgrade: it takes seconds, and says `torch X moved Y: repair Z`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import shim_cases
import torch
from private_names import operators, private_names
from torch import nn

from utils.memory import measure
from utils.memory.keeps_elsewhere import KeepsElsewhere
from utils.ranks import run_killable
from utils.shims import (
    bitsandbytes,
    ddp,
    deepspeed,
    forkserver,
    fsdp,
    torch_,
    torch_autocast,
    torch_cache,
    torch_checkpoint,
    torch_dispatch,
    torch_distributed,
    torch_gradients,
    torch_simulated,
    transformers,
)
from utils.shims.extension_points import EXTENSION_POINTS
from utils.shims.shim import Library, MovedError, Shim
from utils.simulation import result_cache, simulate

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    torch_,
    torch_autocast,
    torch_cache,
    torch_checkpoint,
    torch_dispatch,
    torch_distributed,
    torch_gradients,
    torch_simulated,
    ddp,
    fsdp,
    forkserver,
)
LIBRARIES = (bitsandbytes, deepspeed, transformers)  # each looked at in a process of its own
OWN = [
    *(shim for file in FILES for shim in file.SHIMS),
    *torch_simulated.COMPILER_SHIMS,
    *(torch_.CUDA_SHIMS if torch.version.cuda else ()),
    *EXTENSION_POINTS,
]
PATCHED = [shim for shim in OWN if shim.patched]


def name_of(shim: Shim) -> str:
    return f"{shim.library.name} {shim.attribute}"


@functools.cache
def seen(file: str) -> tuple[list[str], list[str], dict[str, str]]:
    return run_killable(shim_cases.seen, file, timeout_seconds=300)


each_library = pytest.mark.parametrize(
    "file", LIBRARIES, ids=lambda f: f.__name__.rpartition(".")[2]
)


@pytest.mark.parametrize("shim", OWN, ids=name_of)
def test_pytorch_has_the_name(shim):
    shim.get()


@pytest.mark.parametrize("shim", PATCHED, ids=name_of)
def test_pytorch_still_calls_what_is_replaced(shim):
    assert shim_cases.uncalled([shim]) == []


@each_library
def test_other_libraries_have_every_name(file):
    assert seen(file.__name__)[0] == []


@each_library
def test_other_libraries_still_call_what_is_replaced(file):
    assert seen(file.__name__)[1] == []


def says_what_to_repair(shim: Shim, said: str, installed: str) -> bool:
    """Library with its version, attribute, and shim by function and file."""
    return (
        said.startswith(f"{installed} moved {shim.attribute} of ")
        and f": repair {shim.function} in utils/shims/" in said
        and shim.why in said
    )


@pytest.mark.parametrize("shim", OWN, ids=name_of)
def test_canary_a_renamed_target_is_named_with_its_library_and_shim(shim):
    installed = {"torch": f"torch {torch.__version__.partition('+')[0]}"}
    said = shim_cases.said_when_renamed(shim)
    assert says_what_to_repair(shim, said, installed.get(shim.library.name, shim.library.name))
    shim.get()


@each_library
def test_canary_of_other_libraries(file):
    words = seen(file.__name__)[2]
    for shim in file.SHIMS:
        name = shim.library.name
        assert says_what_to_repair(
            shim, words[shim.target], f"{name} {importlib.metadata.version(name)}"
        )


def test_canary_a_function_that_is_no_longer_called_is_named(monkeypatch):
    """PyTorch renames what it calls, and keeps the old name for others."""
    shim = next(shim for shim in PATCHED if shim.attribute == "_engine_run_backward")
    monkeypatch.setitem(shim_cases.EXERCISES, shim.attribute, lambda: None)
    (said,) = shim_cases.uncalled([shim])
    assert (
        said.startswith("torch ")
        and "no longer calls _engine_run_backward of torch.autograd" in said
    )
    assert f": repair {shim.function} in utils/shims/torch_dispatch.py" in said


def test_a_simulation_says_it_before_it_begins(monkeypatch):
    """Not as an AttributeError in the midst of a learner's model."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    monkeypatch.delattr(ShardingPropagator, "_propagate_tensor_meta_non_cached")
    with pytest.raises(
        MovedError, match="repair apart_from_shapes in utils/shims/torch_simulated.py"
    ):
        simulate(lambda: (nn.Linear(4, 4), None), lambda model, _: model(torch.ones(1, 4)))


def test_a_simulation_without_the_cache_needs_none_of_its_names(monkeypatch):
    gone = dataclasses.replace(torch_cache.SHIMS[0], target="torch._C:_gone")
    monkeypatch.setattr(result_cache, "SHIMS", (gone,))
    small = lambda: (nn.Linear(4, 4), None), lambda model, _: model(torch.ones(1, 4))
    with pytest.raises(MovedError, match="_gone of torch._C"):
        simulate(*small)
    assert simulate(*small, reuse_results=False).peak_bytes > 0


def test_a_name_that_only_instances_have_is_found() -> None:
    """As FakeTensor.fake_device in torch 2.11, which the class announces and its instances have."""
    library = Library("torch", "2.15.0", "utils/shims/torch_cache.py")
    shim = Shim(library, "utils.shims.shim:Library.name", "f", "why", announced=True)
    assert shim.get() is not None, "the class announces it"
    with pytest.raises(MovedError, match="moved Library.name"):
        dataclasses.replace(shim, announced=False).get()


def test_every_row_is_whole():
    libraries = {shim.library for file in (*FILES, *LIBRARIES) for shim in file.SHIMS}
    assert all(isinstance(library, Library) and library.tried for library in libraries)
    for file in (*FILES, *LIBRARIES):
        for shim in (
            *file.SHIMS,
            *getattr(file, "CUDA_SHIMS", ()),
            *getattr(file, "COMPILER_SHIMS", ()),
        ):
            assert callable(getattr(file, shim.function)), f"{shim.target}: no {shim.function}"
            assert (ROOT / shim.library.file).samefile(file.__file__)
            assert shim.patched <= (shim.attribute in shim_cases.EXERCISES)


ALLOWED = {shim.target for shim in EXTENSION_POINTS}
OUTSIDE = [path for path in sorted((ROOT / "utils").rglob("*.py")) if path.parent.name != "shims"]


def test_private_names_of_other_libraries_are_in_shims_alone():
    found = [
        f"{row.place} {row.name}"
        for path in OUTSIDE
        for row in private_names(path)
        if row.name not in ALLOWED
    ]
    assert found == [], "move it to utils/shims, with a row"


def test_shims_reach_private_names_in_functions_alone():
    paths = sorted((ROOT / "utils" / "shims").glob("*.py"))
    found = [
        f"{row.place} {row.name}" for path in paths for row in private_names(path) if row.at_import
    ]
    assert found == [] and len(paths) > 8


def test_extension_points_are_used():
    used = {row.name for path in OUTSIDE for row in private_names(path)}
    assert used >= ALLOWED


def test_private_operators_are_registered():
    """`torch.ops.aten._...`: part of saved programs, and so kept; all the same, by name."""
    named = set().union(*map(operators, OUTSIDE))
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert len(named) > 8
    assert {name for name in named if name.replace(".", "::") not in registered} == set()


@pytest.mark.parametrize(
    "line",
    [
        "from torch._utils import x",
        "import torch._dynamo",
        "torch._C.x()",
        "tensor._cdata",
        "getattr(model, '_parameters')",
        "mock.patch.object(torch, '_apply', 1)",
        "importlib.import_module('torch._C')",
        "def f():\n    from torch.nn import _reduction",
    ],
)
def test_a_private_name_does_not_pass(line, tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(line)
    assert len(list(private_names(file))) >= 1
    file.write_text(
        "from torch import nn\nnn.Linear\nself._mine\nrow._replace(a=1)\ntorch.ops.aten._x"
    )
    assert list(private_names(file)) == []


WITHOUT = """
import importlib.abc, sys

class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch.distributed.fsdp._fully_shard._fsdp_collectives"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Gone())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "MPLBACKEND": "Agg", "COURSE_SCALE": "tiny"}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_lesson_01_runs_where_fsdp_has_moved():
    lesson = next((ROOT / "notebooks" / "beginner").glob("01*.ipynb"))
    cells = [cell for cell in nbformat.read(lesson, as_version=4).cells if cell.cell_type == "code"]
    found = run("\n\n".join(cell.source for cell in cells) + "\nprint('the end')")
    assert found.returncode == 0 and found.stdout.endswith("the end\n"), found.stderr[-2000:]


def test_where_fsdp_has_moved_a_sharded_model_says_so():
    found = run("from utils.shims.fsdp import noted_buffers\nwith noted_buffers(print): pass")
    assert "moved DefaultAllGather.allocate of torch.distributed.fsdp" in found.stderr
    assert "repair noted_buffers in utils/shims/fsdp.py" in found.stderr


def test_a_model_may_say_what_is_kept_for_it_elsewhere():
    """The protocol that ZeRO's engine uses, by hand: a flat buffer that is no module's."""
    model, flat = nn.Linear(64, 64), torch.ones(1000)
    plain = measure(lambda: model(torch.ones(1, 64)).sum().backward(), model=model, timed_steps=0)
    assert not isinstance(model, KeepsElsewhere)
    model.kept_elsewhere = lambda: {"gradients": [flat]}
    assert isinstance(model, KeepsElsewhere)
    found = measure(lambda: model(torch.ones(1, 64)).sum().backward(), model=model, timed_steps=0)
    assert found.peak_bytes - plain.peak_bytes == flat.nbytes
