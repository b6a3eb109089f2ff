"""`fit`: the same answer for two functions of one's own, with the cures that need no knowledge of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from utils.checked import asks_first
from utils.fitting.cures import OFFLOAD_COSTS
from utils.fitting.model_fit import Fit
from utils.fitting.training_program import on_the_host
from utils.fitting.trials import NOT_TRIED
from utils.fitting.tried_cures import Cure, Tried
from utils.fitting.verdict import FitVerdict, usable_bytes
from utils.simulation import simulate
from utils.simulation.arguments import refuse_known_mistakes
from utils.techniques.bitsandbytes_import import bitsandbytes_library, has_bitsandbytes
from utils.techniques.checkpointing import checkpoint_blocks

Build = Callable[[], tuple[Any, Any]]
Step = Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Change:
    """A cure, and what it does to a program of which nothing is known.

    Attributes:
        cure: In words; "BLOCKS" in its line stands for the name of the model's blocks.
        on_build: What becomes of model and optimizer.
        on_step: What becomes of the step.
    """

    cure: Cure
    on_build: Callable[[Any, Any], tuple[Any, Any]] = lambda model, optimizer: (model, optimizer)
    on_step: Callable[[Step], Step] = lambda step: step


@asks_first(refuse_known_mistakes)
def fit(
    build: Build,
    step: Step,
    *,
    card: str = "RTX 4090",
    cures: bool = True,
    name: str = "",
    values: Any = None,
) -> Fit:
    """Whether one training step of one's own fits a card, and what would make it need less.

    Args:
        build: Makes model and optimizer, as `simulate` takes it.
        step: Runs one whole step; it makes its own inputs.
        card: A GPU of the catalog.
        cures: Whether changes are tried: recomputing the modules of the longest list of alike blocks,
            keeping what backward needs on the host, AdamW in one kernel and with moments of one byte,
            and the two best of them with one more.
        name: What the model is called; its class if empty.
        values: As `simulate` takes them.

    Raises:
        SimulationError, ValueError: as `simulate` does.
    """
    room = usable_bytes(card)
    if has_bitsandbytes():
        bitsandbytes_library()  # a simulation has to know of it before it begins

    def run(build: Build, step: Step) -> FitVerdict:
        found = simulate(build, step, device=card, name=name, values=values)
        return FitVerdict(found.name, card, found, room, notes=found.notes[1:])

    verdict = run(build, step)
    if not cures:
        return Fit(verdict)
    paths: list[str] = []  # of the blocks, once a model has been made
    trials, refused = {}, {}
    changes = _changes(paths)
    for change in tqdm(changes, desc="trying cures", leave=False):
        try:
            trials[change] = _tried(run, verdict, build, step, (change,))
        except NOT_TRIED as error:
            refused[change.cure.name] = str(error).splitlines()[0]
    named = [_named(tried, paths) for tried in trials.values()]
    gains = sorted((t for t in named if t.gains), key=lambda t: -t.saved_bytes)
    pairs = [_named(tried, paths) for tried in _pairs(run, verdict, build, step, trials)]
    return Fit(
        verdict,
        tuple(gains),
        tuple(t for t in named if not t.gains),
        refused,
        pair=max(pairs, key=lambda tried: tried.saved_bytes, default=None),
        pairs=tuple(pairs),
    )


def _tried(
    run: Callable[[Build, Step], FitVerdict],
    before: FitVerdict,
    build: Build,
    step: Step,
    changes: tuple[Change, ...],
) -> Tried:
    """The program with changes, one after another."""

    def changed() -> tuple[Any, Any]:
        model, optimizer = _pair(build())
        for change in changes:
            model, optimizer = change.on_build(model, optimizer)
        return model, optimizer

    stepped = step
    for change in changes:
        stepped = change.on_step(stepped)
    after = run(changed, stepped)
    cures = tuple(change.cure for change in changes)
    return Tried(cures, after, before.needed_bytes - after.needed_bytes, None)


def _pairs(
    run: Callable[[Build, Step], FitVerdict],
    before: FitVerdict,
    build: Build,
    step: Step,
    trials: dict[Change, Tried],
) -> list[Tried]:
    """The two changes that save most, each with every other that goes with it.

    The second may save nothing by itself: the peak moves to where it helps.
    """
    by_bytes = sorted(trials, key=lambda change: -trials[change].saved_bytes)
    found = []
    for first, second in combinations(by_bytes, 2):
        is_apart = not set(first.cure.changes) & set(second.cure.changes)
        if is_apart and first in by_bytes[:2]:
            with contextlib.suppress(*NOT_TRIED):
                found.append(_tried(run, before, build, step, (first, second)))
    return found


def _named(tried: Tried, paths: list[str]) -> Tried:
    """With the name that the program's own blocks have, in the line that takes them."""
    blocks = ".".join(filter(None, ["model", *paths[:1]]))
    cures = (replace(cure, line=cure.line.replace("BLOCKS", blocks)) for cure in tried.cures)
    return replace(tried, cures=tuple(cures))


