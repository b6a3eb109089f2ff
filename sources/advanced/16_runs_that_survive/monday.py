"""What lesson 16 says to do on Monday, run: both ways to save are resumed, and every later loss is the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.files import scratch
from utils.lessons.blocks import run_block
from utils.ranks import RankError, run_ranks
from utils.ranks.killable import run_killable

STEPS, SAVED = 20, 10
SAVES = 8
WENT_BACK = (3, 6)


def block_1(text: str) -> None:
    """Two ranks with shards, dropout and a shuffled loader go on bit for bit, past a save that was cut off.

    As many saves stay as were asked for, a damaged one is passed over, and another number of ranks goes on with the weights and moments.
    """
    with scratch("monday") as folder:
        whole = run_ranks(_by_hand, 2, text, folder, False)
        _cut_off(folder)
        resumed = run_ranks(_by_hand, 2, text, folder, True)
        _compare(whole, resumed)
        assert run_ranks(_past_damage, 2, text, folder)[0] == STEPS, (
            "the save before the damaged one"
        )
        same = run_ranks(_resharded, 2, text, folder)[0]
        for ranks in (1, 3):
            found = run_ranks(_resharded, ranks, text, folder)[0]
            assert found == same, f"{ranks} ranks go on with {found[0][:3]}, and not {same[0][:3]}"
        (aside,) = folder.glob("aside-*")  # else it would count among the last two that stay
        (stays,) = folder.glob("*.step-*")
        assert stays.name.endswith(f"-{STEPS}"), f"{stays.name} stays beside {aside.name}"
        for keep in range(1, 7):
            kept = run_ranks(_kept, 2, text, folder / f"keep-{keep}", keep, 100)[0]
            assert kept == list(range(SAVES - keep + 1, SAVES + 1)), f"keep={keep} leaves {kept}"
        assert run_ranks(_kept, 2, text, folder / "every", 2, 3)[0] == [3, 6, 7, 8], (
            "one of three stays"
        )
        for place, step in ((1, 2), (2, 2), (3, 3)):  # the third call comes after the new name
            killed = folder / f"killed-{place}"
            with contextlib.suppress(RankError):
                run_ranks(_killed, 2, text, killed, place)
            assert run_ranks(_resumed_small, 2, text, killed)[0] == step, f"killed at {place}"
        newest = sorted(killed.glob("*.step-*"))[-1]
        next(newest.glob("sums-1-*")).write_text("{")
        assert run_ranks(_resumed_small, 2, text, killed)[0] == 2, "past sums that are damaged"
        for path in killed.glob("*.step-*/sums-0-*"):
            path.unlink()
        told = run_ranks(_refused, 2, text, killed)[0]
        assert "is whole" in told, f"all are damaged: {told}"


def block_2(text: str) -> None:
    """The same with accelerate, in one process."""
    # In a process of its own: accelerate loads whatever it finds, such as DeepSpeed.
    with scratch("monday") as folder:
        whole = run_killable(_with_accelerate, text, folder, False, timeout_seconds=60)
        _cut_off(folder / "saves")
        resumed = run_killable(_with_accelerate, text, folder, True, timeout_seconds=60)
    with scratch("monday") as folder:
        kept = run_killable(_kept_by_accelerate, text, folder, timeout_seconds=60)
    assert kept == [1, 2, 3, 4, 5, 6], f"keep=1 to 6 leave {kept}"
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

    model, rows = _model(), _rows()[:64]  # 8 batches a rank: the save lies in the second epoch
    model = fully_shard(model)
    torch.manual_seed(1 + dist.get_rank() + 10 * is_resumed)
    sampler = StatefulDistributedSampler(rows, shuffle=True, drop_last=True)
    names = run_block(text, model=model, folder=folder, **_others(model, rows, sampler))
    step, batches = names["resume"]()
    assert step == SAVED * is_resumed, f"it begins at step {step}"
    batches = _epochs(names["loader"], batches)
    losses = [_step(names, batch, number) for number, batch in _numbered(batches, step)]
    names["finish"]()
    assert not names["must_stop"](), "nobody was asked to stop"
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert names["must_stop"](), "what one rank was sent stops all of them"
    dist.barrier()  # rank 0 names what was saved last
    return losses


def _epochs(loader: Any, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield from rest
    for epoch in itertools.count(loader.sampler.epoch + 1):
        loader.sampler.set_epoch(epoch)
        yield from loader


def _small(text: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    model, rows = _model(), _rows()
    return run_block(text, model=model, folder=folder, **_others(model, rows, None))


def _past_damage(text: str, folder: Path) -> int:
    if dist.get_rank() == 0:
        newest = sorted(folder.glob("*.step-*"))[-1]
        written = next(newest.glob("__1_*.distcp"))  # another rank's than the one that decides
        data = bytearray(written.read_bytes())
        data[len(data) // 2] ^= 1
        written.write_bytes(data)
    dist.barrier()
    return int(_sharded(text, folder)["resume"]()[0])


def _resharded(text: str, folder: Path) -> tuple[list[float], int]:
    """Sums of the whole weights and moments that a resume finds, and its step."""
    names = _sharded(text, folder)
    step, batches = names["resume"]()
    next(batches)
    tensors: list[Any] = list(names["model"].parameters())
    tensors += [
        names["optimizer"].state[p][key] for p in tensors for key in ("exp_avg", "exp_avg_sq")
    ]
    return [tensor.full_tensor().double().sum().item() for tensor in tensors], step


def _sharded(text: str, folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    model, rows = _model(), _rows()
    sampler = StatefulDistributedSampler(rows, shuffle=True, drop_last=True)
    model = fully_shard(model)
    return run_block(text, model=model, folder=folder, **_others(model, rows, sampler))


def _kept(text: str, folder: Path, keep: int, keep_every: int) -> list[int]:
    names = _small(text, folder)
    for step in range(SAVES):
        names["save"](step, keep=keep, keep_every=keep_every)
    names["finish"]()
    dist.barrier()
    return [names["number"](path) for path in names["whole"]()]


def _killed(text: str, folder: Path, place: int) -> None:
    """Rank 0 dies in the thread of the third save, at one of its calls of `to_disk`."""
    names = _small(text, folder)
    for step in (1, 2):
        names["save"](step)
    names["wait"]()
    calls = itertools.count(1)

    def killing(path: Path) -> None:
        if dist.get_rank() == 0 and next(calls) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    names["to_disk"] = killing
    names["save"](3)
    names["finish"]()
    dist.barrier()


def _resumed_small(text: str, folder: Path) -> int:
    return int(_small(text, folder)["resume"]()[0])


def _refused(text: str, folder: Path) -> str:
    try:
        return f"resumed at {_small(text, folder)['resume']()[0]}"
    except RuntimeError as error:
        return str(error)


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


def _kept_by_accelerate(text: str, folder: Path) -> list[int]:
    with contextlib.chdir(folder):
        model = _model()
        names = run_block(text, model=model, **_others(model, _rows(), None))
        found = []
        for keep in range(1, 7):
            shutil.rmtree("saves", ignore_errors=True)
            for step in range(SAVES):
                names["save"](step, keep=keep)
            found.append(len(list(Path("saves").glob("*.step-*"))))
        return found


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
