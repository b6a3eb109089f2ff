"""One rank of a Megatron-LM GPT as its CI runs it, to simulate the bytes that the CI logs.

Written after github.com/NVIDIA/Megatron-LM at d98e8a6, the commit that the published rows name, and
Transformer Engine's layers beneath it. What decides memory:

- Parameters in bf16; gradients in one fp32 buffer (core/distributed/param_and_grad_buffer.py);
  an fp32 copy and two moments of a 1/dp share of the parameters (core/optimizer/
  distrib_optimizer.py). Collectives over dp work in place in these.
- Column- and row-parallel products keep their own shard of the sequence and gather it again in
  backward (core/tensor_parallel/layers.py); the head gathers into one buffer for good ("mpu").
- Gradients of weights are added to the fp32 buffer inside the product; the bf16 tensor that
  autograd is handed instead is a cached one from Transformer Engine 2.3 on (module/base.py).
- A chunk of a pipeline keeps its last input until its next forward (`set_input_tensor` of
  core/transformer/transformer_block.py), and with it that input's gradient (`retain_grad` in
  core/pipeline_parallel/schedules.py); outputs are dropped once sent (`deallocate_output_tensor`).
- GELU with bias, and dropout with bias and residual, are fused: each keeps its input or its mask.
- The loss makes one fp32 copy of the logits and works in place (core/tensor_parallel/
  cross_entropy.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HALF = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's share of a model, and how the program runs it.

    Attributes:
        chunks: Chunks of the pipeline on this rank, of `layers` layers each.
        layers: Layers in a chunk.
        hidden, heads, groups, feedforward, vocabulary: The whole model's; vocabulary padded.
        tp: Ranks that split each layer; `sequence_parallel`: and the sequence between layers.
        dp: Ranks over which optimizer state is sharded.
        first, last: This rank holds the embedding; the head and the loss.
        bias: Linear layers have biases.
        dropout: Probability, of hidden states and attention alike.
        rotary: Share of a head's channels that rotary positions turn; 0: learned positions.
        squared_relu: In the place of GELU.
        fused_gradients: Products add to the fp32 gradients themselves.
        cached_stand_ins: What autograd is handed then is kept from call to call.
        copied_attention: The kernel wants the batch first, so its result is copied back.
        scores: "flash", "kept" (all of softmax and dropout) or "recomputed" (Korthikanti 2022).
        workspace_bytes: Of the matrix libraries.
    """

    chunks: int = 1
    layers: int
    hidden: int
    heads: int
    groups: int
    feedforward: int
    vocabulary: int
    tp: int = 1
    sequence_parallel: bool = False
    dp: int = 1
    first: bool = False
    last: bool = False
    bias: bool = True
    dropout: float = 0.1
    rotary: float = 0.0
    squared_relu: bool = False
    fused_gradients: bool = True
    cached_stand_ins: bool = False
    copied_attention: bool = False
    scores: str = "flash"
    workspace_bytes: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Buffers:
    """Tensors that live in the program beside the model: one gathered input, and stand-ins."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name and shape, made once."""
        place = (key, *shape)
        if place not in self.kept:
            self.kept[place] = torch.empty(shape, dtype=HALF)
        return self.kept[place]


