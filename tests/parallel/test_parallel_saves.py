"""Saves of exported scripts: a resumed run loses what the whole one loses, on ranks that change."""

from __future__ import annotations

import os
import random
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from export_cases import DEEP, STEPS, script, tiny

from utils.parallel import Saves, check_versions, saved_steps
from utils.parallel import saves as module
from utils.parallel.checkpoint_folder import list_checkpoints
from utils.parallel.safe_checkpoint import CheckpointError
from utils.ranks import RankError, run_ranks

CASES = {
    "ZeRO-3": tiny(dp=4, zero_stage=3, micro_batch=2),
    "TP x PP": tiny(DEEP, tp=2, pp=2, virtual_stages=2, micro_batch=8),
}


def train(text: str, steps: int, folder: str | None, every: int = STEPS) -> list[float]:
    return script(text).train(torch.device("cpu"), steps, None, folder, every)


def _whole_and_in_parts(texts: dict[str, str], folder: str) -> dict[str, tuple[list[float], ...]]:
    found = {}
    for name, text in texts.items():
        place = os.path.join(folder, name.replace(" ", ""))
        whole, first = train(text, 2 * STEPS, None), train(text, STEPS, place)
        found[name] = (whole, first, train(text, 2 * STEPS, place))
    return found


def _told_to_stop(text: str, folder: str) -> tuple[int | None, int]:
    """Rank 1 alone gets the signal, while it reads the batch of step 1."""
    module.note_signals()
    runs = script(text)
    batch = runs.batch

    def told(step: int):
        if step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return batch(step)

    runs.batch = told
    try:
        runs.train(torch.device("cpu"), 4, None, folder, 0)
    except SystemExit as end:
        return end.code, dist.get_rank()
    return None, dist.get_rank()


def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path):
    texts = {name: case.python for name, case in CASES.items()}
    for name, (whole, first, rest) in run_ranks(
        _whole_and_in_parts, 4, texts, str(tmp_path), timeout_seconds=300
    )[0].items():
        assert first + rest == pytest.approx(whole, rel=1e-7), name
        assert len(rest) == STEPS, name
        kept = os.listdir(tmp_path / name.replace(" ", ""))
        assert sorted(kept) == [f"step-{STEPS:08d}-save-1", f"step-{2 * STEPS:08d}-save-2"], (
            f"{name}: two whole saves are kept, and no draft"
        )


def test_a_signal_on_one_rank_saves_and_ends_all(tmp_path):
    text = CASES["ZeRO-3"].python
    ends = run_ranks(_told_to_stop, 4, text, str(tmp_path), timeout_seconds=200)
    assert ends == [(module.STOPPED, rank) for rank in range(4)], "all ranks end after one step"
    assert saved_steps(tmp_path) == 2


def test_without_a_folder_nothing_is_saved():
    model = torch.nn.Linear(2, 2)
    saves = Saves(None, [model], torch.optim.AdamW(model.parameters()))
    assert (saves.first, list(saves.kept([1.0, 2.0]))) == (0, [1.0, 2.0])


def _trained(folder: Path, steps: int) -> tuple[torch.nn.Module, Saves]:
    """A model after some steps, saved after each, and its saves."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saves = Saves(str(folder), [model], optimizer, every=1)

    def losses():
        for _ in range(saves.first, steps):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 8)).square().sum()
            loss.backward()
            optimizer.step()
            yield loss.item()

    list(saves.kept(losses()))
    return model, saves


def _flipped(folder: str, flips: int) -> list[str]:
    """What came of each flip of one bit in the last save, of one before it, and of the only one."""
    chance, found = random.Random(35), []
    kept = Path(folder)
    weights = [_trained(kept, steps)[0].weight.detach().clone() for steps in (1, 2)]
    files = sorted(file for path in list_checkpoints(kept)[:1] for file in path.iterdir())
    for number in range(flips):
        file = chance.choice(files)
        whole = file.read_bytes()
        changed, place = bytearray(whole), chance.randrange(len(whole))
        changed[place] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model, saves = _trained(kept, 0)
        is_right = saves.first == 1 and torch.equal(model.weight, weights[0])
        found.append("said" if is_right and len(said) == 1 else f"silent: {file.name} {place}")
        file.write_bytes(whole)
        assert _trained(kept, 0)[1].first == 2, number
    return found


def test_no_flipped_bit_loads_in_silence(tmp_path):
    """The save before is taken, with a warning; PyTorch's own load takes half of them as they are."""
    (found,) = run_ranks(_flipped, 1, str(tmp_path), 200, timeout_seconds=200)
    assert found == ["said"] * 200


def _damaged(folder: str) -> str:
    kept = Path(folder)
    _trained(kept, 2)
    for path in list_checkpoints(kept):
        (path / ".metadata").unlink()
    try:
        _trained(kept, 3)
    except CheckpointError as error:
        return str(error)
    return "it began anew"


def test_a_run_does_not_begin_anew_beside_damaged_saves(tmp_path):
    (said,) = run_ranks(_damaged, 1, str(tmp_path))
    assert "holds no whole checkpoint (step-00000002-save-2: .metadata is missing; step-" in said


def _older_torch(version: str) -> None:
    if dist.get_rank() == 1:
        torch.__version__ = version
    check_versions()


def test_nodes_that_disagree_on_the_version_are_named():
    with pytest.raises(RankError) as raised:
        run_ranks(_older_torch, 2, "2.11.0")
    assert "different versions of PyTorch: 2.11.0 on " in str(raised.value)
    assert all(failure.kind == "raised" for failure in raised.value.failures.values())
    run_ranks(_older_torch, 2, str(torch.__version__))
