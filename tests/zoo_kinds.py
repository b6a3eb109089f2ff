"""Forty more programs, each of another kind, small enough to run for real on a CPU.

Each has a `build`, a `step` and stand-ins for what it asks. They run by the same code with data and
without, and `test_zoo_kinds.py` holds both peaks side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo_ranks import ROWS, WIDTH, adamw, mlp, rows, update


class Kind(NamedTuple):
    """A program, and what to assume where it asks for values."""

    build: Callable[[], Any]
    step: Callable[..., Any]
    values: Any = None


KINDS: dict[str, Kind] = {}


def add(
    name: str,
    make: Callable[[], nn.Module],
    loss: Callable[[Any], Tensor],
    values: Any = None,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> None:
    """A program whose step is a loss and an update."""

    def build() -> Any:
        model = make()
        return model, optimizer(p for p in model.parameters() if p.requires_grad)

    KINDS[name] = Kind(build, lambda m, o: update(loss(m), o), values)


# --- optimizers ----------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """By the sign of a mean."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add(p.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


class Orthogonal(torch.optim.Optimizer):
    """Muon's iteration of Newton and Schulz on each matrix."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.95).add_(p.grad)
                if p.dim() < 2:
                    p.add_(momentum, alpha=-group["lr"])
                    continue
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"])


class Sharpness:
    """SAM: a second gradient, taken where the loss is worse."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.base = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)


def sharp() -> Any:
    model = mlp()
    model.kept = [Sharpness(model.parameters())]
    return model, model.kept[0].base


def sharpened(model: Any, optimizer: Any) -> None:
    x = rows()
    model(x).square().mean().backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for p, e in zip(model.parameters(), moves, strict=True):
            p.add_(e)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), moves, strict=True):
            p.sub_(e)
    optimizer.step()
    optimizer.zero_grad()


add("Lion", mlp, lambda m: m(rows()).square().mean(), optimizer=Lion)
add("Muon by hand", mlp, lambda m: m(rows()).square().mean(), optimizer=Orthogonal)
KINDS["SAM"] = Kind(sharp, sharpened)
add("Adadelta", mlp, lambda m: m(rows()).square().mean(), optimizer=torch.optim.Adadelta)


def scheduled(model: Any, optimizer: Any) -> None:
    """Accumulation, clipping by value and by norm, and a schedule."""
    for _ in range(3):
        (F.cross_entropy(model(rows()), torch.zeros(ROWS, dtype=torch.long)) / 3).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).step()
    optimizer.zero_grad()


KINDS["accumulation, clipping, schedule"] = Kind(lambda: adamw(mlp()), scheduled)

# --- losses --------------------------------------------------------------------------------------


def contrastive(model: nn.Module) -> Tensor:
    """InfoNCE of two views."""
    one, two = (F.normalize(model(rows())) for _ in range(2))
    return F.cross_entropy(one @ two.T / 0.1, torch.arange(ROWS))


def triplets(model: nn.Module) -> Tensor:
    """The hardest of each batch."""
    points = model(rows())
    apart = torch.cdist(points, points)
    same = torch.arange(ROWS)[:, None] % 8 == torch.arange(ROWS)[None] % 8
    far = apart.masked_fill(~same, -1).max(1).values
    near = apart.masked_fill(same, 1e9).min(1).values
    return F.relu(far - near + 0.3).mean()


def focal(model: nn.Module) -> Tensor:
    logits, labels = model(rows()), torch.zeros(ROWS, 10)
    loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (loss * (1 - torch.exp(-loss)) ** 2).mean()


def dice(model: nn.Module) -> Tensor:
    odds, truth = model(torch.randn(2, 3, 64, 64)).softmax(1), torch.ones(2, 4, 64, 64)
    return 1 - (2 * (odds * truth).sum((2, 3)) / (odds + truth).sum((2, 3))).mean()


def optimal_transport(model: nn.Module) -> Tensor:
    """Sinkhorn's iterations."""
    cost = torch.cdist(model(rows()), model(rows()))
    kernel, u = torch.exp(-cost / 0.1), torch.ones(ROWS)
    for _ in range(10):
        v = 1 / (kernel.T @ u)
        u = 1 / (kernel @ v)
    return (u[:, None] * kernel * v[None] * cost).sum()


def listwise(model: nn.Module) -> Tensor:
    scores = model(rows())
    ordered = scores.gather(1, torch.rand(ROWS, 10).argsort(1, descending=True))
    return -(ordered - ordered.flip(1).logcumsumexp(1).flip(1)).mean()


