"""`fit`: the same answer for two functions of one's own, with the cures that need no knowledge of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from utils.checked import asks_first
from utils.fitting.cures import Cure, Tried
from utils.fitting.fitted import NOT_TRIED, Fit
from utils.fitting.program import on_the_host
from utils.fitting.verdict import FitVerdict, usable_bytes
from utils.simulation import simulate
from utils.simulation.arguments import refuse_known_mistakes
from utils.techniques.bitsandbytes_import import bitsandbytes_library, has_bitsandbytes
from utils.techniques.checkpointing import checkpoint_blocks

Build = Callable[[], tuple[Any, Any]]
Step = Callable[[Any, Any], Any]
Changed = tuple[Cure, Build, Step]


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
            keeping what backward needs on the host, and AdamW with moments of one byte.
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
    tried, refused = [], {}
    for cure, changed, stepped in tqdm(
        list(_changes(build, step)), desc="trying cures", leave=False
    ):
        try:
            after = run(changed, stepped)
        except NOT_TRIED as error:
            refused[cure.name] = str(error).splitlines()[0]
            continue
        tried.append(Tried((cure,), after, verdict.needed_bytes - after.needed_bytes, None))
    gains = sorted((t for t in tried if t.gains), key=lambda t: -t.saved_bytes)
    return Fit(verdict, tuple(gains), tuple(t for t in tried if not t.gains), refused)


def _changes(build: Build, step: Step) -> Iterator[Changed]:
    yield (
        Cure(
            "checkpointing of all blocks", {}, "checkpoint_blocks(blocks)  # utils.techniques.checkpointing",
            "each block's forward runs twice",
        ),
        lambda: _checkpointed(*_pair(build())),
        step,
    )  # fmt: skip
    yield (
        Cure(
            "activations to the host", {}, "with torch.autograd.graph.save_on_cpu(pin_memory=True): ...",
            "as many bytes of pinned host memory; the copies wait for PCIe",
        ),
        build,
        lambda model, optimizer: _on_the_host(step, model, optimizer),
    )  # fmt: skip
    yield (
        Cure(
            "8-bit AdamW",
            {},
            "optimizer = bnb.optim.AdamW8bit(model.parameters())",
            "moments rounded to a byte",
        ),
        lambda: _eight_bits(*_pair(build())),
        step,
    )


def _pair(built: Any) -> tuple[Any, Any]:
    """What build() returned; a model alone has no optimizer."""
    return built if isinstance(built, tuple) else (built, None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class, such as the layers of a transformer.

    Raises:
        ValueError: the model has no list of two or more alike.
    """
    lists = [
        list(part)
        for part in model.modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential))
        and len(part) > 1
        and len({type(m) for m in part}) == 1
    ]
    if not lists:
        raise ValueError(
            "The model has no list of alike blocks (nn.ModuleList or nn.Sequential) to checkpoint."
        )
    return max(
        lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters())
    )


def _checkpointed(model: Any, optimizer: Any) -> tuple[Any, Any]:
    checkpoint_blocks(blocks_of(model))
    return model, optimizer


def _on_the_host(step: Step, model: Any, optimizer: Any) -> Any:
    with on_the_host():
        return step(model, optimizer)


def _eight_bits(model: Any, optimizer: Any) -> tuple[Any, Any]:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"The optimizer is {type(optimizer).__name__}: this is tried in place of Adam and AdamW."
        )
    kept = [dict(group) for group in optimizer.param_groups]
    known = ("params", "lr", "betas", "eps", "weight_decay")
    library: Any = bitsandbytes_library()
    kind: Any = library.optim.AdamW8bit
    return model, kind([{key: group[key] for key in known} for group in kept])
