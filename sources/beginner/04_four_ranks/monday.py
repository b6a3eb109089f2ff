"""The last cell's blocks: two ranks that train as their reader's would, beside one process."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from utils.lessons.blocks import run_block
from utils.memory import measure
from utils.ranks import run_ranks

ITEMS = 16


def block_1(text: str) -> None:
    """DDP: two ranks end with the weights of one process, and share the items."""
    found = run_ranks(_by_hand, 2, text)
    assert torch.equal(found[0], found[1]), "the ranks hold different weights"
    assert not torch.allclose(found[0], _flat(_model())), "nothing was learned"
    # One batch of all items, in any order, has one gradient.
    torch.testing.assert_close(found[0], _alone(), msg="two ranks are not one process")
    assert run_ranks(_shares, 2, text) == [(2, ITEMS // 4)] * 2, "two micro-batches are one batch"


def block_2(text: str) -> None:
    """The gradient test: rounding alone under DDP, much more where shares weigh unequally."""
    right = run_ranks(_tested, 2, text, False)
    wrong = run_ranks(_tested, 2, text, True)
    assert max(right) < 1e-12, f"DDP is right, and the test says {right}"
    assert min(wrong) > 1e-2, f"losses are sums over shares, and the test says {wrong}"
    copies = run_ranks(_copies, 2, text)
    assert all(abs(held - 5) < 0.2 for held in copies), f"not five copies, but {copies}"


def _texts() -> tuple[Tensor, Tensor]:
    """Two texts of five tokens, fp64; of the second three targets count for nothing."""
    numbers = torch.Generator().manual_seed(2)
    inputs = torch.randn(2, 5, 6, generator=numbers).double()
    targets = torch.randint(3, (2, 5), generator=numbers)
    targets[1, 2:] = -100
    return inputs, targets


def _by_tokens(text: str) -> Tensor:
    names = run_block(text, **_made(torch.device("cpu")))
    layer = _model().double()
    mine = [part[dist.get_rank()][None] for part in _texts()]
    model = DistributedDataParallel(layer)  # must live until backward is over
    names["loss_of"](model, mine).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


def block_3(text: str) -> None:
    """A loss over tokens: two ranks with unequal counts have the gradient of all tokens at once."""
    found = run_ranks(_by_tokens, 2, text)
    layer = _model().double()
    inputs, targets = _texts()
    F.cross_entropy(layer(inputs).flatten(0, 1), targets.flatten()).backward()
    assert layer.weight.grad is not None
    for each in found:
        torch.testing.assert_close(each, layer.weight.grad, rtol=1e-12, atol=1e-12)


def block_4(text: str) -> None:
    """A recorded step of each rank, in which it sends, and no gradients left."""
    with tempfile.TemporaryDirectory() as folder:
        left = run_ranks(_recorded, 2, text, folder)
        assert left == [0, 0], "gradients are left"
        for rank in (0, 1):
            trace = Path(folder, f"step-{rank}.json").read_text(encoding="utf-8")
            assert "all_reduce" in trace, "the file does not show what is sent"


def block_5(text: str) -> None:
    """The loop: accumulates one process's step, goes on where it stopped; faults of a loop stop it."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_looped, 2, text, folder, 1)[0]
        torch.testing.assert_close(saved["model"], _steps_alone(1))
        assert saved["epoch"] == 0 and saved["optimizer"]["param_groups"]
        assert os.listdir(folder) == ["checkpoint.pt"], "a half of a save is left"
        resumed = run_ranks(_looped, 2, text, folder, 2)[0]
    assert resumed["epoch"] == 1, "the second start did not go on after the first's epoch"
    torch.testing.assert_close(resumed["model"], _steps_alone(2))
    for fault, words in (("around", "than rank 0': 1"), ("whole", f"again': {ITEMS}")):
        assert all(words in said for said in run_ranks(_stopped, 2, text, fault)), fault


def block_6(text: str) -> None:
    """Trainer: two ranks log the loss of one process's batch, and take its step."""
    found = run_ranks(_by_trainer, 2, text)
    assert torch.equal(found[0][1], found[1][1]), "the ranks hold different weights"
    model = _model()
    loss = _loss(model, *_tensors())
    assert abs(found[0][0] - loss.item()) < 1e-3, f"{found[0][0]} logged, {loss.item()} alone"
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as Trainer does by itself
    torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0).step()
    torch.testing.assert_close(found[0][1], _flat(model), rtol=0, atol=1e-6)


def _steps_alone(count: int) -> dict[str, Tensor]:
    """The weights of one process after steps with all items."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        _loss(model, *_tensors()).backward()
        optimizer.step()
    return dict(model.state_dict())


def _by_hand(text: str) -> Tensor:
    dist.destroy_process_group()  # the reader's script begins without one
    names = run_block(text, model=_model(), dataset=_data(), batch_size=ITEMS, accumulate=1)
    names["sampler"].set_epoch(0)
    _step(names["model"], names["loader"])
    return _flat(names["model"]).cpu()


def _shares(text: str) -> tuple[int, int]:
    """With two micro-batches a step: how many this rank takes, and the items of each."""
    dist.destroy_process_group()
    given = {"dataset": _data(), "batch_size": ITEMS, "accumulate": 2}
    loader = run_block(text, model=_model(), **given)["loader"]
    return len(loader), loader.batch_size


def _tested(text: str, summed: bool) -> float:
    """What the test says on this rank; with a loss that is a sum over items, DDP's mean is wrong."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    network = nn.Sequential(_model(), nn.BatchNorm1d(3), nn.Dropout()).to(device)
    model = DistributedDataParallel(network)

    def loss_of(network: nn.Module, part: list[Tensor]) -> Tensor:
        inputs, targets = part
        return F.cross_entropy(network(inputs), targets, reduction="sum" if summed else "mean")

    given = {"dataset": _data(), "batch_size": ITEMS, "loss_of": loss_of}
    names = run_block(text, model=model, **given, **_made(device))
    assert model.training and all(p.grad is None for p in model.parameters()), "it leaves traces"
    kept = [each for each in names.values() if isinstance(each, Tensor | nn.Module)]
    assert kept == [model], "it keeps copies of the model or of gradients"
    return names["apart"]