def _changes(paths: list[str]) -> tuple[Change, ...]:
    def checkpointed(model: Any, optimizer: Any) -> tuple[Any, Any]:
        path, blocks = _named_blocks(model)
        paths.append(path)
        checkpoint_blocks(blocks)
        return model, optimizer

    return (
        Change(
            Cure(
                "checkpointing of all blocks",
                {"checkpointing": 1},
                "checkpoint_blocks(BLOCKS)  # utils.techniques.checkpointing",
                "each block's forward runs twice",
            ),
            on_build=checkpointed,
        ),
        Change(
            Cure(
                "activations to the host",
                {"offload_activations": True},
                "with torch.autograd.graph.save_on_cpu(pin_memory=True): ...",
                OFFLOAD_COSTS,
            ),
            on_step=lambda step: functools.partial(_on_the_host, step),
        ),
        Change(
            Cure(
                "fused AdamW",
                {"optimizer": "adamw"},
                "optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
                "nothing",
            ),
            on_build=_fused,
        ),
        Change(
            Cure(
                "8-bit AdamW",
                {"optimizer": "adamw-8bit"},
                "optimizer = bnb.optim.AdamW8bit(model.parameters())",
                "moments rounded to a byte",
            ),
            on_build=_eight_bits,
        ),
    )


def _pair(built: Any) -> tuple[Any, Any]:
    """What build() returned; a model alone has no optimizer."""
    return built if isinstance(built, tuple) else (built, None)


def _named_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The largest list of modules of one class, such as the layers of a transformer, and its name.

    Raises:
        ValueError: the model has no list of two or more alike.
    """
    lists = [
        (name, list(part))
        for name, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential))
        and len(part) > 1
        and len({type(m) for m in part}) == 1
    ]
    if not lists:
        raise ValueError(
            "The model has no list of alike blocks (nn.ModuleList or nn.Sequential) to checkpoint."
        )
    return max(
        lists, key=lambda found: sum(p.numel() for block in found[1] for p in block.parameters())
    )


def _on_the_host(step: Step, model: Any, optimizer: Any) -> Any:
    with on_the_host():
        return step(model, optimizer)


def _adam_groups(optimizer: Any) -> list[dict[str, Any]]:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"The optimizer is {type(optimizer).__name__}: this is tried in place of Adam and AdamW."
        )
    known = ("params", "lr", "betas", "eps", "weight_decay")
    return [{key: group[key] for key in known} for group in optimizer.param_groups]


def _fused(model: Any, optimizer: Any) -> tuple[Any, Any]:
    groups = _adam_groups(optimizer)
    if optimizer.defaults.get("fused"):
        raise ValueError("The optimizer is fused as it is.")
    return model, type(optimizer)(groups, fused=True)


def _eight_bits(model: Any, optimizer: Any) -> tuple[Any, Any]:
    groups = _adam_groups(optimizer)
    library: Any = bitsandbytes_library()
    kind: Any = library.optim.AdamW8bit
    return model, kind(groups)
