"""A sharded model in training, and folders of its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from utils.models import Transformer, TransformerConfig
from utils.parallel import (
    load_newest,
    save_safely,
)

TINY = TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=4, feedforward=96)


class Run:
    """A sharded model in training, with all of its state in one dictionary."""

    def __init__(self, config: TransformerConfig = TINY) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Transformer(config)
        if dist.is_initialized():
            self.model = fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def state(self) -> dict[str, object]:
        return dict(
            zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True)
        )

    def restore(self, folder: Path) -> int:
        state = self.state
        step = load_newest(state, folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return step

    def train(self, first: int, last: int) -> list[float]:
        return [self._step(number) for number in range(first, last)]

    def _step(self, number: int) -> float:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(number))
        mine = tokens.chunk(ranks)[rank]
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item() / ranks


def saved(folder: Path, *steps: int, keep: int = 2) -> Run:
    run = Run()
    run.train(0, 1)
    for step in steps:
        save_safely(run.state, folder, step, keep)
    return run


def save_and_go_on(folder: Path) -> list[float]:
    run = Run()
    run.train(0, 3)
    save_safely(run.state, folder, 3)
    return run.train(3, 6)
