"""Checks of lesson and lab 06, "Seven billion parameters on 24 GB"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.labs.cases import judge, scored, takes
from utils.labs.kinds import Kind, equal, function, keys, number, one_of, several, tensor, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.memory import Measurement
from utils.models import Transformer, TransformerConfig
from utils.techniques.bitsandbytes_import import bitsandbytes_problem
from utils.techniques.lora import LoraLinear
from utils.techniques.nf4 import BLOCK, dequantize_blocks, nearest, nf4_levels, quantize_blocks
from utils.units import GB, format_bytes, parse_bytes

from .finetune import simulated_finetune, stale_steps

CAP = "24GB"
SHORTEST = 1024  # tokens of a sequence, exercise 4
ENOUGH = 9_000  # tokens a step, exercise 4
LARGEST = 32_768  # tokens a step that exercise 4 simulates
PAR = 10_026  # tokens a step, what the solution of exercise 4 reaches
STATES = ("frozen weights", "adapters", "gradients", "optimizer state")
_LORA_RUNS = [(1_000_000, [(4096, 4096), (4096, 1024)], 16), (70_000, [(64, 96)], 4)]


@takes(function())
def lora_states(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: the states sheet of a LoRA run."""
    sheet = keys({name: number() for name in STATES})
    for frozen, matrices, rank in _LORA_RUNS:
        found = sheet.returned(answer(frozen, list(matrices), rank))
        count = rank * sum(a + b for a, b in matrices)
        says = f"for {frozen:,} parameters, matrices {matrices} and rank {rank}"
        for name, right in zip(STATES, (2 * frozen, 4 * count, 4 * count, 8 * count), strict=True):
            nudge = _states_nudge(name, found[name], frozen, matrices, count)
            if verdict := judge(found[name], right, f"{name!r} {says}", nudge=nudge):
                return verdict
    return correct("frozen weights are stored; only adapters have gradients and moments")


def _states_nudge(name: str, found: float, frozen: int, matrices: list, count: int) -> str:
    full = sum(a * b for a, b in matrices)
    if name == "frozen weights" and equal(found, 4 * frozen):
        return "The frozen model is in bf16: two bytes a weight."
    if equal(found, 12 * count):
        return (
            "12 bytes hold a master copy as well. These adapters are fp32 already, and need none."
        )
    if name != "gradients" and (equal(found, 2 * count) or equal(found, 4 * count)):
        return "How many bytes does an adapter parameter take? Adapters are fp32; Adam keeps two moments."
    if equal(found, 4 * full) or equal(found, 8 * full):
        return (
            "That is a full matrix. An adapter is two thin ones: rank x inputs and outputs x rank."
        )
    if found >= 2 * frozen:
        return "That counts the frozen weights. What is frozen has no gradient and no moments."
    return "Each adapted matrix gets rank * (inputs + outputs) parameters."


@takes(function())
def nf4_quantize(answer: Callable[[Tensor, Tensor], Any]) -> Verdict:
    """Exercise 2: codes and scales of blocks of 64, two in each row; then a last block of 52."""
    torch.manual_seed(2)
    weight = (torch.randn(8, BLOCK) * torch.linspace(0.1, 3, 8)[:, None]).view(4, 2 * BLOCK)
    levels = nf4_levels()
    tensors = several(tensor(), 2, "two tensors: codes and scales")
    codes, scales = (part.flatten() for part in tensors.returned(answer(weight.clone(), levels)))
    if verdict := _wrong_sizes(codes, scales):
        return verdict
    right_codes, right_scales = quantize_blocks(weight, levels, BLOCK)
    if verdict := _wrong_scales(weight, scales.float(), right_scales):
        return verdict
    if not torch.equal(codes.long(), right_codes.long()):
        return _wrong_codes(weight, codes.long(), right_codes.long())
    ragged = 0.1 * torch.randn(5, 100)  # seven blocks, and 52 weights: none as large as 1
    if verdict := _wrong_tail(ragged, *tensors.returned(answer(ragged.clone(), levels))):
        return verdict
    back = dequantize_blocks(right_codes, right_scales, levels, BLOCK)
    error = (back - weight.flatten()).abs().mean().item()
    return correct("the same codes as bitsandbytes", score=f"mean error {error:.4f}")


