"""One rank's whole share of a Megatron-LM model, and its step by the schedule of its stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evidence.validation.simulation_megatron import (
    HALF,
    Buffers,
    Layer,
    Linear,
    Rank,
    gathered,
    reduced,
)
from utils.memory import Measurement
from utils.parallel.actions import Action
from utils.simulation import simulate


class _CrossEntropy(torch.autograd.Function):
    """One fp32 copy of the logits becomes the softmax, and in backward its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rank: Rank) -> Tensor:
        softmax = logits.float()
        losses = softmax.max(dim=-1)[0]
        if rank.tp > 1:
            dist.all_reduce(losses, op=dist.ReduceOp.MAX)
        softmax -= losses.unsqueeze(-1)
        ctx.save_for_backward(softmax.exp_())
        return losses

    # It gets the gradient of the one output; the signature that it overrides takes any number.
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (softmax,) = ctx.saved_tensors
        return softmax.mul_(gradient.unsqueeze(-1)).to(HALF), None


class Share(nn.Module):
    """All that one rank holds: chunks of layers, the ends of the model, the gradient buffer."""

    gradients: Tensor
    workspace: Tensor

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self.received: list[Tensor | None] = [None] * rank.chunks
        buffers = Buffers()
        self.chunks = nn.ModuleList(
            nn.ModuleList(Layer(rank, buffers) for _ in range(rank.layers))
            for _ in range(rank.chunks)
        )
        rows = rank.vocabulary // rank.tp
        self.embedding = nn.Embedding(rows, rank.hidden, dtype=HALF) if rank.first else None
        self.norm = nn.LayerNorm(rank.hidden, dtype=HALF) if rank.last else None
        self.head = (
            Linear(rank, buffers, rank.hidden, rank.vocabulary, columns=True, head=True)
            if rank.last
            else None
        )
        count = sum(p.numel() for p in self.parameters())
        self.register_buffer("gradients", torch.empty(count, dtype=torch.float32))
        self.register_buffer("workspace", torch.empty(rank.workspace_bytes, dtype=torch.uint8))
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def input(self, chunk: int, shape: tuple[int, ...], tokens: tuple[int, int]) -> Tensor:
        """What a chunk works on: tokens, or what the stage before sends, kept until the next."""
        if self.embedding is not None and chunk == 0:
            return torch.zeros(tokens, dtype=torch.long)
        self.received[chunk] = x = torch.empty(shape, dtype=HALF, requires_grad=True)
        return x

    def forward(self, chunk: int, x: Tensor) -> Tensor:
        """Through one chunk: tokens (B, S) on the first, else (S, B, H); losses from the last."""
        if self.embedding is not None and chunk == 0:
            x = self.embedding(x).transpose(0, 1).contiguous()
            x = F.dropout(_Scattered.apply(x, self.rank), self.rank.dropout)
        for layer in self.chunks[chunk].children():
            x = layer(x)
        if self.norm is not None and self.head is not None and chunk == self.rank.chunks - 1:
            logits = self.head(self.norm(x))
            return _CrossEntropy.apply(logits, self.rank)
        return x


class _Scattered(torch.autograd.Function):
    """Sum of the ranks' parts of the embedding, and each its shard of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Rank) -> Tensor:
        ctx.rank = rank
        return reduced(x, rank) if rank.tp > 1 else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        split = ctx.rank.sequence_parallel and ctx.rank.tp > 1
        return gathered(gradient, ctx.rank) if split else gradient, None


def _drop_gradient(parameter: Tensor) -> None:
    """Added to the fp32 buffer, in place; then autograd's goes."""
    parameter.grad = None


class ShardedAdam(torch.optim.Optimizer):
    """Master copy and moments of this rank's share, in fp32; the update works in place."""

    def __init__(self, model: Share) -> None:
        super().__init__(model.parameters(), {})
        count = -(-sum(p.numel() for p in model.parameters()) // model.rank.dp)
        names = ("master", "first moment", "second moment")
        self.state[model.gradients] = {name: torch.empty(count) for name in names}

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing is allocated, and no closure is taken."""


def share_step(
    rank: Rank, order: Iterable[Action], micro_batch: int, length: int, device: str
) -> Measurement:
    """Simulate one step of a rank: the passes of its stage in their order.

    Args:
        rank: the share.
        order: forward and backward passes (`utils.planner.schedules.schedule_actions`).
        micro_batch, length: sequences and tokens in each.
        device: a GPU of the catalog.
    """
    passes = tuple(order)

    def build() -> tuple[Share, torch.optim.Optimizer]:
        model = Share(rank)
        return model, ShardedAdam(model)

    def step(model: Share, optimizer: Any) -> None:
        _run(model, passes, micro_batch, length)
        optimizer.step()

    return simulate(build, step, device=device, world=rank.tp, name="Megatron-LM")


def _run(model: Share, passes: tuple[Action, ...], micro_batch: int, length: int) -> None:
    """Autograd's edges stand for outputs that were sent on and dropped."""
    rank, sent, held = model.rank, {}, sorted({work.stage for work in passes})
    split = rank.tp if rank.sequence_parallel else 1
    shape = (length // split, micro_batch, rank.hidden)
    for work in passes:
        chunk = held.index(work.stage)
        place = (work.micro_batch, chunk)
        whole = rank.last and chunk == rank.chunks - 1
        if work.forward:
            out = model(chunk, model.input(chunk, shape, (micro_batch, length)))
            out = out.float().mean() if whole else out
            sent[place] = torch.autograd.graph.get_gradient_edge(out)
            del out
        else:
            gradient = torch.ones(()) if whole else torch.empty(shape, dtype=HALF)
            torch.autograd.backward([sent.pop(place)], [gradient])
