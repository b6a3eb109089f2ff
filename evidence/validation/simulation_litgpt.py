"""litgpt's LoRA step as it was measured, to simulate its published peaks.

Written after github.com/Lightning-AI/litgpt at 8641822, the commit that its resource tables name:
lit_gpt/{model,lora,rmsnorm,utils,config}.py and finetune/lora.py, single GPU, bf16-true, rank 8 on
queries and values, dropout 0.05. What decides memory is kept line by line; Lightning Fabric, which
runs it, turns the logits into fp32 (plugins/precision/half.py, `convert_output`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.techniques import NF4Linear

RANK, ALPHA, DROPOUT = 8, 16, 0.05
LOGITS_CHUNK = 128  # tokens


@dataclass(frozen=True)
class LitShape:
    """A model of litgpt's configuration file, and the longest example of its tokenizer.

    `tokens` is the first training step's length, from the head of the resource tables. `gated`
    is the width of a Llama's feed-forward; 0 for the others, which have four times the hidden size.
    `fp32_norms`: its norms compute in fp32, as they do since 6178c7c of 24 October 2023. The tables
    name a commit of 16 October, and were merged on 27 October.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    vocabulary: int
    rotary: int
    shared_norm: bool
    bias: bool
    head_bias: bool
    tokens: int
    gated: int = 0
    fp32_norms: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "phi-1.5": LitShape(24, 2048, 32, 32, 51_200, 32, True, True, True, 1044),
    "StableLM Alpha": LitShape(16, 4096, 32, 32, 50_688, 32, False, True, False, 1034),
    "Falcon": LitShape(60, 8192, 128, 8, 65_024, 64, False, False, False, 1079),
    "Llama 2": LitShape(32, 4096, 32, 32, 32_000, 128, False, False, False, 1304, gated=11_008),
    "Llama 2 13B": LitShape(40, 5120, 40, 40, 32_000, 128, False, False, False, 1304, gated=13_824),
}


class Adapted(nn.Module):
    """The fused projection of queries, keys and values, with adapters on the first and last."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.width = (shape.heads + 2 * shape.groups) * shape.head_dim
        kept = shape.groups * shape.head_dim
        self.parts = [shape.hidden, kept]
        self.linear = nn.Linear(shape.hidden, self.width, bias=shape.bias)
        self.lora_a = nn.Parameter(torch.zeros(2 * RANK, shape.hidden))
        self.lora_b = nn.Parameter(torch.zeros(sum(self.parts), RANK))
        self.dropout = nn.Dropout(DROPOUT)
        self.grouped = shape.groups != shape.heads
        self.columns = [*range(shape.hidden), *range(shape.hidden + kept, self.width)]

    def forward(self, x: Tensor) -> Tensor:
        plain = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_a)
        update = self._expand(low.transpose(-2, -1), self.lora_b.unsqueeze(-1)).transpose(-2, -1)
        return plain + self._pad(update) * (ALPHA / RANK)

    def _expand(self, low: Tensor, weight: Tensor) -> Tensor:
        if not self.grouped:
            return F.conv1d(low, weight, groups=2)
        pairs = zip(low.chunk(2, dim=1), weight.split(self.parts), strict=True)
        return torch.cat([F.conv1d(part, rows) for part, rows in pairs], dim=1)

    def _pad(self, update: Tensor) -> Tensor:
        """Zeros where the keys have no adapter."""
        update = update.transpose(0, 1)
        full = update.new_zeros((*update.shape[:-1], self.width)).view(-1, self.width)
        columns = torch.tensor(self.columns, device=full.device)
        full = full.index_copy(1, columns, update.reshape(-1, sum(self.parts)))
        return full.view((*update.shape[:-1], self.width)).transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.shape = shape
        self.attn = Adapted(shape)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self._split(self.attn(x))
        turned = self.shape.rotary
        q = torch.cat((_rotate(q[..., :turned], *rope), q[..., turned:]), dim=-1)
        k = torch.cat((_rotate(k[..., :turned], *rope), k[..., turned:]), dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))

    def _split(self, qkv: Tensor) -> list[Tensor]:
        batch, length, _ = qkv.shape
        groups, width = self.shape.groups, self.shape.head_dim
        each = self.shape.heads // groups
        qkv = qkv.view(batch, length, groups, each + 2, width).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        k, v = (part.expand(batch, groups, each, length, width) for part in (k, v))
        return [part.reshape(batch, -1, length, width) for part in (q, k, v)]


class Block(nn.Module):
    def __init__(self, shape: LitShape, approximate: str) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.hidden)
        self.attn = Attention(shape)
        self.norm_2 = None if shape.shared_norm else nn.LayerNorm(shape.hidden)
        self.fc = nn.Linear(shape.hidden, 4 * shape.hidden, bias=shape.bias)
        self.proj = nn.Linear(4 * shape.hidden, shape.hidden, bias=shape.bias)
        self.approximate = approximate

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.norm_1(x)
        mixed = self.attn(normed, rope)
        second = normed if self.norm_2 is None else self.norm_2(x)
        return x + mixed + self._mlp(second)

    def _mlp(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        x = F.gelu(x, approximate=self.approximate)
        return self.proj(x)


class RMSNorm(nn.Module):
    """In PyTorch's own operations, in the dtype of the input or in fp32."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.weight, self.in_fp32 = nn.Parameter(torch.ones(shape.hidden)), shape.fp32_norms

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float() if self.in_fp32 else x
        squares = torch.mean(x * x, dim=-1, keepdim=True)
        return (self.weight * (x * torch.rsqrt(squares + 1e-5))).to(dtype)