def _wrong_sizes(codes: Tensor, scales: Tensor) -> Verdict | None:
    if scales.numel() == 1:
        nudge = "One outlier then coarsens all other weights. A block is 64 neighbours."
        return not_yet(
            "one scale for the whole tensor", expected="one scale per block", nudge=nudge
        )
    if scales.numel() == 4:
        nudge = (
            "A row of 128 weights is two blocks. A block is 64 neighbours, however long a row is."
        )
        return not_yet("one scale for each row", expected="one scale per block", nudge=nudge)
    if codes.numel() != 512 or scales.numel() != 8:
        got = f"{codes.numel()} codes and {scales.numel()} scales"
        return not_yet("for 512 weights", expected="512 codes and 8 scales", got=got)
    return None


def _wrong_tail(weight: Tensor, codes: Tensor, scales: Tensor) -> Verdict | None:
    """The verdict where the weights do not fill whole blocks."""
    right_codes, right_scales = quantize_blocks(weight, nf4_levels(), BLOCK)
    wanted = f"{weight.numel()} codes and {right_scales.numel()} scales"
    got = f"{codes.numel()} codes and {scales.numel()} scales"
    if got != wanted:
        nudge = "The last block holds the 52 that are left: one scale more, and a code for each of them."
        return not_yet(f"for {weight.numel()} weights", expected=wanted, got=got, nudge=nudge)
    if not torch.allclose(scales.flatten().float(), right_scales):
        return not_yet(
            "a scale differs where the last block is short",
            nudge="What you fill it up with must not be its largest magnitude.",
        )
    if not torch.equal(codes.flatten().long(), right_codes.long()):
        return not_yet(
            "codes differ where the last block is short",
            nudge="Drop the codes of what you added, and no others.",
        )
    return None


def _wrong_scales(weight: Tensor, scales: Tensor, right: Tensor) -> Verdict | None:
    """The verdict on the first block whose scale differs."""
    wrong = ~torch.isclose(scales, right)
    if not wrong.any():
        return None
    first = int(wrong.nonzero()[0])
    return not_yet(
        f"the scale of block {first}, the first of {int(wrong.sum())} that differ",
        expected=f"{right[first]:.4f}",
        got=f"{scales[first]:.4f}",
        nudge=_scales_nudge(weight, scales),
    )


def _scales_nudge(weight: Tensor, scales: Tensor) -> str:
    blocks, columns = weight.view(-1, BLOCK), weight.T.reshape(-1, BLOCK)
    if torch.allclose(scales, blocks.amax(dim=1)):
        return "That is the largest value. The largest magnitude can be negative."
    if torch.allclose(scales, columns.abs().amax(dim=1)):
        return "Those blocks run down the columns. Weights are read row by row."
    if torch.allclose(scales, blocks.std(dim=1), rtol=0.05):
        return "Not the deviation: the largest magnitude, so that every weight lands in -1 .. 1."
    return "The scale of a block is the largest magnitude in it."


def _wrong_codes(weight: Tensor, codes: Tensor, right: Tensor) -> Verdict:
    share = f"{100 * (codes != right).float().mean().item():.0f}% of the codes differ"
    blocks = weight.view(-1, BLOCK)
    scaled = (blocks / blocks.abs().amax(dim=1, keepdim=True)).flatten()
    levels = nf4_levels()
    uniform = nearest(scaled, torch.linspace(-1, 1, 16)).long()
    below = (torch.searchsorted(levels, scaled, right=True) - 1).clamp(0, 15)
    rounded = ((scaled + 1) * 7.5).round().long()
    if (codes == uniform).float().mean() > 0.98 or (codes == rounded).float().mean() > 0.98:
        nudge = (
            "Those are 16 even steps. The levels of NF4 are dense near zero: compare with `levels`."
        )
    elif (codes == below).float().mean() > 0.98:
        nudge = "That takes the level below each weight. Take the nearest one."
    elif (codes == nearest(weight.flatten(), levels).long()).float().mean() > 0.98:
        nudge = "Divide each block by its scale before you look for a level."
    else:
        nudge = "The code of a weight is the number of the level nearest to weight / scale."
    return not_yet(share, nudge=nudge)


