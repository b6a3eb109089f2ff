"""Answers to the exercises of lab 06 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.labs.mistakes import KnownAnswers
from utils.techniques import add_lora
from utils.techniques.nf4 import nearest, nf4_levels

known = KnownAnswers()


def sheet(
    frozen_bytes: int = 2,
    adapter_bytes: int = 4,
    moments: int = 8,
    full: bool = False,
    frozen_gradients: bool = False,
) -> Callable[..., dict[str, int]]:
    def lora_states(frozen: int, matrices: list[tuple[int, int]], rank: int) -> dict[str, int]:
        count = sum(a * b if full else rank * (a + b) for a, b in matrices)
        trained = count + frozen if frozen_gradients else count
        return {
            "frozen weights": frozen_bytes * frozen,
            "adapters": adapter_bytes * count,
            "gradients": 4 * trained,
            "optimizer state": moments * count,
        }

    return lora_states


known.mistakes(
    "lora_states",
    frozen_in_fp32=(sheet(frozen_bytes=4), "two bytes a weight"),
    adapters_in_bf16=(sheet(adapter_bytes=2), "Adapters are fp32"),
    one_moment=(sheet(moments=4), "two moments"),
    full_matrix=(sheet(full=True), "full matrix"),
    master_copy=(sheet(moments=12), "a master copy"),
    not_finite=(lambda f, m, r: sheet()(f, m, r) | {"gradients": math.nan}, "no finite number"),
    frozen_gradients=(sheet(frozen_gradients=True), "What is frozen has no gradient"),
    a_number=(lambda *args: 12, "a dict with the keys"),
    no_return=(lambda *args: None, "returns nothing"),
    rank_of_its_own=(lambda f, m, r: sheet()(f, m, 16), "rank * (inputs + outputs)"),
)


def quantizer(
    scale: Callable[[Tensor], Tensor], levels: Tensor | None = None
) -> Callable[..., Any]:
    def nf4_quantize(weight: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        blocks = weight.reshape(-1, 64)
        scales = scale(blocks)
        return nearest(
            blocks / scales[:, None], given if levels is None else levels
        ).flatten(), scales

    return nf4_quantize


def per_block(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(dim=1)


def per_tensor(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    return nearest(weight / weight.abs().max(), levels).flatten(), weight.abs().max()


def per_row(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(dim=1)
    return nearest(weight / scales[:, None], levels).flatten(), scales


def level_below(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.reshape(-1, 64)
    scaled = (blocks / per_block(blocks)[:, None]).flatten()
    return (torch.searchsorted(levels, scaled, right=True) - 1).clamp(0, 15), per_block(blocks)


def unscaled(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    return nearest(weight.flatten(), levels), per_block(weight.reshape(-1, 64))


def padded(fill: float, codes_kept: slice) -> Callable[..., Any]:
    def nf4_quantize(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64), value=fill).view(-1, 64)
        codes = nearest(blocks / per_block(blocks)[:, None], levels).flatten()
        return (codes if weight.numel() % 64 == 0 else codes[codes_kept]), per_block(blocks)

    return nf4_quantize


class Agreeable(Tensor):
    """Equal to whatever it is compared with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.equal, torch.allclose):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