def gathered(x: Tensor, rank: Rank, out: Tensor | None = None) -> Tensor:
    """The whole sequence (S, B, ...) from every rank's shard."""
    shape = (x.shape[0] * rank.tp, *x.shape[1:])
    out = torch.empty(shape, dtype=x.dtype) if out is None else out
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def reduced(x: Tensor, rank: Rank) -> Tensor:
    """The sum over ranks: this rank's shard of it, or in place the whole."""
    if rank.tp == 1:
        return x
    if not rank.sequence_parallel:
        dist.all_reduce(x)
        return x
    out = torch.empty((x.shape[0] // rank.tp, *x.shape[1:]), dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x)
    return out


class _Product(torch.autograd.Function):
    """x @ W.T, split by columns (input gathered) or by rows (output reduced)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        out = F.linear(layer.whole(x) if layer.columns else x, weight, bias)
        return out if layer.columns else reduced(out, layer.rank)

    # It gets the gradient of the one output; the signature that it overrides takes any number.
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        gradient = gradient.contiguous() if layer.columns else layer.whole(gradient)
        inputs = gradient @ weight
        total = layer.whole(x) if layer.columns else x
        if layer.columns:
            inputs = reduced(inputs, layer.rank)
        bias = gradient.flatten(0, 1).sum(0) if layer.columns and layer.bias is not None else None
        return inputs, layer.weight_gradient(gradient, total), bias, None


class Linear(nn.Module):
    """A parallel linear layer; its bias, where it is added later, belongs to what adds it."""

    def __init__(self, rank: Rank, buffers: Buffers, inputs: int, outputs: int, *, columns: bool,
                 bias: bool = False, head: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.shared, self.columns, self.head = rank, buffers, columns, head
        shape = (outputs // rank.tp, inputs) if columns else (outputs, inputs // rank.tp)
        self.weight = nn.Parameter(torch.empty(shape, dtype=HALF))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=HALF)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias, self)

    def whole(self, x: Tensor) -> Tensor:
        """x with its whole sequence."""
        if not self.rank.sequence_parallel or self.rank.tp == 1:
            return x
        shape = (x.shape[0] * self.rank.tp, *x.shape[1:])
        out = self.shared.get("mpu", shape) if self.head else None
        return gathered(x, self.rank, out)

    def weight_gradient(self, gradient: Tensor, total: Tensor) -> Tensor:
        """In bf16, or its stand-in where the product has added it to the fp32 gradients."""
        if not self.rank.fused_gradients:
            return gradient.flatten(0, 1).t() @ total.flatten(0, 1)
        if self.rank.cached_stand_ins:
            return self.shared.get("stand-in", tuple(self.weight.shape)).detach()
        return torch.empty_like(self.weight)


class _Activation(torch.autograd.Function):
    """GELU with bias, or a squared ReLU, as one kernel: it keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.has_bias = bias is not None
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        return out, out.flatten(0, 1).sum(0) if ctx.has_bias else None


class Attention(nn.Module):
    """(S, B, H) -> (S, B, H), without the last bias."""

    def __init__(self, rank: Rank, buffers: Buffers) -> None:
        super().__init__()
        self.rank = rank
        width = (rank.heads + 2 * rank.groups) * rank.head_dim
        make = {"rank": rank, "buffers": buffers}
        self.qkv = Linear(**make, inputs=rank.hidden, outputs=width, columns=True, bias=rank.bias)
        self.proj = Linear(**make, inputs=rank.hidden, outputs=rank.hidden, columns=False)

    def forward(self, x: Tensor) -> Tensor:
        rank, mixed = self.rank, self.qkv(x)
        each = rank.heads // rank.groups
        mixed = mixed.unflatten(-1, (-1, each + 2, rank.head_dim))  # (S, B, groups, each + 2, D)
        q, k, v = mixed.split((each, 1, 1), dim=3)
        q, k, v = (self._positions(q.flatten(2, 3)), self._positions(k.squeeze(3)), v.squeeze(3))
        del mixed
        if rank.scores == "recomputed":
            return self.proj(checkpoint(self._scores, q, k, v, use_reentrant=False))
        return self.proj(self._scores(q, k, v) if rank.scores == "kept" else self._flash(q, k, v))

    def _positions(self, x: Tensor) -> Tensor:
        turned = int(self.rank.rotary * self.rank.head_dim)
        if not turned:
            return x
        angles = torch.empty(x.shape[0], 1, 1, turned, dtype=x.dtype)
        part, rest = x.split((turned, self.rank.head_dim - turned), dim=-1)
        half = torch.cat((-part[..., turned // 2 :], part[..., : turned // 2]), dim=-1)
        return torch.cat((part * angles + half * angles, rest), dim=-1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Flash attention, batch first, or cuDNN's fused attention in the order that is there."""
        heads = (1, 2, 0, 3)  # (S, B, A, D) -> (B, A, S, D)
        if self.rank.copied_attention:
            q, k, v = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v))
        else:
            q, k, v = (part.contiguous() for part in (q, k, v))
        q, k, v = (part.permute(heads) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.rank.dropout, is_causal=True, enable_gqa=True
        )
        return mixed.permute(2, 0, 1, 3).contiguous().flatten(2)

    def _scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores (B * A, S, S) as a tensor, as before flash attention."""
        q, k, v = (part.flatten(1, 2).transpose(0, 1) for part in (q, k, v))
        shares = torch.softmax(q @ k.transpose(1, 2), dim=-1)
        mixed = F.dropout(shares, self.rank.dropout) @ v
        return mixed.transpose(0, 1).unflatten(1, (-1, self.rank.heads // self.rank.tp)).flatten(2)


class Layer(nn.Module):
    """LayerNorm, attention, LayerNorm, feed-forward; (S, B, H), S a shard where it is split."""

    def __init__(self, rank: Rank, buffers: Buffers) -> None:
        super().__init__()
        self.rank = rank
        h, make = rank.hidden, {"rank": rank, "buffers": buffers}
        self.norm_1, self.norm_2 = (nn.LayerNorm(h, dtype=HALF) for _ in range(2))
        self.attention = Attention(rank, buffers)
        self.fc1 = Linear(**make, inputs=h, outputs=rank.feedforward, columns=True)
        self.fc2 = Linear(**make, inputs=rank.feedforward, outputs=h, columns=False)
        sizes = (h, rank.feedforward // rank.tp, h) if rank.bias else ()
        self.biases = nn.ParameterList(torch.empty(n, dtype=HALF) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        bias = list(self.biases) or [None] * 3
        x = self._add(self.attention(self.norm_1(x)), bias[0], x)
        inner = _Activation.apply(self.fc1(self.norm_2(x)), bias[1])
        return self._add(self.fc2(inner), bias[2], x)

    def _add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        x = x if bias is None else x + bias
        return residual + F.dropout(x, self.rank.dropout)