class LlamaBlock(nn.Module):
    """One residual after the other, where `Block` adds both to the same input."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(shape), RMSNorm(shape)
        self.attn = Attention(shape)
        self.fc_1 = nn.Linear(shape.hidden, shape.gated, bias=shape.bias)
        self.fc_2 = nn.Linear(shape.hidden, shape.gated, bias=shape.bias)
        self.proj = nn.Linear(shape.gated, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = self.attn(self.norm_1(x), rope) + x
        return self._mlp(self.norm_2(x)) + x

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.fc_1(x), self.fc_2(x)
        x = F.silu(gate) * up
        return self.proj(x)


class LitGPT(nn.Module):
    """Tokens (B, S) -> logits in chunks of 128 tokens, in fp32."""

    def __init__(self, shape: LitShape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.h = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        self.ln_f = RMSNorm(shape) if shape.gated else nn.LayerNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=shape.head_bias)

    def forward(self, tokens: Tensor, rope: tuple[Tensor, Tensor]) -> list[Tensor]:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, rope)
        x = self.ln_f(x)
        chunks = [self.lm_head(part) for part in x.split(LOGITS_CHUNK, dim=1)]
        return [chunk.float() for chunk in chunks]


class EarlyNF4Linear(NF4Linear):
    """NF4 as in bitsandbytes 0.41.1 and Lightning of October 2023, which the tables ran with.

    Two things took memory then that take none today. `MatMul4Bit` kept the layer's input for a
    backward that never read it ("delete useless buffered activation", bitsandbytes #1270, July
    2024). And weights were quantized from fp16 (Lightning 71aed75, fabric/plugins/precision/
    bitsandbytes.py, `_quantize_weight`), so each was unpacked to fp16 first and then turned
    into bf16.
    """

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight as a fresh tensor of `dtype`, by way of fp16."""
        return super().unpacked(torch.float16).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Kept.apply(x))


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x
        return x.view_as(x)

    # It gets the gradient of the one output; the signature that it overrides takes any number.
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def quantizer(quantization: str, early: bool) -> functools.partial[NF4Linear] | None:
    """What makes a frozen linear layer of a row: "None", "bnb.nf4" or "bnb.nf4-dq".

    `early`: as the tables' libraries did, or as today's do.
    """
    if quantization == "None":
        return None
    kind = EarlyNF4Linear if early else NF4Linear
    return functools.partial(kind.from_linear, double_quantization=quantization.endswith("-dq"))


def _block(shape: LitShape) -> nn.Module:
    if shape.gated:
        return LlamaBlock(shape)
    return Block(shape, "tanh" if shape.shared_norm else "none")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


def rope_cache(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines; fp32, as the training loop makes them outside of Fabric's dtype."""
    theta = 1.0 / (10_000 ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(length).float(), theta).repeat(1, 2)
    return angles.cos(), angles.sin()


def chunked_loss(logits: list[Tensor], targets: Tensor) -> Tensor:
    """Cross-entropy chunk by chunk; the last chunk has one prediction too many."""
    logits[-1] = logits[-1][..., :-1, :]
    targets = targets[..., 1:]
    rows = [chunk.reshape(-1, chunk.shape[-1]) for chunk in logits]
    wanted = [part.reshape(-1) for part in targets.split(LOGITS_CHUNK, dim=1)]
    pairs = zip(rows, wanted, strict=True)
    losses = [F.cross_entropy(row, to, ignore_index=-1, reduction="none") for row, to in pairs]
    return torch.cat(losses).mean()
