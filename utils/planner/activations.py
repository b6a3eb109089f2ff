"""What a block keeps for its backward pass, tensor by tensor.

For the GPT family the table is Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: with
dropout, unfused attention and GELU its sum is s*b*h*(34 + 5*a*s/h), their equation 1; with tensor
parallelism 10 + 24/t + 5*a*s/(h*t), equation 2; with sequence parallelism all is divided by t,
equation 4. For the Llama family the same count with RMSNorm, grouped queries and SwiGLU gives

    s*b * (4h [norm inputs] + 4h [norm outputs] + 2h + 2h [q, attention output]
           + 4*h*g/a [k, v] + 4f [gate, up] + 2f [their product] (+ 2f [silu, where unfused]))

in two bytes an element, g the key-value heads, f the feed-forward width. Flash attention keeps
its output and one float32 per head and token in place of the scores (Dao et al. 2022,
arXiv:2205.14135, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape
from utils.planner.adapters import Lora, kept_inputs
from utils.planner.layout import Plan


@dataclass(frozen=True)
class Saved:
    """One tensor that a block keeps.

    Attributes:
        name: What it is.
        bytes_per_token: Over all tp ranks together.
        split: "tp": divided by tp; "sequence": divided by tp only under sequence parallelism;
            "gathered": as "sequence", unless the framework keeps it gathered.
        scores: It is part of the attention scores, which selective recompute drops.
        for_weights: It is kept only for the gradient of the matrix that reads it, so not under
            LoRA, where that matrix is frozen.
        of_norm: It belongs to a norm, whose weights are never quantized.
    """

    name: str
    bytes_per_token: float
    split: str = "tp"
    scores: bool = False
    for_weights: bool = False
    of_norm: bool = False


def saved_tensors(model: ModelShape, plan: Plan, sequence_length: int) -> tuple[Saved, ...]:
    """Every tensor that one block keeps without recomputation."""
    feedforward = _gelu(model, plan) if model.family == "gpt" else _swiglu(model, plan)
    tensors = _attention(model, plan, sequence_length) + feedforward
    lora = plan.lora
    if lora is None:
        return tensors
    inputs_kept = lora.keeps_inputs and lora.base != "bf16"
    tensors = tuple(t for t in tensors if not t.for_weights or (inputs_kept and not t.of_norm))
    return tensors + _adapters(model, plan, lora)


def _norm(model: ModelShape, plan: Plan, number: int) -> tuple[Saved, ...]:
    """A fused norm keeps its input; RMSNorm in plain PyTorch a float32 copy and the normalized."""
    h, width = model.hidden, plan.rules.residual_bytes
    if model.family == "gpt" or not plan.rules.eager_norm:
        return (Saved(f"norm {number} input", width * h, "sequence"),)
    return (
        Saved(f"norm {number} input in float32", 4 * h, "sequence"),
        Saved(f"norm {number} normalized", width * h, "sequence", for_weights=True, of_norm=True),
    )


def _attention(model: ModelShape, plan: Plan, s: int) -> tuple[Saved, ...]:
    h, a, width = model.hidden, model.heads, plan.rules.residual_bytes
    kv = model.key_value_heads * model.head_dim
    tensors = [
        *_norm(model, plan, 1),
        Saved("q, k, v input", width * h, "gathered", for_weights=True),
        Saved("q, k, v", width * (h + 2 * kv)),
        Saved("attention output", width * h),
    ]
    if plan.attention == "flash":
        tensors.append(Saved("softmax statistics", 4 * a, scores=True))
    else:
        tensors.append(Saved("softmax output", width * a * s, scores=True))
        if plan.dropout:
            tensors.append(Saved("attention dropout mask", a * s, scores=True))
            tensors.append(Saved("dropped-out scores", width * a * s, scores=True))
    if plan.dropout:
        tensors.append(Saved("dropout 1 mask", h, "sequence"))
    return tuple(tensors)


def _gelu(model: ModelShape, plan: Plan) -> tuple[Saved, ...]:
    h, f, width = model.hidden, model.feedforward, plan.rules.residual_bytes
    mask = (Saved("dropout 2 mask", model.hidden, "sequence"),) if plan.dropout else ()
    return (
        *_norm(model, plan, 2),
        Saved("feed-forward input", width * h, "gathered", for_weights=True),
        Saved("GELU input", width * f),
        Saved("GELU output", width * f, for_weights=True),
        *mask,
    )


def _swiglu(model: ModelShape, plan: Plan) -> tuple[Saved, ...]:
    h, f, width = model.hidden, model.feedforward, plan.rules.residual_bytes
    unfused = () if plan.rules.fused_gate else (Saved("silu(gate)", width * f),)
    return (
        *_norm(model, plan, 2),
        Saved("feed-forward input", width * h, "gathered", for_weights=True),
        Saved("gate and up", 2 * width * f),
        *unfused,
        Saved("gated product", width * f, for_weights=True),
    )


def _adapters(model: ModelShape, plan: Plan, lora: Lora) -> tuple[Saved, ...]:
    """An adapter keeps its input in its own type, the mask of its dropout, and A(x)."""
    values, masks = kept_inputs(model, lora, plan.rules.residual_bytes)
    inner = lora.adapter_bytes * lora.rank * len(lora.targets)
    return (
        Saved("adapter inputs", values),
        Saved("adapter dropout masks", masks),
        Saved("adapter inner", inner),
    )


def on_rank(tensor: Saved, plan: Plan) -> float:
    """Bytes per token of one tensor on one tp rank."""
    if tensor.split != "tp" and not plan.sequence_parallel:
        return tensor.bytes_per_token
    whole = plan.rules.gathered_inputs if tensor.split == "gathered" else 0.0
    return tensor.bytes_per_token * (whole + (1 - whole) / plan.tp)


def block_bytes(model: ModelShape, plan: Plan, sequence_length: int, recompute: str) -> float:
    """What one block keeps of one micro-batch on one rank, in bytes.

    Args:
        model: The model.
        plan: The layout.
        sequence_length: Tokens in a sequence, before context parallelism splits it.
        recompute: "none", "selective" or "full"; often the plan's own.
    """
    tokens = plan.micro_batch * sequence_length / plan.cp
    if recompute == "full":
        return tokens * on_rank(Saved("block input", _input_bytes(model, plan), "sequence"), plan)
    tensors = saved_tensors(model, plan, sequence_length)
    kept = [t for t in tensors if not (t.scores and recompute == "selective")]
    return tokens * sum(on_rank(tensor, plan) for tensor in kept)


def working_bytes(model: ModelShape, plan: Plan, sequence_length: int) -> float:
    """Gradients alive at once inside one block's backward pass, in bytes.

    The gradient of the residual stream, with sequence parallelism also a gathered input; and the
    widest inner step: GELU's two sides, SwiGLU's three, five where it is unfused (silu(gate), up,
    gate, and both joined), or the scores and their gradient.
    """
    tokens = plan.micro_batch * sequence_length / plan.cp
    width = plan.rules.residual_bytes
    sides = 2 if model.family == "gpt" else 3 if plan.rules.fused_gate else 5
    inner = width * model.feedforward * sides / plan.tp
    if plan.attention == "unfused":
        inner = max(inner, 2 * width * model.heads * sequence_length / plan.tp)
    return tokens * (_input_bytes(model, plan) * (1 + plan.sequence_parallel) + inner)


def _input_bytes(model: ModelShape, plan: Plan) -> float:
    return plan.rules.residual_bytes * model.hidden
