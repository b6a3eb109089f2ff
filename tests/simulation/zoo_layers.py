"""More programs: layers for sequences, graphs, tables, images and sound. KINDS has the others too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_kinds import KINDS as KINDS
from zoo_kinds import add

# --- attention, state spaces, recurrences --------------------------------------------------------


class Attention(nn.Module):
    """Attention in one of several forms, written out."""

    def __init__(self, form: Callable[..., Tensor], heads: int = 4) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.form(q, k, v).transpose(1, 2).reshape(b, t, -1))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    seen = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
    weight = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return torch.einsum("bhtd,bhtde->bhte", q, seen) / (weight + 1e-6)


def windowed(q: Tensor, k: Tensor, v: Tensor, width: int = 16) -> Tensor:
    """Each step sees those near it: windows by unfold."""
    k, v = (F.pad(x, (0, 0, width - 1, 0)).unfold(2, width, 1) for x in (k, v))
    scores = torch.einsum("bhtd,bhtdw->bhtw", q, k).div_(math.sqrt(q.shape[-1]))
    return torch.einsum("bhtw,bhtdw->bhtd", scores.softmax(-1), v)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi: a slope for each head."""
    t = q.shape[2]
    slope = 2.0 ** -torch.arange(1.0, 5.0).view(1, 4, 1, 1)
    bias = slope * (torch.arange(t)[None] - torch.arange(t)[:, None])
    mask = torch.full((t, t), float("-inf")).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t, d = q.shape[2:]
    angle = torch.outer(torch.arange(t), 1e4 ** (-torch.arange(0, d, 2) / d))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (
        torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(
            -2
        )
        for x in (q, k)
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def chosen_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The eight keys of each row that matter."""
    scores = q @ k.transpose(-2, -1)
    best = scores.topk(8, -1)
    kept = torch.full_like(scores, float("-inf")).scatter(-1, best.indices, best.values)
    return kept.softmax(-1) @ v


for _form in (linear_attention, windowed, biased, rotary, chosen_keys):
    add(
        f"attention, {_form.__name__}",
        partial(Attention, _form),
        lambda m: m(torch.randn(2, 128, 64)).square().mean(),
    )


class Scan(nn.Module):
    """A selective state space, step by step."""

    def __init__(self, width: int = 64, states: int = 8) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width, states))
        self.size, self.into, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, states),
            nn.Linear(width, states),
        )

    def forward(self, x: Tensor) -> Tensor:
        size = F.softplus(self.size(x))
        decay = torch.exp(-size[..., None] * self.decay.exp())
        fed = (size * x)[..., None] * self.into(x)[:, :, None]
        state, seen = torch.zeros_like(fed[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + fed[:, t]
            seen.append((state * self.out(x)[:, t, None]).sum(-1))
        return torch.stack(seen, 1)


class Doubling(nn.Module):
    """A linear recurrence by doubling: log2(n) passes over the sequence."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gates(x).chunk(2, -1)
        a, b, step = gate.sigmoid(), value, 1
        while step < x.shape[1]:
            b = torch.cat([b[:, :step], b[:, step:] + a[:, step:] * b[:, :-step]], 1)
            a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
            step *= 2
        return b


class Spectral(nn.Module):
    """A long convolution by FFT."""

    def __init__(self, width: int = 64, length: int = 128) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width, length))

    def forward(self, x: Tensor) -> Tensor:
        n = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n) * torch.fft.rfft(self.filter, n)
        return torch.fft.irfft(spectrum, n)[..., : x.shape[1]].transpose(1, 2)


