"""What lab 10 knows of its seven patients: cause, evidence, a cure, and what wrong ideas are told."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.clinic.ward import Examination, Patient, admit, examine, numbered

CAUSES = (
    "kept graph", "large logits", "fragmentation", "optimizer step", "missing no_grad",
    "forgotten reference", "large input",
)  # fmt: skip
RESERVED = "reserved, not alive"


@dataclass(frozen=True)
class PatientAnswers:
    """One patient's answers.

    Args:
        cause: one of `CAUSES`.
        categories: what fills the memory at the peak, any of these.
        lines: texts of the lines that make or keep it, any of these.
        cure: the lab's own, whose bytes are the par.
        wrong_causes: a nudge for each plausible other cause.
        still_over: a nudge for a cure after which the patient is still over its budget.
        other_losses: the same for one that changes the losses.
        wrong_cures: a nudge for each text that a known wrong cure adds to the script.
        by_sgd: also compare the losses under SGD, since AdamW hides the size of gradients.
        by_weights: also compare the last weights, where one number of them is no proof.
        by_print: also compare the numbers that it prints.
    """

    cause: str
    categories: tuple[str, ...]
    lines: tuple[str, ...]
    cure: Callable[[Patient], Patient]
    still_over: str
    other_losses: str
    wrong_causes: Mapping[str, str] = field(default_factory=dict)
    wrong_cures: Mapping[str, str] = field(default_factory=dict)
    by_sgd: bool = False
    by_weights: bool = False
    by_print: bool = False


def lab_patient(number: int) -> Patient:
    """The patient of a number, as it came in."""
    return admit(importlib.import_module(f".lab_patients.case_{number}", __package__))


@functools.cache
def as_it_came(number: int) -> Examination:
    """The examination of a patient before its cure."""
    return examine(lab_patient(number))


@functools.cache
def after_cure(number: int) -> Examination:
    """The same after the lab's own cure: its bytes are the par."""
    return examine(WARD[number].cure(lab_patient(number)))


def case_file(number: int) -> str:
    """The patient's script with line numbers."""
    module = importlib.import_module(f".lab_patients.case_{number}", __package__)
    return numbered(inspect.getsource(module))