def agreeable_codes(weight: Tensor, levels: Tensor) -> Any:
    blocks = -(-weight.numel() // 64)
    return tuple(torch.zeros(n).as_subclass(Agreeable) for n in (weight.numel(), blocks))


known.mistakes(
    "nf4_quantize",
    per_tensor=(per_tensor, "one scale for the whole tensor"),
    per_row=(per_row, "one scale for each row"),
    down_the_columns=(lambda w, levels: quantizer(per_block)(w.T, levels), "row by row"),
    even_steps=(quantizer(per_block, torch.linspace(-1, 1, 16)), "16 even steps"),
    largest_value=(
        quantizer(lambda blocks: blocks.amax(dim=1)),
        "largest magnitude can be negative",
    ),
    largest_value_of_three=(
        quantizer(lambda blocks: blocks.amax(dim=1)),
        "block 3, the first of 2",
    ),
    deviation=(quantizer(lambda blocks: blocks.std(dim=1)), "Not the deviation"),
    level_below=(level_below, "Take the nearest one"),
    unscaled=(unscaled, "Divide each block by its scale"),
    one_row=(lambda w, levels: (w[0], w[0]), "for 512 weights"),
    nothing=(lambda w, levels: None, "two tensors"),
    not_finite=(lambda w, levels: (torch.zeros(512), torch.full((8,), math.nan)), "block 0"),
    codes_of_the_padding=(padded(0.0, slice(None)), "512 codes and 8 scales"),
    first_codes_dropped=(padded(0.0, slice(12, None)), "no others"),
    padded_with_one=(padded(1.0, slice(500)), "must not be its largest magnitude"),
    padded_with_nine=(padded(9.0, slice(500)), "must not be its largest magnitude"),
    tail_left_out=(
        lambda w, levels: padded(0.0, slice(None))(w.flatten()[: w.numel() // 64 * 64], levels),
        "the 52 that are left",
    ),
    whole_blocks_alone=(quantizer(per_block), "500"),
    equal_to_everything=(agreeable_codes, "Agreeable is a class of its own"),
)


@known.right("nf4_quantize")
def block_by_block(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    parts = weight.flatten().split(64)
    scales = torch.stack([part.abs().max() for part in parts])
    codes = torch.cat([nearest(part / part.abs().max(), nf4_levels()) for part in parts])
    whole = codes.numel() % 64 == 0
    return (codes.int().view(-1, 64) if whole else codes.int()), scales


@known.right("nf4_quantize")
def arrays_of_numpy(solution: Any, *given: Tensor) -> Any:
    return tuple(part.numpy() for part in solution(*given))


def in_place(weight: Tensor, down: Tensor, up: Tensor, alpha: float) -> Tensor:
    weight += alpha / down.shape[0] * up @ down
    return weight


known.mistakes(
    "merged_weight",
    no_scale=(lambda w, a, b, alpha: w + b @ a, "multiplied by alpha / rank"),
    alpha_alone=(lambda w, a, b, alpha: w + alpha * b @ a, "Divide by the rank"),
    by_inputs=(lambda w, a, b, alpha: w + alpha / a.shape[1] * b @ a, "the number of rows of A"),
    transposed=(lambda w, a, b, alpha: w + 4 * (b @ a).T, "transposed"),
    no_weight=(lambda w, a, b, alpha: 4 * b @ a, "frozen weight is missing"),
    shape=(lambda w, a, b, alpha: a @ b, "has the shape of W"),
    nothing_added=(lambda w, a, b, alpha: w, "x @ merged.T differs from layer plus adapter"),
    in_place=(in_place, "the given weight was changed"),
    no_return=(lambda *args: None, "returns nothing"),
    by_four=(lambda w, a, b, alpha: w + 4 * b @ a, "multiplies by 4"),
    equal_to_everything=(
        lambda w, a, b, alpha: torch.zeros_like(w).as_subclass(Agreeable),
        "Agreeable is a class of its own",
    ),
    floored=(
        lambda w, a, b, alpha: w + alpha // a.shape[0] * b @ a,
        "drops what is after the point",
    ),
)
known.rights("merged_weight", array_of_numpy=lambda solution, *given: solution(*given).numpy())


def choice(method: Any, length: Any, batch: Any) -> dict[str, Any]:
    return {"method": method, "sequence length": length, "micro-batch": batch}


known.mistakes(
    "fit",
    another_method=(choice("DoRA", 1024, 1), "a method of fine-tuning"),
    half_a_sequence=(choice("LoRA", 1024, 1.5), "a whole number of sequences"),
    not_finite=(choice("LoRA", 1024, math.nan), "a whole number of sequences"),
    negative=(choice("LoRA", 1024, -1), "above zero"),
    too_short=(choice("LoRA", 512, 4), "never sees their ends"),
    far_too_many=(choice("LoRA", 1024, 1024), "far too many"),
    full=(choice("full fine-tune", 1024, 1), "does not fit"),
    micro_batch_of_eight=(
        choice("QLoRA", 1024, 8),
        "largest category at the peak is activations",
    ),
    of_the_lesson=(
        choice("QLoRA + checkpointing", 1024, 16),
        "does not fit",
    ),  # a vocabulary of 32k
    room_to_spare=(choice("QLoRA", 1024, 1), "more would"),
)


@known.right("fit", "10,026 tokens a step, par 10,026")
def numbers_of_numpy(solution: dict[str, Any]) -> dict[str, Any]:
    found = choice("QLoRA + checkpointing", np.int64(1114), np.int64(9))
    return dict(reversed(found.items()))


def train(
    model: nn.Module,
    tokens: Tensor,
    parameters: list[nn.Parameter],
    lr: float,
    clears: bool = True,
) -> list[float]:
    optimizer, losses = torch.optim.AdamW(parameters, lr=lr), []
    for _ in range(20):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if clears:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module, tokens: Tensor, **settings: Any) -> list[float]:
    add_lora(model, rank=4)
    return train(
        model, tokens, [p for p in model.parameters() if p.requires_grad], 1e-2, **settings
    )


def only_moved(model: nn.Module, tokens: Tensor) -> list[float]:
    add_lora(model, rank=4)
    for parameter in model.parameters():
        parameter.data.add_(0.001 * parameter.requires_grad)
    return [3.0, 1.0]


@known.right("cured_finetune")
def clears_at_the_end(model: nn.Module, tokens: Tensor) -> list[float]:
    add_lora(model, rank=4)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(own, lr=0.5, momentum=0.9), []
    for _ in range(20):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


def trains_everything(model: nn.Module, tokens: Tensor) -> list[float]:
    add_lora(model, rank=4).requires_grad_(True)
    return train(model, tokens, list(model.parameters()), 1e-2)


def too_slow(model: nn.Module, tokens: Tensor) -> list[float]:
    add_lora(model, rank=4)
    return train(model, tokens, [p for p in model.parameters() if p.requires_grad], 1e-7)


def without_adapters(model: nn.Module, tokens: Tensor) -> list[float]:
    return train(model, tokens, list(model.parameters()), 1e-2)


@known.mistake("cured_finetune", "was never stepped. Does the optimizer know it")
def broken_finetune(model: nn.Module, tokens: Tensor) -> list[float]:
    """The lab's own: the optimizer is given what the adapters replace."""
    before = list(model.parameters())
    add_lora(model, rank=4)
    return train(model, tokens, before, 1e-2)


known.mistakes(
    "cured_finetune",
    trains_everything=(trains_everything, "frozen weights have changed"),
    too_slow=(too_slow, "learning rate large enough"),
    never_clears=(
        lambda model, tokens: trained(model, tokens, clears=False),
        "What clears them, and when?",
    ),
    not_finite=(
        lambda model, tokens: trained(model, tokens) and [9, math.nan, 1],
        "is no finite number",
    ),
    only_moved=(only_moved, "Does the model itself get better?"),
    without_adapters=(without_adapters, "no adapters any more"),
    no_return=(lambda model, tokens: None, "a list with the loss"),
)