def covariance(model: nn.Module) -> Tensor:
    """VICReg's three terms."""
    a, b = model(rows()), model(rows())
    spread = F.relu(1 - a.var(0).add(1e-4).sqrt()).mean()
    between = (a - a.mean(0)).T @ (a - a.mean(0)) / ROWS
    off = between.flatten()[:-1].view(9, 11)[:, 1:].square().sum()
    return F.mse_loss(a, b) + spread + off


add("InfoNCE", mlp, contrastive)
add("batch-hard triplets", mlp, triplets)
add("focal loss", mlp, focal)
add(
    "Dice",
    lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    ),
    dice,
)
add("Sinkhorn", mlp, optimal_transport)
add("ListMLE", mlp, listwise)
add("VICReg", mlp, covariance)


def preferences() -> Any:
    model = mlp()
    model.teacher = [mlp().requires_grad_(False)]
    return adamw(model)


def preferred(model: Any, optimizer: Any) -> None:
    """DPO: log-odds of two answers, beside those of a frozen copy."""
    x = torch.randn(2, ROWS, WIDTH)
    chosen = model(x).log_softmax(-1)[..., 0]
    with torch.no_grad():
        before = model.teacher[0](x).log_softmax(-1)[..., 0]
    margin = (chosen - before)[0] - (chosen - before)[1]
    update(-F.logsigmoid(0.1 * margin).mean(), optimizer)


def proximal(model: Any, optimizer: Any) -> None:
    """PPO: two epochs over what was sampled once."""
    x = rows()
    with torch.no_grad():
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        before = policy.log_prob(action)
    for _ in range(2):
        now = torch.distributions.Categorical(logits=model(x))
        ratio = (now.log_prob(action) - before).exp()
        clipped = torch.min(ratio, ratio.clamp(0.8, 1.2))
        update(-clipped.mean() - 0.01 * now.entropy().mean(), optimizer)


KINDS["DPO"] = Kind(preferences, preferred)
KINDS["PPO"] = Kind(lambda: adamw(mlp()), proximal)

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

# --- layers of few bits, adapters, hooks, functions of one's own ----------------------------------


class Rounded(torch.autograd.Function):
    """Weights of one bit: the gradient passes as if nothing were rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign() * x.abs().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


class OneBit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Rounded.apply(self.weight), self.bias)  # pyright: ignore


class EightBit(nn.Module):
    """A frozen layer in int8 with a scale a row, under a trained low-rank detour."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(width, width, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(width, 1))
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.scale) + self.up(self.down(x))