def _copies(text: str) -> float:
    """How many fp64 copies of the parameters the test takes at its peak, beside the model that it tests."""
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    model = DistributedDataParallel(layers)
    data = TensorDataset(torch.randn(ITEMS, 300), torch.randint(300, (ITEMS,)))
    given = {"model": model, "dataset": data, "batch_size": ITEMS}
    given |= {"loss_of": lambda network, part: _loss(network, *part)}
    copy_bytes = sum(8 * parameter.numel() for parameter in layers.parameters())
    found = measure(
        lambda: run_block(text, **given, **_made(torch.device("cpu"))),
        model=model,
        optimizer=torch.optim.SGD(layers.parameters(), lr=0.0),
        unit="items",
        warmup_steps=1,
        timed_steps=0,
    )
    return (
        found.peak_bytes / copy_bytes - 1
    )  # its own weights and DDP's buckets, both fp32, are one


def _made(device: torch.device) -> dict[str, Any]:
    """What the first block has imported and made."""
    made = {
        "torch": torch,
        "dist": dist,
        "copy": copy,
        "os": os,
        "device": device,
        "contextlib": contextlib,
    }
    made |= {"DataLoader": DataLoader, "DistributedDataParallel": DistributedDataParallel}
    return made | {"rank": dist.get_rank(), "ranks": dist.get_world_size()}


def _looped(text: str, folder: str, epochs: int, fault: str = "") -> dict[str, Any]:
    """Two micro-batches a rank, one step an epoch, in a folder of both ranks; what rank 0 saves."""
    data = _data()
    sampler = DistributedSampler(data)
    accumulate = 2  # one step takes all items
    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)

    def loss_of(network: DistributedDataParallel, part: list[Tensor]) -> Tensor:
        return _loss(network.module if fault == "around" else network, *part)

    given: dict[str, Any] = {"model": model, "dataset": data, "sampler": sampler, "epochs": epochs}
    given |= {"batch_size": ITEMS, "accumulate": accumulate, "amp": False, "loss_of": loss_of}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given |= {"optimizer": optimizer, "check_ranks": _check()}
    share = None if fault == "whole" else sampler
    loader = DataLoader(data, ITEMS // (dist.get_world_size() * accumulate), sampler=share)
    rank = dist.get_rank()  # the block ends the group
    with contextlib.chdir(folder):
        run_block(text, loader=loader, **given, **_made(torch.device("cpu")))
        return torch.load("checkpoint.pt") if rank == 0 else {}


def _stopped(text: str, fault: str) -> str:
    """What the loop says when it stops at a fault."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _looped(text, folder, 1, fault)
        except AssertionError as error:
            return str(error)
    return "nothing"


def _check() -> Any:
    """`check_ranks`, as it stands in the lesson."""
    lesson = Path(__file__).with_name("lesson.py").read_text(encoding="utf-8")
    text = lesson[lesson.index("def check_ranks(") : lesson.index("def real_step(")]
    names: dict[str, Any] = {"torch": torch, "dist": dist}
    exec(compile(text, "check_ranks", "exec"), names)
    return names["check_ranks"]


def _alone() -> Tensor:
    model = _model()
    _step(model, DataLoader(_data(), ITEMS))
    return _flat(model)


def _step(model: nn.Module, loader: DataLoader) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in loader:
        _loss(model, inputs.to(device), targets.to(device)).backward()
        optimizer.step()


def _recorded(text: str, folder: str) -> int:
    """How many parameters of this rank have a gradient after the block."""
    model = DistributedDataParallel(_model())
    given = {"loader": DataLoader(_data(), 4), "loss_of": lambda net, part: _loss(net, *part)}
    with contextlib.chdir(folder):
        run_block(text, model=model, **given, **_made(torch.device("cpu")))
    return sum(p.grad is not None for p in model.parameters())


def _by_trainer(text: str) -> tuple[float, Tensor]:
    """The loss that Trainer logs, and its weights after one step."""
    dist.destroy_process_group()
    os.environ["ACCELERATE_USE_CPU"] = "true"  # without a GPU Trainer asks for that
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        given = {"dataset": _Rows(), "batch_size": ITEMS, "accumulate": 2}
        names = run_block(text, model=_Classifier(), **given)
        trainer = names["trainer"]
    dist.barrier()  # rank 0 holds Trainer's store: it leaves when all are done
    dist.destroy_process_group()
    return trainer.state.log_history[0]["loss"], _flat(trainer.model).cpu()


class _Classifier(nn.Module):
    """A model as Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": _loss(self.layer, inputs, labels)}


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = _tensors()
        return {"inputs": inputs[index], "labels": labels[index]}


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def _tensors() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(ITEMS, 6, generator=numbers)
    return inputs, torch.randint(3, (ITEMS,), generator=numbers)


def _data() -> TensorDataset:
    return TensorDataset(*_tensors())


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