def _step_in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer a parameter, which steps as soon as the gradient is there, and drops it."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3, fused=True) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def _loss_by_rows(texts: torch.Tensor, images: torch.Tensor, rows: int = 128) -> torch.Tensor:
    def summed(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(part @ images.T / 0.07, wanted, reduction="sum")

    pairs = zip(texts.split(rows), torch.arange(len(texts)).split(rows), strict=True)
    parts = [checkpoint(summed, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(parts).sum() / len(texts)  # type: ignore[arg-type]


WARD: dict[int, PatientAnswers] = {
    1: PatientAnswers(
        "forgotten reference", ("activations",), ("skipped.append(error)", "raise FloatingPointError"),
        lambda p: p.edited({"skipped.append(error)": "skipped.append(str(error))"}),
        "An exception holds its traceback, the traceback its frames, and a frame its local "
        "variables. Does the list still hold one?",
        "The broken batches are still to be skipped, and counted, and the others trained on.",
        {"kept graph": "A graph is kept, and by what? No sum of losses goes on: look at who holds the "
         "frame in which it was made.",
         "missing no_grad": "Training needs gradients. Which steps leave something behind?"},
        {"gc.collect": "gc.collect() frees what nobody can reach. This list can be reached.",
         "empty_cache": "empty_cache() gives back free segments. These bytes are alive.",
         "del ": "That deletes a name. The exception in the list holds the frame, and the frame all its "
         "names."},
        by_print=True,
    ),
    2: PatientAnswers(
        "large logits", ("logits and loss", "activations", "temporaries"),
        ("scores = texts @ images.T", "F.cross_entropy(scores"),
        lambda p: p.edited({"loss = pair_loss(texts, images)": "loss = by_rows(texts, images)"},
                           by_rows=_loss_by_rows),
        "The scores are rows x rows. How many rows of them need to be alive at a time, and does "
        "backward compute them again?",
        "Each text is still to be compared with all images of the batch: parts of the rows, all of "
        "the columns. And a mean of means is no mean where parts differ.",
        {"large input": "The inputs are small: 2,304 rows of 64. Which tensor has rows x rows numbers?",
         "kept graph": "Nothing stays from step to step. Look at the phase of the peak."},
        {"ROWS": "Another batch has other pairs, so it is another loss.",
         "autocast": "Lower precision changes the losses. Half of too much may still be too much."},
    ),
    3: PatientAnswers(
        "fragmentation", (RESERVED,), ("history.append",),
        lambda p: p.edited({"losses, history = [], []": "losses, mean = [], torch.zeros_like(weight)",
                            "history.append(weight.detach().clone())":
                            "mean.add_(weight.detach(), alpha=1 / STEPS)",
                            "        weight.zero_()\n        for kept in history:\n"
                            "            weight.add_(kept, alpha=1 / STEPS)":
                            "        weight.copy_(mean)"}),
        "Each copy is made where a large activation has just died, and pins that segment. Make one "
        "room for all of them before the first step, or need only one.",
        "The average is over all steps, each with the same weight.",
        {"forgotten reference": "The history is used at the end. Compare what is alive with what is "
         "reserved.",
         "optimizer step": "SGD without momentum keeps nothing. Look at reserved and allocated."},
        {"empty_cache": "empty_cache() gives back segments that are wholly free. The allocator does so "
         "itself before it fails.",
         "gc.collect": "Everything here is reachable. Compare reserved with allocated."},
        by_weights=True,
    ),
    4: PatientAnswers(
        "optimizer step", ("optimizer state", "gradients"),
        ("torch.optim.AdamW", "optimizer.step()", "loss.backward()"),
        lambda p: p.edited({"    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)":
                            "    return model, in_backward(model)",
                            "        optimizer.zero_grad()\n": "", "        optimizer.step()\n": ""},
                           in_backward=_step_in_backward),
        "Weights, gradients and two moments make four times the parameters. Which of the four need "
        "not all exist at once?",
        "It is still to be AdamW with the same settings, for every parameter.",
        {"large input": "Sixteen rows are nothing. Which category is largest at the peak?",
         "kept graph": "Nothing grows after the first step."},
        {"SGD": "SGD has no moments, and other losses.",
         "Adafactor": "Adafactor is smaller, and another optimizer: the losses change.",
         "set_to_none=True": "That is the default. When, in a step, do all gradients exist together?",
         "foreach": "foreach adds a temporary of the size of all parameters. The states stay.",
         "checkpoint": "Activations are hardly there: sixteen rows. Checkpointing shrinks nothing else."},
    ),
    5: PatientAnswers(
        "missing no_grad", ("activations",), ('model["teacher"](tokens)', 'wanted = model["teacher"]'),
        lambda p: p.edited({'        wanted = model["teacher"](tokens).softmax(-1)':
                            '        with torch.no_grad():\n            '
                            'wanted = model["teacher"](tokens).softmax(-1)'}),
        "Does autograd still record the teacher's forward while it runs? `.detach()` of its result "
        "comes too late: by then all of it was alive at once.",
        "The student is still to learn from the same teacher.",
        {"large logits": "A vocabulary of 256 is small. Whose activations are these?",
         "forgotten reference": "Nothing stays after a step. Which forward keeps what nobody trains?"},
        {"eval()": "eval() changes dropout and batch norm. Autograd does not look at it.",
         ".detach()": "detach() cuts the graph after the forward is over. While it runs, all of its "
         "activations are alive."},
    ),
    6: PatientAnswers(
        "kept graph", ("activations",), ("total = total + loss", "total.backward()"),
        lambda p: p.edited({"            total = total + loss / PARTS":
                            "            (loss / PARTS).backward()\n"
                            "            total = total + loss.detach() / PARTS",
                            "        total.backward()\n": ""}),
        "Until when must the graph of the first small batch live, and which call lets it go?",
        "Gradients add up over backward calls: each small batch counts one eighth, and zero_grad() "
        "comes once a step.",
        {"forgotten reference": "A reference, yes, and to what? `total` holds eight graphs.",
         "missing no_grad": "Every one of these batches is trained on."},
        {"retain_graph": "retain_graph keeps the very graphs that should go.",
         "PARTS = ": "Another number of parts is another batch, with other losses.",
         "loss.item()": "item() cuts the graph, and then there is nothing to train with."},
        by_sgd=True,
    ),
    7: PatientAnswers(
        "large input", ("activations", "temporaries"), ("scores = query", "scores.softmax", "CONTEXT, WIDTH"),
        lambda p: p.edited({"        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)\n": "",
                            "scores.softmax(-1) @ value": "F.scaled_dot_product_attention(query, key, value)"}),
        "The scores are tokens x tokens for each head. Which function gives the same result without "
        "ever holding them?",
        "The attention is not causal, it is scaled by the root of a head's width, and all 1,024 tokens "
        "take part.",
        {"large logits": "There is no vocabulary. Which tensor has tokens x tokens numbers?",
         "fragmentation": "Reserved and allocated agree. Look at the largest blocks alive at the peak."},
        {"CONTEXT": "A shorter context is another problem.",
         "is_causal": "This attention looks both ways: with a causal one the losses differ.",
         "autocast": "Lower precision changes the losses."},
    ),
}  # fmt: skip
