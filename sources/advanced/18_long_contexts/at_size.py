"""One training step of a real model on one of several simulated GPUs, states sharded, its tokens long."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from utils.catalog import ModelShape, model_shape
from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.models import Transformer, TransformerConfig
from utils.models.transformer import attend as whole_attention
from utils.parallel.dims import ParallelDims
from utils.parallel.mesh import device_mesh
from utils.parallel.shard import BF16
from utils.planner.flops import block_forward_flops, head_forward_flops
from utils.simulation.extrapolation import extrapolate

__all__ = ["CURES", "Reader", "of_one_rank", "token_flop"]

CURES = ("chunked loss", "checkpointing", "offload", "tiled MLP")
RANKS = 8
CHUNK_TOKENS = 1024
TILE_TOKENS = 8192
FROM_LAYERS = (2, 3, 4)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Reader(nn.Module):
    """A transformer and its loss in one module, so that a chunked loss sees the head's weight.

    Attributes:
        body: blocks; its `norm` and `head` are called here.
    """

    def __init__(self, config: TransformerConfig, cures: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.body: Any = Transformer(config)
        self.norm, self.head = self.body.norm, self.body.head
        self.body.norm = self.body.head = None
        self.cures = cures
        if "tiled MLP" in cures:
            for block in self.body.blocks:
                block.feedforward.forward = functools.partial(tiled, block.feedforward.forward)
        if "checkpointing" in cures:
            for block in self.body.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mean loss of (B, S) tokens."""
        hidden = self.norm(self.body(tokens, positions)).flatten(0, 1)
        if "chunked loss" in self.cures:
            return chunked_loss(hidden, self.head.weight, targets.flatten())
        return F.cross_entropy(self.head(hidden).float(), targets.flatten())


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (T, H) tokens, some tokens' logits at a time: PyTorch's own, from 2.13 on.

    Before, chunks of 1,024 tokens, each computed again in backward.
    """
    if hasattr(F, "linear_cross_entropy"):
        how = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, weight, targets, options=how)
    parts = zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    sums = [checkpoint(_summed, x, weight, y, use_reentrant=False) for x, y in parts]
    return torch.stack(sums).sum() / len(targets)  # pyright: ignore[reportArgumentType]


def tiled(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """An MLP's forward of (B, S, H), some tokens at a time, each part computed again in backward."""
    parts = hidden.split(TILE_TOKENS, 1)
    return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in parts], 1)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _summed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def of_one_rank(
    name: str | ModelShape,
    tokens: int,
    *cures: str,
    attend: Attend = whole_attention,
    device: str = "H100",
    ranks: int = RANKS,
    layers: int | None = None,
    from_layers: tuple[int, int, int] = FROM_LAYERS,
) -> Measurement:
    """A step of AdamW on one of `ranks` GPUs under FSDP2 (fp32 states, bf16 compute), `tokens` on each.

    Args:
        name: of a published shape.
        tokens: that this rank computes: all of its own sequence, or its part of a shared one.
        cures: of `CURES`.
        attend: takes the place of causal attention to this rank's own tokens.
        device: a GPU of the catalog.
        ranks: GPUs that the states are sharded over.
        layers: the model's depth; None for that of the shape.
        from_layers: simulated whole; the rest is laid out from them.

    Raises:
        ValueError: an unknown cure.
    """
    if unknown := set(cures) - {*CURES}:
        raise ValueError(f"{sorted(unknown)} is none of the cures {', '.join(CURES)}.")
    shape = model_shape(name)

    def build(depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Reader(TransformerConfig.from_shape(shape, layers=depth), cures)
        mesh = device_mesh(ParallelDims(shard=ranks), "cpu")
        for block in model.body.blocks:
            block.attention.attend = attend
            fully_shard(block, mesh=mesh, mp_policy=BF16)
        fully_shard(model, mesh=mesh, mp_policy=BF16)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        read = torch.zeros(1, tokens, dtype=torch.long)
        with _kept(cures):
            loss = model(read, read)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return extrapolate(
        build, step, layers=layers or shape.layers, from_layers=from_layers, device=device,
        world=ranks, name=", ".join(cures) or "plain",
    )  # fmt: skip


def _kept(cures: tuple[str, ...]) -> Any:
    """Where what backward needs is kept: on the GPU, or in pinned host memory."""
    if "offload" not in cures:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def token_flop(shape: ModelShape, length: int) -> tuple[float, float]:
    """FLOP of a token's forward pass, in its linear layers and in attention.

    In the mean of a causal sequence: a token sees half of the keys.
    """
    block = block_forward_flops(shape, length)
    linear = shape.layers * block["matrices"] + head_forward_flops(shape)
    return linear, shape.layers * block["attention"] / 2


check_public(globals())
