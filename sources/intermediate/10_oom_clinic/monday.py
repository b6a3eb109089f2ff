"""Runs the lines of lesson 10's last cell."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from utils.lessons.blocks import run_block
from utils.ranks import run_ranks

STEPS, DIES_IN = 56, 5
FIRST, SECOND = "step3_rank0.pickle", "step53_rank0.pickle"
ATTACH = "_cuda_attach_out_of_memory_observer"
_STATS = {"num_alloc_retries": 0, "inactive_split_bytes.all.current": 0}
_OBSERVERS: list[Callable[[int, int, int, int], None]] = []
Loss = Callable[[nn.Module, Tensor], Tensor]


def block_1(text: str) -> None:
    """It makes `save` and `log`, and attaches the first where the allocator fails."""
    with _counted_on_the_cpu(), contextlib.redirect_stdout(io.StringIO()) as seen:
        names = run_block(text)
        assert [names["save"]] == _OBSERVERS, "what is called at the request that fails"
        names["log"]("here")
    assert re.fullmatch(
        r"rank 0, here: [\d,]+ MiB alive, .* reserved and idle, 0 of it in pieces, 0 retries\n",
        seen.getvalue(),
    )
    _judge_ranks(text)


def block_2(text: str) -> None:
    """A leak is printed as bytes that grow, a healthy run as a level; the dumps come before death."""
    _judge(lambda loss_of: _by_hand(text, loss_of), [(512, 64)] * STEPS)


def block_3(text: str) -> None:
    """The same around a Trainer, in a process of its own: Trainer loads DeepSpeed where it is."""
    run_ranks(_judge_trainer, 1, text)


def block_4(text: str) -> None:
    """It names the leak's line first, where weights are ten times as large as all that it kept."""
    made_by = _made_by()
    model = {f"model.py:{line} __init__": 10 * 2**20 for line in range(12)}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, kept in ((FIRST, 3), (SECOND, 53)):
            held = _snapshot_of({**model, "train.py:7 loss_of": kept * 2**14})
            assert made_by(held).most_common(10) == list(model.items())[:10], "weights come first"
            bare = {"state": "active_allocated", "size": 5, "frames": []}  # as backward makes them
            held["segments"][0]["blocks"].append(bare)
            unknown = [key for key in made_by(held) if key.startswith("no Python stack")]
            assert [made_by(held)[key] for key in unknown] == [5], "bytes without a stack are told"
            Path(name).write_bytes(pickle.dumps(held))
        with contextlib.redirect_stdout(io.StringIO()) as seen:
            run_block(text, made_by=made_by)
    assert seen.getvalue() == f"('train.py:7 loss_of', {50 * 2**14})\n", seen.getvalue()


def _snapshot_of(made: dict[str, int]) -> dict[str, Any]:
    """A snapshot as PyTorch writes it: each place made one block, from within PyTorch; another is free."""
    inner = {"filename": "site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
    blocks: list[dict[str, Any]] = [{"state": "inactive", "size": 2**20, "frames": []}]
    for place, size in made.items():
        where, name = place.split()
        filename, line = where.split(":")
        frames = [inner, {"filename": filename, "line": int(line), "name": name}]
        blocks.append({"state": "active_allocated", "size": size, "frames": frames})
    return {"segments": [{"blocks": blocks}]}


def _made_by() -> Callable[[dict[str, Any]], Counter[str]]:
    """The function of section 5, as the page has it."""
    page = (Path(__file__).parent / "lesson.py").read_text(encoding="utf-8")
    start = "def made_by("
    text = start + page.partition(start)[2].partition("\n\n\n")[0]
    return run_block(text, Counter=Counter)["made_by"]


def _judge_ranks(text: str) -> None:
    """Each rank writes a file and lines of its own."""
    with _heard() as (folder, seen):
        for rank in "01":
            with mock.patch.dict("os.environ", RANK=rank):
                names = run_block(text)
                names["log"]("here")
                names["dump"]("step3")
                names["save"](0, 1, 1, 0)
        left = sorted(path.name for path in folder.iterdir())
    expected = [f"{name}_rank{rank}.pickle" for name in ("oom", "step3") for rank in "01"]
    assert left == expected, f"files of two ranks: {left}"
    assert re.findall(r"^rank (\d), here", seen.getvalue(), re.M) == ["0", "1"], seen.getvalue()


@contextlib.contextmanager
def _heard() -> Iterator[tuple[Path, io.StringIO]]:
    """A folder to work in, counted on the CPU, and what is printed there."""
    seen = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        _counted_on_the_cpu(),
        contextlib.redirect_stdout(seen),
    ):
        yield Path(folder), seen


def _judge_trainer(text: str) -> None:
    _judge(lambda loss_of: _by_trainer(text, loss_of), [[(512, 64)]] * STEPS)
    with _heard() as (_, seen):
        _by_trainer(text, _loss_of, validate=True)
    told = re.findall(
        r"^rank 0, validation after step \d+, largest batch \((\d+), 64\)", seen.getvalue(), re.M
    )
    assert told == ["256"], f"a validation has a line of its own, with its batch: {told}"


