"""Checks of lesson and lab 06, "Seven billion parameters on 24 GB"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from utils.labs.finetune_7b import simulated_finetune
from utils.labs.verdict import Verdict, correct, not_yet
from utils.memory import Measurement
from utils.models import Transformer, TransformerConfig
from utils.techniques import LoraLinear, add_lora
from utils.techniques.library import bitsandbytes_problem
from utils.techniques.nf4 import BLOCK, dequantize_blocks, nearest, nf4_levels, quantize_blocks
from utils.units import GB, format_bytes, parse_bytes

CAP = "24GB"
SHORTEST = 1024  # tokens of a sequence, exercise 4
ENOUGH = 16_384  # tokens a step, exercise 4
LARGEST = 65_536  # tokens a step that exercise 4 simulates


def offloaded_gigabytes(answer: Any) -> Verdict:
    """Lesson 06: what offloading the optimizer state of 20 million fp32 adapters would free."""
    if not isinstance(answer, (int, float)):
        return not_yet("a number of GB is wanted", got=repr(answer))
    if abs(answer - 0.16) < 0.02:
        return correct("two moments of four bytes: 0.16 GB of 24")
    nudges = {
        0.08: "That is the weights, or one of the two moments. Adam keeps both.",
        0.32: "Only the optimizer state goes. Weights and gradients of the adapters stay.",
    }
    if abs(answer - 160) < 20:
        return not_yet(expected="GB", got=answer, nudge="That is MB. A GB has a thousand of them.")
    near = [text for value, text in nudges.items() if abs(answer - value) < 0.01]
    base = "That counts the frozen model. Nothing of it is in the optimizer." if answer > 1 else ""
    nudge = (near or [base or "Two moments per adapter parameter, four bytes each."])[0]
    return not_yet(expected="bytes of Adam's moments", got=f"{answer} GB", nudge=nudge)


def lora_states(function: Callable[..., Any]) -> Verdict:
    """Exercise 1: the states sheet of a LoRA run."""
    matrices, frozen, rank = [(4096, 4096), (4096, 1024)], 1_000_000, 16
    count = rank * sum(a + b for a, b in matrices)
    right = {"frozen weights": 2 * frozen, "adapters": 4 * count, "gradients": 4 * count,
             "optimizer state": 8 * count}  # fmt: skip
    found = function(frozen, matrices, rank)
    if not isinstance(found, dict) or set(found) != set(right):
        return not_yet("a dict with four entries is wanted", expected=list(right), got=found)
    for name, wanted in right.items():
        if found[name] != wanted:
            nudge = _states_nudge(name, found[name], frozen, matrices, count)
            return not_yet(f"{name!r}", expected=wanted, got=found[name], nudge=nudge)
    return correct("frozen weights are stored; only adapters have gradients and moments")


def _states_nudge(name: str, found: Any, frozen: int, matrices: list, count: int) -> str:
    full = sum(a * b for a, b in matrices)
    if name == "frozen weights" and found == 4 * frozen:
        return "The frozen model is in bf16: two bytes a weight."
    if found in (2 * count, 4 * count) and name != "gradients":
        return "How many bytes does one adapter parameter take here? Adapters are fp32; Adam keeps two moments."
    if found in (4 * full, 8 * full):
        return "That is a full matrix. An adapter is two thin ones: rank x inputs and outputs x rank."
    if isinstance(found, (int, float)) and found >= 2 * frozen:
        return "That counts the frozen weights. What is frozen has no gradient and no moments."
    return "Each adapted matrix gets rank * (inputs + outputs) parameters."


def nf4_quantize(function: Callable[[Tensor, Tensor], Any]) -> Verdict:
    """Exercise 2: codes and scales of blocks of 64."""
    torch.manual_seed(2)
    weight = torch.randn(8, 64) * torch.linspace(0.1, 3, 8)[:, None]
    levels = nf4_levels()
    found = function(weight.clone(), levels)
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(torch.is_tensor, found)):
        return not_yet("two tensors are wanted: codes and scales", got=type(found).__name__)
    codes, scales = found
    if scales.numel() == 1:
        nudge = "One outlier then coarsens all other weights. A block is 64 neighbours."
        return not_yet("one scale for the whole tensor", expected="one scale per block", nudge=nudge)
    if codes.numel() != 512 or scales.numel() != 8:
        got = f"{codes.numel()} codes and {scales.numel()} scales"
        return not_yet("for 512 weights", expected="512 codes and 8 scales", got=got)
    right_codes, right_scales = quantize_blocks(weight, levels, BLOCK)
    if not torch.allclose(scales.flatten().float(), right_scales):
        return not_yet("the scales", expected=right_scales[:2].tolist(),
                       got=scales.flatten()[:2].tolist(), nudge=_scales_nudge(weight, scales))  # fmt: skip
    if not torch.equal(codes.flatten().long(), right_codes.long()):
        return _wrong_codes(weight, codes.flatten().long(), right_codes.long())
    back = dequantize_blocks(right_codes, right_scales, levels, BLOCK)
    error = (back - weight.flatten()).abs().mean().item()
    return correct("the same codes as bitsandbytes", score=f"mean error {error:.4f}")


def _scales_nudge(weight: Tensor, scales: Tensor) -> str:
    blocks = weight.view(-1, BLOCK)
    if torch.allclose(scales.flatten().float(), blocks.amax(dim=1)):
        return "That is the largest value. The largest magnitude can be negative."
    if torch.allclose(scales.flatten().float(), blocks.std(dim=1), rtol=0.05):
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
        nudge = "Those are 16 even steps. The levels of NF4 are dense near zero: compare with `levels`."
    elif (codes == below).float().mean() > 0.98:
        nudge = "That takes the level below each weight. Take the nearest one."
    elif (codes == nearest(weight.flatten(), levels).long()).float().mean() > 0.98:
        nudge = "Divide each block by its scale before you look for a level."
    else:
        nudge = "The code of a weight is the number of the level nearest to weight / scale."
    return not_yet(share, nudge=nudge)


def merged_weight(function: Callable[..., Any]) -> Verdict:
    """Exercise 3: W + alpha / rank * B A."""
    torch.manual_seed(3)
    weight, down, up = torch.randn(6, 6), torch.randn(2, 6), torch.randn(6, 2)
    alpha, before = 8.0, weight.clone()
    found = function(weight, down, up, alpha)
    if not torch.equal(weight, before):
        nudge = "Return a new tensor. A base model is often shared by several adapters."
        return not_yet("the given weight was changed", nudge=nudge)
    if not torch.is_tensor(found) or found.shape != weight.shape:
        got = tuple(found.shape) if torch.is_tensor(found) else type(found).__name__
        nudge = "B A has the shape of W: (outputs, rank) times (rank, inputs)."
        return not_yet("the shape", expected=(6, 6), got=got, nudge=nudge)
    update = up @ down
    wrong = {
        "The update is multiplied by alpha / rank. Here that is 4.": update,
        "That multiplies by alpha alone. Divide by the rank.": alpha * update,
        "That divides by the number of inputs. The rank is the number of rows of A.": alpha / 6 * update,
        "That is the update transposed. First A (down), then B (up).": 4 * update.T,
    }  # fmt: skip
    if torch.allclose(found, weight + 4 * update, atol=1e-5):
        return correct("the merged layer computes what layer and adapter did")
    if torch.allclose(found, 4 * update, atol=1e-5):
        return not_yet("the frozen weight is missing", nudge="Merged means the sum.")
    for nudge, guess in wrong.items():
        if torch.allclose(found, weight + guess, atol=1e-5):
            return not_yet("another update was added", nudge=nudge)
    return not_yet("x @ merged.T differs from layer plus adapter", nudge="W + (alpha / rank) * B A.")


def fit(answer: dict[str, Any]) -> Verdict:
    """Exercise 4: as many tokens a step as 24 GB hold, of at least 1,024 a sequence."""
    method, length, batch = answer.values()
    from utils.models.finetune import METHODS

    if method not in METHODS:
        return not_yet("the method", expected=f"one of {', '.join(METHODS)}", got=repr(method))
    if METHODS[method].needs_bitsandbytes and (problem := bitsandbytes_problem()):
        return not_yet(f"{method} cannot be tried here", nudge=f"{problem}; LoRA runs without it.")
    if not all(isinstance(n, int) and n > 0 for n in (length, batch)):
        return not_yet("two whole numbers above zero are wanted", got=(length, batch))
    if length < SHORTEST:
        nudge = "The texts are that long. Cut shorter, the model never sees their ends."
        return not_yet("the sequences", expected=f"{SHORTEST} tokens or more", got=length, nudge=nudge)
    if length * batch > LARGEST:
        nudge = f"Begin lower, at {SHORTEST} tokens and micro-batch 1."
        return not_yet(f"{length * batch:,} tokens a step are far too many", nudge=nudge)
    found = simulated_finetune(method, length, batch)
    if found.peak_bytes > parse_bytes(CAP):
        over = f"{found.peak_bytes / GB:.1f} GB (simulated), its peak in {found.peak_phase}"
        nudge = _fit_nudge(found)
        return not_yet("it does not fit", expected=f"at most {CAP}", got=over, nudge=nudge)
    tokens = length * batch
    if tokens < ENOUGH:
        got = f"{tokens:,} tokens a step at {found.peak_bytes / GB:.1f} GB (simulated)"
        nudge = "What is the largest category now? Is there a method that shrinks it?"
        return not_yet("it fits, and more would", expected=f"{ENOUGH:,} or more", got=got, nudge=nudge)
    return correct(f"it peaks at {found.peak_bytes / GB:.1f} GB (simulated)", score=f"{tokens:,} tokens a step")


def _fit_nudge(found: Measurement) -> str:
    largest = max(found.breakdown, key=lambda category: found.breakdown[category])
    return (f"The largest category at the peak is {largest}, "
            f"{format_bytes(found.breakdown[largest])}. What shrinks that?")  # fmt: skip


def cured_finetune(function: Callable[[nn.Module, Tensor], Any]) -> Verdict:
    """Exercise 5: adapters that move, on a base that does not."""
    torch.manual_seed(5)
    config = TransformerConfig(vocabulary=32, hidden=32, layers=2, heads=2, feedforward=64)
    model, tokens = Transformer(config), torch.randint(0, 32, (4, 17))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    losses = function(model, tokens)
    if not isinstance(losses, list) or len(losses) < 2:
        return not_yet("a list with the loss of each step is wanted", got=type(losses).__name__)
    adapters = [part.up.weight for part in model.modules() if isinstance(part, LoraLinear)]
    if not adapters:
        return not_yet("the model has no adapters any more", nudge="Keep the call of add_lora.")
    kept = {name.replace(".base.", "."): value for name, value in model.state_dict().items()}
    if not all(torch.equal(kept[name], value) for name, value in base.items()):
        nudge = "LoRA leaves the frozen weights as they are. Which parameters does the optimizer get?"
        return not_yet("the frozen weights have changed", nudge=nudge)
    if not all(value.any() for value in adapters):
        nudge = "An adapter that is still zero was never stepped. Does the optimizer know it?"
        return not_yet("the adapters have not moved", got=f"losses {_short(losses)}", nudge=nudge)
    if not losses[-1] < losses[0] - 0.02:
        nudge = "The adapters move and the loss does not fall. Is the learning rate large enough?"
        return not_yet("the loss does not fall", got=_short(losses), nudge=nudge)
    return correct(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, the base untouched")


def _short(losses: list[float]) -> str:
    return f"{losses[0]:.4f} to {losses[-1]:.4f}"
