"""The checks of lab 06: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jupytext
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_cases import definitions, nudged, solved_lab
from torch import Tensor, nn

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_06 import checks as lab_06
from utils.techniques import add_lora
from utils.techniques.nf4 import nearest, nf4_levels

LAB = solved_lab("intermediate/06_seven_billion")
EXERCISES = ["lora_states", "nf4_quantize", "merged_weight", "cured_finetune"]


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB, torch=torch, F=F, nn=nn, add_lora=add_lora)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    assert getattr(lab_06, exercise)(solved[exercise]).status is Status.CORRECT


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    notebook = jupytext.read(LAB.parents[3] / "labs/intermediate/06_seven_billion.ipynb")
    cells = [c.source for c in notebook.cells if c.source.startswith(f"def {exercise}(")]
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(cells[0].split("\ncheck(")[0], names)
    assert check(f"06.{exercise}", names[exercise]).status is Status.NOT_ATTEMPTED


# Exercise 1


def sheet(frozen_bytes: int = 2, adapter_bytes: int = 4, moments: int = 8, full: bool = False,
          frozen_gradients: bool = False) -> Callable[..., dict[str, int]]:  # fmt: skip
    def lora_states(frozen: int, matrices: list[tuple[int, int]], rank: int) -> dict[str, int]:
        count = sum(a * b if full else rank * (a + b) for a, b in matrices)
        trained = count + frozen if frozen_gradients else count
        return {"frozen weights": frozen_bytes * frozen, "adapters": adapter_bytes * count,
                "gradients": 4 * trained, "optimizer state": moments * count}  # fmt: skip

    return lora_states


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (sheet(frozen_bytes=4), "two bytes a weight"),
        (sheet(adapter_bytes=2), "Adapters are fp32"),
        (sheet(moments=4), "two moments"),
        (sheet(full=True), "full matrix"),
        (sheet(moments=12), "a master copy"),
        (lambda f, m, r: sheet()(f, m, r) | {"gradients": math.nan}, "no finite number"),
        (sheet(frozen_gradients=True), "What is frozen has no gradient"),
        (lambda *args: 12, "a dict with the keys"),
        (lambda *args: None, "returns nothing"),
        (lambda f, m, r: sheet()(f, m, 16), "rank * (inputs + outputs)"),
    ],
)
def test_wrong_sheets(wrong: Callable[..., Any], words: str) -> None:
    nudged(lab_06.lora_states(wrong), words)


# Exercise 2


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (per_tensor, "one scale for the whole tensor"),
        (per_row, "one scale for each row"),
        (lambda w, levels: quantizer(per_block)(w.T, levels), "row by row"),
        (quantizer(per_block, torch.linspace(-1, 1, 16)), "16 even steps"),
        (quantizer(lambda blocks: blocks.amax(dim=1)), "largest magnitude can be negative"),
        (quantizer(lambda blocks: blocks.amax(dim=1)), "block 3, the first of 2"),
        (quantizer(lambda blocks: blocks.std(dim=1)), "Not the deviation"),
        (level_below, "Take the nearest one"),
        (unscaled, "Divide each block by its scale"),
        (lambda w, levels: (w[0], w[0]), "for 512 weights"),
        (lambda w, levels: None, "two tensors"),
        (lambda w, levels: (torch.zeros(512), torch.full((8,), math.nan)), "block 0"),
    ],
)
def test_wrong_quantizers(wrong: Callable[..., Any], words: str) -> None:
    nudged(lab_06.nf4_quantize(wrong), words)


def test_codes_of_any_integer_type_and_shape() -> None:
    def nf4_quantize(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        parts = weight.flatten().split(64)
        scales = torch.stack([part.abs().max() for part in parts])
        codes = torch.cat([nearest(part / part.abs().max(), nf4_levels()) for part in parts])
        whole = codes.numel() % 64 == 0
        return (codes.int().view(-1, 64) if whole else codes.int()), scales

    assert lab_06.nf4_quantize(nf4_quantize).status is Status.CORRECT


def padded(fill: float, codes_kept: slice) -> Callable[..., Any]:
    def nf4_quantize(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64), value=fill).view(-1, 64)
        codes = nearest(blocks / per_block(blocks)[:, None], levels).flatten()
        return (codes if weight.numel() % 64 == 0 else codes[codes_kept]), per_block(blocks)

    return nf4_quantize


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (padded(0.0, slice(None)), "512 codes and 8 scales"),
        (padded(0.0, slice(12, None)), "no others"),
        (padded(1.0, slice(500)), "must not be its largest magnitude"),
        (padded(9.0, slice(500)), "must not be its largest magnitude"),
        (lambda w, levels: padded(0.0, slice(None))(w.flatten()[: w.numel() // 64 * 64], levels),
         "the 52 that are left"),
    ],
)  # fmt: skip
def test_a_short_last_block(wrong: Callable[..., Any], words: str) -> None:
    nudged(lab_06.nf4_quantize(wrong), words)


def test_whole_blocks_alone_are_not_enough() -> None:
    report = check("06.nf4_quantize", quantizer(per_block))
    assert report.status is Status.NOT_YET and "500" in str(report)


# Exercise 3


def in_place(weight: Tensor, down: Tensor, up: Tensor, alpha: float) -> Tensor:
    weight += alpha / down.shape[0] * up @ down
    return weight


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda w, a, b, alpha: w + b @ a, "multiplied by alpha / rank"),
        (lambda w, a, b, alpha: w + alpha * b @ a, "Divide by the rank"),
        (lambda w, a, b, alpha: w + alpha / a.shape[1] * b @ a, "the number of rows of A"),
        (lambda w, a, b, alpha: w + 4 * (b @ a).T, "transposed"),
        (lambda w, a, b, alpha: 4 * b @ a, "frozen weight is missing"),
        (lambda w, a, b, alpha: a @ b, "has the shape of W"),
        (lambda w, a, b, alpha: w, "another update"),
        (in_place, "the given weight was changed"),
        (lambda *args: None, "returns nothing"),
        (lambda w, a, b, alpha: w + 4 * b @ a, "multiplies by 4"),
    ],
)
def test_wrong_merges(wrong: Callable[..., Any], words: str) -> None:
    verdict = lab_06.merged_weight(wrong)
    assert verdict.status is Status.NOT_YET
    if words != "another update":
        nudged(verdict, words)


# Exercise 4


def choice(method: Any, length: Any, batch: Any) -> dict[str, Any]:
    return {"method": method, "sequence length": length, "micro-batch": batch}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (choice("DoRA", 1024, 1), "a method of fine-tuning"),
        (choice("LoRA", 1024, 1.5), "a whole number of sequences"),
        (choice("LoRA", 1024, math.nan), "a whole number of sequences"),
        (choice("LoRA", 1024, -1), "above zero"),
        (choice("LoRA", 512, 4), "never sees their ends"),
        (choice("LoRA", 1024, 1024), "far too many"),
    ],
)
def test_choices_that_need_no_simulation(answer: dict[str, Any], words: str) -> None:
    nudged(lab_06.fit(answer), words)


def test_the_solution_fits() -> None:
    """Whole numbers of numpy, and the entries in another order."""
    answer = choice("QLoRA + checkpointing", np.int64(1115), np.int64(9))
    found = check("06.fit", dict(reversed(answer.items()))).verdict
    assert found.status is Status.CORRECT
    assert found.score == f"10,035 tokens a step, par {lab_06.PAR:,}"


def test_a_choice_that_needs_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_06, "bitsandbytes_problem", lambda: "bitsandbytes is not installed")
    nudged(lab_06.fit(choice("QLoRA", 1024, 1)), "bitsandbytes is not installed; LoRA runs")


def test_a_full_fine_tune_does_not_fit() -> None:
    nudged(lab_06.fit(choice("full fine-tune", 1024, 1)), "does not fit")


def test_a_choice_that_does_not_fit_names_the_category() -> None:
    nudged(lab_06.fit(choice("QLoRA", 1024, 8)), "largest category at the peak is activations")


def test_the_answer_of_the_lesson_is_none_here() -> None:
    """What the lesson's map shows for Llama-2: four times the vocabulary changes it."""
    nudged(lab_06.fit(choice("QLoRA + checkpointing", 1024, 16)), "does not fit")