def _once() -> str:
    """The page's first block, which the others build on."""
    page = (Path(__file__).parent / "lesson.py").read_text(encoding="utf-8")
    last = page.rpartition("## On Monday")[2].replace("\n# ", "\n").replace("\n#\n", "\n\n")
    return last.partition("```python\n")[2].partition("```")[0]


def _judge(run: Callable[[Loss], None], shapes: list[Any]) -> None:
    healthy, kept, seen = _printed(run, _loss_of)
    assert kept == [FIRST, SECOND], f"two snapshots, to be subtracted: {kept}"
    leaking, _, _ = _printed(run, _leaking())
    assert len(healthy) == len(leaking) == STEPS, f"{len(healthy)} lines for {STEPS} steps"
    assert max(healthy[1:]) <= healthy[1] + 1, f"a healthy run seems to grow: {healthy} MiB"
    assert all(later > sooner for sooner, later in pairwise(leaking)), f"no leak: {leaking} MiB"
    told = re.findall(r"^rank 0, step \d+, batch(?:es)? (.*?): [\d,]+ MiB", seen, re.MULTILINE)
    assert told == [str(shape) for shape in shapes], f"the shapes of batches: {told}"
    died, dumped, _ = _printed(run, _dying(), dies=True)
    left = sorted([FIRST, "oom_rank0.pickle"])
    assert len(died) == DIES_IN and dumped == left, f"{len(died)}, {dumped} dumped"


def _printed(
    run: Callable[[Loss], None], loss_of: Loss, *, dies: bool = False
) -> tuple[list[int], list[str], str]:
    """MiB alive after each step, what lies in the folder after the run, and all that was printed."""
    gc.collect()  # what the run before left would else be counted, and go in the middle of this one
    with _heard() as (folder, seen):
        try:
            run(loss_of)
            assert not dies, "an out-of-memory error did not come through"
        except torch.OutOfMemoryError:
            assert dies, "an out-of-memory error came from nowhere"
        left = sorted(entry.name for entry in Path(folder).glob("*.pickle"))
    alive = re.findall(r"^rank 0, step .*: ([\d,]+) MiB alive", seen.getvalue(), re.MULTILINE)
    return [int(size.replace(",", "")) for size in alive], left, seen.getvalue()


@contextlib.contextmanager
def _counted_on_the_cpu() -> Iterator[None]:
    """The GPU's counters and its recorder, by what tensors of the CPU hold: the same everywhere."""
    cuda, memory = torch.cuda, torch.cuda.memory
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cuda, "memory_allocated", _alive_bytes))
        for name in ("max_memory_allocated", "memory_reserved"):
            stack.enter_context(mock.patch.object(cuda, name, return_value=0))
        stack.enter_context(mock.patch.object(cuda, "memory_stats", return_value=_STATS))
        stack.enter_context(mock.patch.object(cuda, "reset_peak_memory_stats"))
        stack.enter_context(mock.patch.object(memory, "_record_memory_history"))
        stack.enter_context(mock.patch.object(torch._C, ATTACH, _OBSERVERS.append, create=True))
        stack.callback(_OBSERVERS.clear)
        stack.enter_context(
            mock.patch.object(memory, "_dump_snapshot", lambda name: Path(name).touch())
        )
        yield


def _alive_bytes() -> int:
    """Of all tensors that Python holds on the CPU, each storage once."""
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in found if each.device.type == "cpu"]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _leaking() -> Loss:
    """A loss whose outputs, 2 MiB a step, are kept for a log."""
    kept: list[Tensor] = []

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        kept.append(model(batch))
        return kept[-1].square().mean()

    return loss_of


def _dying() -> Loss:
    calls = iter(range(STEPS))

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        if next(calls) == DIES_IN:
            for observer in _OBSERVERS:  # the allocator calls them, then raises
                observer(0, 1, 1, 0)
            raise torch.OutOfMemoryError("CUDA out of memory, say")
        return _loss_of(model, batch)

    return loss_of


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 1024)


def _by_hand(text: str, loss_of: Loss) -> None:
    model, loader = _layer(), [torch.ones(512, 64) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters())
    run_block(_once() + text, model=model, optimizer=optimizer, loader=loader, loss_of=loss_of)


def _by_trainer(text: str, loss_of: Loss, *, validate: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "out",
        max_steps=STEPS,
        per_device_train_batch_size=512,
        per_device_eval_batch_size=256,
        eval_strategy="steps" if validate else "no",
        eval_steps=STEPS,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    rows = _Rows()
    trainer = Trainer(
        model=_Reported(loss_of), args=arguments, train_dataset=rows, eval_dataset=rows
    )
    run_block(_once() + text, trainer=trainer)


class _Reported(nn.Module):
    """A model as Trainer takes it: it gives its loss."""

    def __init__(self, loss_of: Loss) -> None:
        super().__init__()
        self.layer, self._loss_of = _layer(), loss_of

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self._loss_of(self.layer, inputs)}


class _Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 512 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.ones(64)}