class Reversible(torch.autograd.Function):
    """Two streams whose inputs are worked out from their outputs in backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: Tensor, g: Tensor) -> Any:
        with torch.no_grad():
            y = a + (b @ f).relu()
            z = b + (y @ g).relu()
        ctx.save_for_backward(y, z, f, g)
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, z, f, g = ctx.saved_tensors
        dy, dz = grads
        with torch.no_grad():
            b = z - (y @ g).relu()
        with torch.enable_grad():
            y_, b_, f_, g_ = (t.detach().requires_grad_() for t in (y, b, f, g))
            through = (y_ @ g_).relu()
            gy, gg = torch.autograd.grad(through, (y_, g_), dz)
            dy = dy + gy
            gb, gf = torch.autograd.grad((b_ @ f_).relu(), (b_, f_), dy)
        return dy, dz + gb, gf, gg


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ParameterList(torch.randn(2, 128, 128) * 0.01 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for pair in self.pairs:
            a, b = Reversible.apply(a, b, pair[0], pair[1])  # pyright: ignore
        return torch.cat([a, b], -1)


def halved(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def hooked() -> Any:
    model = mlp()
    seen: list[Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda m, i, o: seen.append(o.detach().abs().mean(0)))
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-1, 1))
        p.register_post_accumulate_grad_hook(halved)
    model.seen = seen
    return adamw(model)


def watched_step(model: Any, optimizer: Any) -> None:
    update(
        model(rows()).square().mean() + torch.stack([s.mean() for s in model.seen]).sum(), optimizer
    )
    model.seen.clear()


add(
    "weights of one bit",
    lambda: nn.Sequential(OneBit(WIDTH, WIDTH), nn.ReLU(), OneBit(WIDTH, 10)),
    lambda m: m(rows()).square().mean(),
)
add(
    "int8 under LoRA",
    lambda: nn.Sequential(EightBit(), nn.GELU(), EightBit()),
    lambda m: m(rows()).square().mean(),
)
add("reversible streams", Streams, lambda m: m(torch.randn(ROWS, 256)).square().mean())
KINDS["hooks on outputs and gradients"] = Kind(hooked, watched_step)


def normed() -> nn.Module:
    model = mlp()
    parametrizations.spectral_norm(model[0])
    parametrizations.weight_norm(model[2])
    prune.l1_unstructured(model[4], "weight", amount=0.3)
    return model


add("spectral norm, weight norm, pruning", normed, lambda m: m(rows()).square().mean())
add(
    "checkpoint_sequential",
    mlp,
    lambda m: (
        checkpoint_sequential(m, 2, rows().requires_grad_(), use_reentrant=False).square().mean()
    ),
)
add(
    "checkpoint in checkpoint",
    mlp,
    lambda m: (
        checkpoint(
            lambda x: checkpoint(m, x, use_reentrant=False).sin(), rows(), use_reentrant=False
        )
        .square()
        .mean()
    ),
)


def meta_learned(model: Any, optimizer: Any) -> None:
    """MAML: a step inside, and the gradient through it."""
    fast = dict(model.named_parameters())
    call = torch.func.functional_call
    grads = torch.autograd.grad(
        call(model, fast, (rows(),)).square().mean(), list(fast.values()), create_graph=True
    )
    moved = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
    update(call(model, moved, (rows(),)).square().mean(), optimizer)


def tangents(model: Any, optimizer: Any) -> None:
    """A penalty on the derivative along a direction, forwards."""
    x, v = rows(), rows()
    y, along = torch.func.jvp(model, (x,), (v,))
    update(y.square().mean() + along.square().mean(), optimizer)


def ensemble() -> Any:
    models = [mlp(64) for _ in range(4)]
    weights, _ = torch.func.stack_module_state(models)
    whole = nn.Module()
    whole.weights = nn.ParameterDict(
        {n.replace(".", "_"): nn.Parameter(p) for n, p in weights.items()}
    )
    return adamw(whole)


def together(model: Any, optimizer: Any) -> None:
    base = mlp(64).to("meta")
    names = {n.replace(".", "_"): n for n, _ in base.named_parameters()}
    weights = {names[n]: p for n, p in model.weights.items()}
    out = torch.func.vmap(lambda w, x: torch.func.functional_call(base, w, (x,)), (0, None))(
        weights, rows()
    )
    update(out.square().mean(), optimizer)


def curvature(model: Any, optimizer: Any) -> None:
    """Hutchinson's estimate of the Hessian's diagonal."""
    loss = model(rows()).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    signs = [torch.randint_like(g, 2) * 2 - 1 for g in grads]
    bent = torch.autograd.grad(grads, list(model.parameters()), signs)
    for p, g, h in zip(model.parameters(), grads, bent, strict=True):
        p.grad = g.detach() / (h.abs() + 1)
    optimizer.step()
    optimizer.zero_grad()


KINDS["MAML"] = Kind(lambda: adamw(mlp()), meta_learned)
KINDS["forward derivatives"] = Kind(lambda: adamw(mlp()), tangents)
KINDS["ensemble by vmap"] = Kind(ensemble, together)
KINDS["Hessian's diagonal"] = Kind(lambda: adamw(mlp()), curvature)

# --- transformers, of other families -------------------------------------------------------------

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


def family(auto: Any, config: Any) -> Any:
    return adamw(auto.from_config(config).train())


def causal(model: Any, optimizer: Any) -> None:
    tokens = torch.randint(900, (2, 64))
    update(model(input_ids=tokens, labels=tokens, use_cache=False).loss, optimizer)


for _name, _config in {
    "Mamba": hf.MambaConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2, state_size=8),
    "RWKV": hf.RwkvConfig(
        vocab_size=1000,
        hidden_size=64,
        attention_hidden_size=64,
        num_hidden_layers=2,
        context_length=64,
    ),
    "Mixtral": hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "Qwen3 of experts": hf.Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "Gemma 3": hf.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=32, sliding_window=16),
    "Falcon": hf.FalconConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4
    ),
    "BLOOM": hf.BloomConfig(vocab_size=1000, hidden_size=128, n_layer=2, n_head=4),
    "OPT with LayerDrop": hf.OPTConfig(
        vocab_size=1000,
        hidden_size=128,
        word_embed_proj_dim=128,
        num_hidden_layers=2,
        ffn_dim=256,
        num_attention_heads=4,
        layerdrop=1e-9,
    ),
    "GPT-J": hf.GPTJConfig(
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=0,
        n_embd=128,
        n_layer=2,
        n_head=4,
        rotary_dim=16,
    ),
}.items():
    KINDS[_name] = Kind(partial(family, hf.AutoModelForCausalLM, _config), causal, values=True)


def sounds(model: Any, optimizer: Any) -> None:
    update(model(torch.randn(2, 16000), labels=torch.randint(1, 30, (2, 20))).loss, optimizer)


KINDS["HuBERT with CTC"] = Kind(
    partial(
        family,
        hf.AutoModelForCTC,
        hf.HubertConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=32,
            conv_dim=(64,) * 7,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            layerdrop=1e-9,
        ),
    ),
    sounds,
    values=True,
)