def test_a_choice_that_fits_with_room_to_spare() -> None:
    nudged(lab_06.fit(choice("QLoRA", 1024, 1)), "more would")


# Exercise 5


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


def test_gradients_may_be_cleared_at_the_end_of_a_step() -> None:
    verdict = lab_06.cured_finetune(clears_at_the_end)
    assert verdict.status is Status.CORRECT, verdict


def trains_everything(model: nn.Module, tokens: Tensor) -> list[float]:
    add_lora(model, rank=4).requires_grad_(True)
    return train(model, tokens, list(model.parameters()), 1e-2)


def too_slow(model: nn.Module, tokens: Tensor) -> list[float]:
    add_lora(model, rank=4)
    return train(model, tokens, [p for p in model.parameters() if p.requires_grad], 1e-7)


def without_adapters(model: nn.Module, tokens: Tensor) -> list[float]:
    return train(model, tokens, list(model.parameters()), 1e-2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (trains_everything, "frozen weights have changed"),
        (too_slow, "learning rate large enough"),
        (lambda model, tokens: trained(model, tokens, clears=False), "What clears them, and when?"),
        (lambda model, tokens: trained(model, tokens) and [9, math.nan, 1], "is no finite number"),
        (only_moved, "Does the model itself get better?"),
        (without_adapters, "no adapters any more"),
        (lambda model, tokens: None, "a list with the loss"),
    ],
)
def test_cures_that_do_not_cure(wrong: Callable[..., Any], words: str) -> None:
    nudged(lab_06.cured_finetune(wrong), words)


def test_the_broken_run_of_the_lab_is_no_cure(solved: dict[str, Any]) -> None:
    verdict = lab_06.cured_finetune(solved["broken_finetune"])
    nudged(verdict, "have not moved")
    nudged(verdict, "Does the optimizer know it")


# All exercises


class Agreeable(Tensor):
    """Equal to whatever it is compared with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.equal, torch.allclose):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_that_equals_everything_is_none() -> None:
    merged = lambda weight, down, up, alpha: torch.zeros_like(weight).as_subclass(Agreeable)  # noqa: E731
    nudged(lab_06.merged_weight(merged), "Agreeable is a class of its own")

    def codes(weight: Tensor, levels: Tensor) -> Any:
        blocks = -(-weight.numel() // 64)
        return tuple(torch.zeros(n).as_subclass(Agreeable) for n in (weight.numel(), blocks))

    nudged(lab_06.nf4_quantize(codes), "Agreeable is a class of its own")


def test_arrays_of_numpy_are_tensors(solved: dict[str, Any]) -> None:
    arrays = lambda *given: tuple(part.numpy() for part in solved["nf4_quantize"](*given))  # noqa: E731
    assert lab_06.nf4_quantize(arrays).status is Status.CORRECT
    merged = lambda *given: solved["merged_weight"](*given).numpy()  # noqa: E731
    assert lab_06.merged_weight(merged).status is Status.CORRECT


def test_a_scale_without_what_is_after_the_point() -> None:
    floored = lambda weight, down, up, alpha: weight + alpha // down.shape[0] * up @ down  # noqa: E731
    nudged(lab_06.merged_weight(floored), "drops what is after the point")
