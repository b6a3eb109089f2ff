"""The small run of lab 16: what it saves, and what of that can be found again without training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROWS, BATCH, WIDTH, EPOCH_STEPS = 100, 16, 24, 7  # the last batch of an epoch has 4 rows
PIECES = ("schedule", "order", "random")
MORE_STEPS = 12


class LabRun:
    """One process, dropout, warm-up, and an order of rows that is drawn for each epoch."""

    def __init__(self) -> None:
        data = torch.Generator().manual_seed(0)
        self.rows = torch.randn(ROWS, 8, generator=data)
        self.targets = self.rows.sum(1, keepdim=True)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.shuffle = torch.Generator().manual_seed(1)  # draws one order for each epoch
        self.dropout = torch.Generator().manual_seed(2)  # draws one number for each row and unit
        self.order, self.place = torch.empty(0, dtype=torch.long), 0

    @staticmethod
    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 20) * 0.99**step

    def next_rows(self) -> Tensor:
        if self.place >= len(self.order):  # an epoch is over
            self.order, self.place = torch.randperm(ROWS, generator=self.shuffle), 0
        chosen = self.order[self.place : self.place + BATCH]
        self.place += BATCH
        return chosen

    def step(self) -> float:
        chosen = self.next_rows()
        keep = torch.rand(len(chosen), WIDTH, generator=self.dropout) > 0.2
        hidden = self.model[1](self.model[0](self.rows[chosen])) * keep / 0.8
        loss = F.mse_loss(self.model[2](hidden), self.targets[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def pieces(self) -> dict[str, Any]:
        order = {
            "shuffle": self.shuffle.get_state(),
            "order": self.order.clone(),
            "place": self.place,
        }
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {
            "model": weights,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": order,
            "random": self.dropout.get_state(),
        }

    def load(self, pieces: dict[str, Any]) -> None:
        self.model.load_state_dict(pieces["model"])
        self.optimizer.load_state_dict(pieces["optimizer"])
        self.schedule.load_state_dict(pieces["schedule"])
        self.shuffle.set_state(pieces["order"]["shuffle"])
        self.order, self.place = pieces["order"]["order"].clone(), pieces["order"]["place"]
        self.dropout.set_state(pieces["random"])


def saved_after(steps: int) -> tuple[dict[str, Any], list[float]]:
    """The pieces of a run after some steps, and the losses of the steps that follow."""
    run = LabRun()
    for _ in range(steps):
        run.step()
    pieces = copy.deepcopy(run.pieces())
    return pieces, [run.step() for _ in range(MORE_STEPS)]


class TrainedAgain(RuntimeError):
    """The learner's code took a training step."""


def without_training(rebuild: Callable[..., Any], *args: Any) -> Any:
    """Call the learner's function where no model may compute and no optimizer may step.

    Raises:
        TrainedAgain: one did. A step whose optimizer was taken out costs as much as one with it.
    """

    def refuse(*_: Any) -> None:
        raise TrainedAgain

    hooks = [register_optimizer_step_pre_hook(refuse), register_module_forward_pre_hook(refuse)]
    try:
        return rebuild(*args)
    finally:
        for hook in hooks:
            hook.remove()
