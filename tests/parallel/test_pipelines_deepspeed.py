"""DeepSpeed's pipeline engine trains as one process does."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from test_pipelines import MICRO_BATCHES, STEPS
from torch import nn

from utils.ranks import run_ranks
from utils.techniques.deepspeed import deepspeed_missing, load_deepspeed

# DeepSpeed ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer() for _ in range(4)]


def pairs():
    """Micro-batches of all steps, with targets so large that a norm of 1.0 would clip."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS * MICRO_BATCHES):
        x, y = torch.randn(2, 2, 16, generator=draw)
        yield x, 3 * y


def deepspeed_pipeline():
    """A worker: 20 losses, and this stage's gradients of the first step."""
    deepspeed, first = load_deepspeed(), []
    from deepspeed.pipe import PipelineModule

    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        net = PipelineModule(
            layers=layers(), num_stages=2, loss_fn=F.mse_loss, partition_method="uniform"
        )
        engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=net.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "gradient_clipping": 0.0,
                "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            },
        )

        def note(*_: object) -> None:
            if not first:
                first.append(torch.cat([p.grad.flatten().clone() for p in net.parameters()]))

        engine.optimizer.register_step_pre_hook(note)
        data = pairs()
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    return losses, first[0]


def plain():
    net = nn.Sequential(*layers())
    optimizer, data = torch.optim.SGD(net.parameters(), lr=0.05), pairs()
    losses, first = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            x, y = next(data)
            loss = F.mse_loss(net(x), y) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        if first is None:
            first = torch.cat([p.grad.flatten().clone() for p in net.parameters()])
        optimizer.step()
    return losses, first


@pytest.mark.deepspeed
def test_deepspeed_s_engine_trains_as_one_process_does() -> None:
    """In fp32 alone: its engine refuses to reduce fp64 gradients."""
    if problem := deepspeed_missing():
        pytest.skip(problem)
    load_deepspeed()
    found, (losses, gradient) = run_ranks(deepspeed_pipeline, 2), plain()
    assert gradient.norm() > 1, "a clip at 1.0 would show"
    for row, _ in found:
        assert row == pytest.approx(losses, rel=0, abs=1e-5)
    both = torch.cat([part for _, part in found])
    assert (both - gradient).norm() / gradient.norm() < 1e-6
