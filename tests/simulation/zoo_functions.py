"""More programs: few bits, hooks, functions of derivatives, other families. KINDS has the others too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo_kinds import Kind, add
from zoo_layers import KINDS
from zoo_ranks import ROWS, WIDTH, adamw, mlp, rows, update

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