class Cells(nn.Module):
    """A cell called at each step, truncated in the middle."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            if t == x.shape[1] // 2:
                state = (
                    tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
                )
        return state[0] if isinstance(state, tuple) else state


for _name, _make in {
    "selective scan": Scan,
    "recurrence by doubling": Doubling,
    "long convolution": Spectral,
    "LSTMCell": partial(Cells, nn.LSTMCell),
    "GRUCell": partial(Cells, nn.GRUCell),
    "LSTM": lambda: nn.LSTM(64, 64, batch_first=True),
}.items():
    add(
        _name,
        _make,
        lambda m: (
            (y[0] if isinstance(y := m(torch.randn(4, 128, 64)), tuple) else y).square().mean()
        ),
    )

# --- graphs, tables, images, sound ---------------------------------------------------------------


class Graph(nn.Module):
    """Messages along edges, gathered and scattered; attention over each node's neighbours."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.GRUCell(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        score = self.score(sent).squeeze(-1)
        top = torch.full((len(x),), -1e9).scatter_reduce(0, target, score, "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros(len(x)).index_add(0, target, weight)
        weight = (weight / total[target])[:, None]
        return self.update(torch.zeros_like(x).index_add(0, target, weight * sent), x)


class Tables(nn.Module):
    """Bags of rows of a large table, beside numbers: a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(5000, 32, mode="sum") for _ in range(3))
        self.dense, self.top = (
            nn.Linear(13, 32),
            nn.Sequential(nn.Linear(38, 64), nn.ReLU(), nn.Linear(64, 1)),
        )

    def forward(self, numbers: Tensor, bags: Tensor) -> Tensor:
        parts = [self.dense(numbers), *(table(bags) for table in self.tables)]
        x = torch.stack(parts, 1)
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([parts[0], (x @ x.transpose(1, 2))[:, i, j]], 1))


def graph_loss(m: nn.Module) -> Tensor:
    return m(torch.randn(200, 64), torch.randint(200, (2, 1000))).square().mean()


def click_loss(m: nn.Module) -> Tensor:
    odds = m(torch.randn(128, 13), torch.randint(5000, (128, 20)))
    return F.binary_cross_entropy_with_logits(odds, torch.zeros(128, 1))


class Denoiser(nn.Module):
    """A block of a diffusion transformer, moved and scaled by the time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.exp(-torch.arange(32) / 32 * math.log(1e4))
        a, b, c, d, e, f = self.time(torch.cat([angle.cos(), angle.sin()], -1))[:, None].chunk(
            6, -1
        )
        y = self.norms[0](x) * (1 + b) + a
        x = x + c * self.attention(y, y, y, need_weights=False)[0]
        return x + f * self.wide(self.norms[1](x) * (1 + e) + d)


def flow_loss(m: nn.Module) -> Tensor:
    """Flow matching."""
    x, noise, t = torch.randn(4, 64, 64), torch.randn(4, 64, 64), torch.rand(4)
    mixed = x * t[:, None, None] + noise * (1 - t[:, None, None])
    return F.mse_loss(m(mixed, t), x - noise)


class Ears(nn.Module):
    """Sound to a log-mel picture to letters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mel", torch.rand(129, 40))
        self.conv = nn.Sequential(nn.Conv1d(40, 64, 5, 2), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 30)

    def forward(self, sound: Tensor) -> Tensor:
        picture = torch.stft(sound, 256, 128, window=torch.hann_window(256), return_complex=True)
        mel = (picture.abs().square().transpose(1, 2) @ self.mel).clamp(min=1e-5).log()
        return self.head(self.conv(mel.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)


def heard(m: nn.Module) -> Tensor:
    odds = m(torch.randn(4, 16000)).transpose(0, 1)
    lengths = torch.full((4,), odds.shape[0])
    return F.ctc_loss(odds, torch.randint(1, 30, (4, 10)), lengths, torch.full((4,), 10))


class Codes(nn.Module):
    """VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 32, 4, 4), nn.ConvTranspose2d(32, 3, 4, 4)
        self.codes = nn.Embedding(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        z = self.into(x).permute(0, 2, 3, 1)
        near = torch.cdist(z.reshape(-1, 32), self.codes.weight).argmin(1)
        q = self.codes(near).view_as(z)
        passed = z + (q - z).detach()
        loss = F.mse_loss(z, q.detach()) + F.mse_loss(q, z.detach())
        return loss + F.mse_loss(self.out(passed.permute(0, 3, 1, 2)), x)


class Rays(nn.Module):
    """A radiance field, rendered along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(39, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        waves = [f(x * 2.0**i) for i in range(6) for f in (torch.sin, torch.cos)]
        color, density = self.field(torch.cat([x, *waves], -1)).split([3, 1], -1)
        opaque = 1 - torch.exp(-F.relu(density.squeeze(-1)) * 0.1)
        through = torch.cumprod(1 - opaque + 1e-10, -1).roll(1, -1)
        return ((opaque * through)[..., None] * color.sigmoid()).sum(-2)


add("graph network", Graph, graph_loss)
add("recommender of bags", Tables, click_loss)
add("diffusion transformer", Denoiser, flow_loss)
add("speech front end with CTC", Ears, heard, values=True)
add("VQ-VAE", Codes, lambda m: m(torch.randn(4, 3, 64, 64)))
add("radiance field", Rays, lambda m: m(torch.randn(256, 32, 3)).square().mean())


class Flow(nn.Module):
    """RealNVP's couplings with their log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        logdet = torch.zeros(len(x))
        for net in self.nets:
            scale, shift = net(a).chunk(2, -1)
            a, b = b * scale.tanh().exp() + shift, a
            logdet = logdet + scale.tanh().sum(-1)
        return 0.5 * (a.square() + b.square()).sum(-1) - logdet


add("normalizing flow", Flow, lambda m: m(torch.randn(256, 64)).mean())