@takes(function())
def merged_weight(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: W + alpha / rank * B A."""
    torch.manual_seed(3)
    sizes = [(6, 6, 2, 8.0), (5, 7, 3, 6.0), (5, 7, 4, 10.0)]  # outputs, inputs, rank, alpha
    verdicts = (_wrong_merge(answer, *size) for size in sizes)
    return next(filter(None, verdicts), None) or correct(
        "the merged layer computes what layer and adapter did"
    )


def _wrong_merge(
    answer: Callable[..., Any], outputs: int, inputs: int, rank: int, alpha: float
) -> Verdict | None:
    weight, down, up = (
        torch.randn(outputs, inputs),
        torch.randn(rank, inputs),
        torch.randn(outputs, rank),
    )
    before = weight.clone()
    found = tensor().returned(answer(weight, down, up, alpha))
    if not torch.equal(weight, before):
        nudge = "Return a new tensor. A base model is often shared by several adapters."
        return not_yet("the given weight was changed", nudge=nudge)
    if found.shape != weight.shape:
        nudge = "B A has the shape of W: (outputs, rank) times (rank, inputs)."
        return not_yet(
            "the shape", expected=tuple(weight.shape), got=tuple(found.shape), nudge=nudge
        )
    found, update, scale = found.to(weight.dtype), up @ down, alpha / rank
    if torch.allclose(found, weight + scale * update, atol=1e-5):
        return None
    if torch.allclose(found, scale * update, atol=1e-5):
        return not_yet("the frozen weight is missing", nudge="Merged means the sum.")
    wrong = {
        f"The update is multiplied by alpha / rank. Here that is {scale:g}.": update,
        "That multiplies by alpha alone. Divide by the rank.": alpha * update,
        "That divides by the number of inputs. The rank is the number of rows of A.": alpha
        / inputs
        * update,
        f"alpha // rank drops what is after the point: {alpha:g} / {rank} is {scale:g}.": alpha
        // rank
        * update,
        f"That multiplies by 4. Here alpha is {alpha:g}, and the rank {rank}.": 4 * update,
    }
    if outputs == inputs:
        wrong["That is the update transposed. First A (down), then B (up)."] = scale * update.T
    for nudge, guess in wrong.items():
        if torch.allclose(found, weight + guess, atol=1e-5):
            return not_yet("another update was added", nudge=nudge)
    return not_yet(
        "x @ merged.T differs from layer plus adapter", nudge="W + (alpha / rank) * B A."
    )


def _read_method(value: Any) -> str:
    from utils.models.finetune import METHODS

    return one_of(*METHODS, what="a method").read(value)


@takes(
    keys(
        {
            "method": Kind("a method of fine-tuning", _read_method),
            "sequence length": whole("a whole number of tokens"),
            "micro-batch": whole("a whole number of sequences"),
        }
    )
)
def fit(answer: dict[str, Any]) -> Verdict:
    """Exercise 4: as many tokens a step as 24 GB hold, of at least 1,024 a sequence."""
    method, length, batch = answer["method"], answer["sequence length"], answer["micro-batch"]
    return _no_choice(method, length, batch) or _tried(method, length, batch)


def _no_choice(method: str, length: int, batch: int) -> Verdict | None:
    """The verdict on a choice that need not be simulated."""
    from utils.models.finetune import METHODS

    if METHODS[method].needs_bitsandbytes and (problem := bitsandbytes_problem()):
        return not_yet(f"{method} cannot be tried here", nudge=f"{problem}; LoRA runs without it.")
    if min(length, batch) < 1:
        got = f"{shown(length)} and {shown(batch)}"
        return not_yet("two whole numbers above zero are wanted", got=got)
    if length < SHORTEST:
        nudge = "The texts are that long. Cut shorter, the model never sees their ends."
        return not_yet(
            "the sequences", expected=f"{SHORTEST} tokens or more", got=length, nudge=nudge
        )
    if length * batch > LARGEST:
        nudge = f"Begin lower, at {SHORTEST} tokens and micro-batch 1."
        return not_yet(
            "tokens a step, far too many",
            expected=f"at most {LARGEST:,}",
            got=shown(length * batch),
            nudge=nudge,
        )
    return None


def _tried(method: str, length: int, batch: int) -> Verdict:
    found = simulated_finetune(method, length, batch)
    if found.peak_bytes > parse_bytes(CAP):
        over = f"{found.peak_bytes / GB:.1f} GB (simulated), its peak in {found.peak_phase}"
        nudge = _fit_nudge(found)
        return not_yet("it does not fit", expected=f"at most {CAP}", got=over, nudge=nudge)
    tokens = length * batch
    if tokens < ENOUGH:
        got = f"{tokens:,} tokens a step at {found.peak_bytes / GB:.1f} GB (simulated)"
        nudge = "What is the largest category now? Is there a method that shrinks it?"
        return not_yet(
            "it fits, and more would", expected=f"{ENOUGH:,} or more", got=got, nudge=nudge
        )
    return correct(
        f"it peaks at {found.peak_bytes / GB:.1f} GB (simulated)",
        score=scored(tokens, PAR, "tokens a step"),
    )


def _fit_nudge(found: Measurement) -> str:
    largest = max(found.breakdown, key=lambda category: found.breakdown[category])
    return (
        f"The largest category at the peak is {largest}, "
        f"{format_bytes(found.breakdown[largest])}. What shrinks that?"
    )


@takes(function())
def cured_finetune(answer: Callable[[nn.Module, Tensor], Any]) -> Verdict:
    """Exercise 5: adapters that move, on a base that does not."""
    torch.manual_seed(5)
    config = TransformerConfig(vocabulary=32, hidden=32, layers=2, heads=2, feedforward=64)
    model, tokens = Transformer(config), torch.randint(0, 32, (4, 17))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    losses = several(number("a loss"), what="a list with the loss of each step")
    before = _loss_of(model, tokens)
    with stale_steps() as stale:
        found = losses.returned(answer(model, tokens))
    if len(found) < 2:
        return not_yet("a list with the loss of each step is wanted", got=f"{len(found)} losses")
    return (
        _stale_gradients(stale, found)
        or _wrong_model(model, base, found)
        or _judged_losses(found, _loss_of(model, tokens) - before)
    )


def _loss_of(model: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def _stale_gradients(stale: Sequence[int], losses: Sequence[float]) -> Verdict | None:
    """The verdict on a step with the gradients of the one before; a loss of NaN has other causes."""
    if not stale or not all(map(math.isfinite, losses[: stale[0] + 1])):
        return None
    nudge = "backward() adds to the gradients that are there. What clears them, and when?"
    return not_yet(
        f"step {stale[0] + 1} is taken with gradients of step {stale[0]} in it", nudge=nudge
    )


def _wrong_model(
    model: nn.Module, base: dict[str, Tensor], losses: Sequence[float]
) -> Verdict | None:
    adapters = [part.up.weight for part in model.modules() if isinstance(part, LoraLinear)]
    if not adapters:
        return not_yet("the model has no adapters any more", nudge="Keep the call of add_lora.")
    kept = {name.replace(".base.", "."): value for name, value in model.state_dict().items()}
    if not all(name in kept and torch.equal(kept[name], value) for name, value in base.items()):
        nudge = (
            "LoRA leaves the frozen weights as they are. Which parameters does the optimizer get?"
        )
        return not_yet("the frozen weights have changed", nudge=nudge)
    if not all(value.any() for value in adapters):
        nudge = "An adapter that is still zero was never stepped. Does the optimizer know it?"
        return not_yet("the adapters have not moved", got=f"losses {_short(losses)}", nudge=nudge)
    return None


def _judged_losses(losses: Sequence[float], change: float) -> Verdict:
    if odd := [step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)]:
        nudge = "A run with such a loss is broken, whatever comes after it. Is the learning rate too large?"
        return not_yet(
            f"the loss of step {odd[0]} is no finite number", got=shown(list(losses)), nudge=nudge
        )
    if not change < -0.02:
        nudge = "Losses are those of the model's steps on these tokens. Does the model itself get better?"
        return not_yet(
            "the model's own loss does not fall",
            got=f"{change:+.4f} by your function",
            nudge=f"The adapters move. Is the learning rate large enough? {nudge}",
        )
    if not losses[-1] < losses[0] - 0.02:
        nudge = "The adapters move and the loss does not fall. Is the learning rate large enough?"
        return not_yet("the loss does not fall", got=_short(losses), nudge=nudge)
    return correct(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, the base untouched")


def _short(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4f} to {losses[-1]:.4f}"
