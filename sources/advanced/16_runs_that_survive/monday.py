"""What lesson 16 says to do on Monday, run: both ways to save are resumed, and every later loss is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.files import scratch
from utils.lessons.blocks import run_block
from utils.ranks import run_ranks
from utils.ranks.killable import run_killable

STEPS, SAVED = 20, 10
WENT_BACK = (3, 6)


def block_1(text: str) -> None:
    """Two ranks with shards, dropout and a shuffled loader go on bit for bit, past a save that was cut off."""
    with scratch("monday") as folder:
        whole = run_ranks(_by_hand, 2, text, folder, False)
        _cut_off(folder)
        resumed = run_ranks(_by_hand, 2, text, folder, True)
    _compare(whole, resumed)


def block_2(text: str) -> None:
    """The same with accelerate, in one process."""
    # In a process of its own: accelerate loads whatever it finds, such as DeepSpeed.
    with scratch("monday") as folder:
        whole = run_killable(_with_accelerate, text, folder, False, timeout_seconds=60)
        _cut_off(folder / "saves")
        resumed = run_killable(_with_accelerate, text, folder, True, timeout_seconds=60)
    _compare([whole], [resumed])


def _cut_off(folder: Path) -> None:
    """What the first run left, and a save that was cut off beside it."""
    saved = sorted(path.name for path in folder.iterdir())
    assert len(saved) == 2, f"two saves are kept, and not {saved}"
    (folder / "writing").mkdir()
    (folder / "writing" / "half").write_text("")


def _compare(whole: list[list[float]], resumed: list[list[float]]) -> None:
    assert all(len(losses) == STEPS for losses in whole), "the first run does all steps"
    assert len({loss for losses in whole for loss in losses}) > STEPS // 2, (
        "losses differ over steps"
    )
    for rank, (before, after) in enumerate(zip(whole, resumed, strict=True)):
        told = f"rank {rank} went on with {after[:3]}, and not with {before[SAVED : SAVED + 3]}"
        assert after == before[SAVED:], told


def _by_hand(text: str, folder: Path, is_resumed: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    model, rows = _model(), _rows()
    model = fully_shard(model)
    torch.manual_seed(1 + dist.get_rank() + 10 * is_resumed)
    sampler = StatefulDistributedSampler(rows, shuffle=True, drop_last=True)
    names = run_block(text, model=model, folder=folder, **_others(model, rows, sampler))
    step, batches = names["resume"]()
    assert step == SAVED * is_resumed, f"it begins at step {step}"
    return [_step(names, batch, number) for number, batch in _numbered(batches, step)]


def _with_accelerate(text: str, folder: Path, is_resumed: bool) -> list[float]:
    with contextlib.chdir(folder):
        model, rows = _model(), _rows()
        torch.manual_seed(1 + 10 * is_resumed)
        names = run_block(text, model=model, **_others(model, rows, None))
        step = names["resume"]()
        assert step == SAVED * is_resumed, f"it begins at step {step}"
        return [
            _step(names, batch, number) for number, batch in _numbered(iter(names["loader"]), step)
        ]


def _numbered(batches: Iterator[Tensor], step: int) -> Iterator[tuple[int, Tensor]]:
    return zip(range(step + 1, STEPS + 1), batches, strict=False)


def _step(names: dict[str, Any], batch: Tensor, number: int) -> float:
    loss = (names["model"](batch) - batch.sum(1, keepdim=True)).square().mean()
    names["optimizer"].zero_grad()
    loss.backward()
    names["optimizer"].step()
    names["schedule"].step()
    if number in WENT_BACK:  # the last save is not the highest step, and a step is saved twice
        names["save"](STEPS)
    if number == SAVED:
        names["save"](number)
    return loss.item()


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1))


def _rows() -> Any:
    return list(torch.randn(240, 8, generator=torch.Generator().manual_seed(0)))


def _others(model: nn.Module, rows: Any, sampler: Any) -> dict[str, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order: dict[str, Any] = {"sampler": sampler}
    if sampler is None:
        order = {"shuffle": True, "generator": torch.Generator().manual_seed(0)}
    return {
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "loader": StatefulDataLoader(rows, batch_size=4, **order),
    }
