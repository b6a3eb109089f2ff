"""In which order changes of a step are tried, and which of them cannot make enough room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any

from utils.checked import check_public
from utils.fitting.cures import PACKED, single_cures
from utils.fitting.seconds import predicted_seconds
from utils.fitting.tried_cures import Cure
from utils.fitting.verdict import MARGIN
from utils.units import Category

if TYPE_CHECKING:
    from utils.fitting import FitVerdict, Recipe, Trials

__all__ = ["changes_numbers", "room_bytes", "ways"]

# What is tried, those that leave the numbers of training as they are first. Each is one argument or call
# of a library, so that an answer can be typed.
SAME_NUMBERS: tuple[dict[str, Any], ...] = (
    {"loss": "chunked"},
    {"checkpointing": 1, "spared": 0},
    {"offload_states": True},
    {"optimizer": "paged-adamw"},
)
OTHER_NUMBERS: tuple[dict[str, Any], ...] = ({"optimizer": "adamw-8bit"}, {"precision": "bf16"})
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
# The most that a loss keeps of a logit: 2 bytes in 16 bits, 4 in float32, 4 of its logarithm, and the
# gradients of the first two.
LOGIT_BYTES = 16


def changes_numbers(cures: Iterable[Cure]) -> bool:
    """Whether weights or moments have fewer bits with them."""
    return any(dict(cure.changes) in OTHER_NUMBERS for cure in cures)


def room_bytes(asked: FitVerdict) -> float:
    """The most that a step may need on this card, so that what simulations were off by stays free."""
    return asked.usable_bytes / (1 + MARGIN)


def ways(trials: Trials, asked: FitVerdict, *, singly: bool = False) -> Iterator[tuple[Cure, ...]]:
    """Changes in the order of the page, without those that cannot make enough room.

    The same numbers come before other numbers; then what crosses PCIe in pages comes last, because
    those seconds are not predicted; then one change comes before two, and the quicker before the
    slower. Where a card has no predicted seconds, they come as `SAME_NUMBERS` has them.

    Args:
        trials: Of the model.
        asked: The step without any change.
        singly: Whether pairs are left out.
    """
    known = list(single_cures(trials.config, _recipe(asked)))
    cures = [
        cure
        for changes in (*SAME_NUMBERS, *OTHER_NUMBERS)
        for cure in known
        if dict(cure.changes) == changes
    ]
    found: list[tuple[Cure, ...]] = [(cure,) for cure in cures]
    if not singly:
        found += [pair for pair in combinations(cures, 2) if _go_together(pair)]
    possible = [way for way in found if _least_bytes(trials, asked, way) <= room_bytes(asked)]
    yield from sorted(possible, key=lambda way: _rank(trials, asked, way))


def _rank(
    trials: Trials, asked: FitVerdict, way: tuple[Cure, ...]
) -> tuple[bool, bool, int, float]:
    paged = any(cure.changes.get("optimizer") == "paged-adamw" for cure in way)
    return changes_numbers(way), paged, len(way), _seconds(trials, asked, way)


def _seconds(trials: Trials, asked: FitVerdict, way: tuple[Cure, ...]) -> float:
    """Predicted, of a step; 0 where the planner has none or the changes do not go together."""
    recipe = _recipe(asked)
    try:
        for cure in way:
            recipe = recipe.but(**cure.changes)
    except ValueError:
        return 0.0
    seconds = predicted_seconds(trials.config, recipe, asked.card)
    return seconds[1] if seconds else 0.0


def _go_together(cures: tuple[Cure, ...]) -> bool:
    """Whether no two of them change the same thing."""
    changed = [name for cure in cures for name in cure.changes]
    return len(changed) == len(set(changed))


def _least_bytes(trials: Trials, asked: FitVerdict, way: tuple[Cure, ...]) -> float:
    """What surely stays: the states that no change touches, and the peak less what each can save at most."""
    held = {part: asked.measurement.breakdown.get(part, 0) for part in STATES}
    states = sum(held[part] * _kept(part, way) for part in STATES)
    saved = sum(_most_saved(trials, asked, cure, held) for cure in way)
    return max(states, asked.needed_bytes - saved)


def _most_saved(trials: Trials, asked: FitVerdict, cure: Cure, held: dict[Category, int]) -> float:
    """The most that a change can take off the peak: all of what it touches."""
    if cure.changes.get("loss") == "chunked":
        return LOGIT_BYTES * _recipe(asked).tokens * trials.config.get_text_config().vocab_size
    if "checkpointing" in cure.changes:
        return asked.needed_bytes - sum(held.values())
    if cure.changes.get("optimizer") in PACKED:
        return held[Category.OPTIMIZER_STATE]
    return asked.needed_bytes


def _kept(part: Category, cures: Iterable[Cure]) -> float:
    """The share of a kind of state that changes may leave on the card."""
    share = 1.0
    for cure in cures:
        if "precision" in cure.changes:
            share /= 2
        if "offload_states" in cure.changes:
            share = 0.0
        if part is Category.OPTIMIZER_STATE and cure.changes.get("optimizer") in PACKED:
            share = 0.0
    return share


def _recipe(verdict: FitVerdict) -> Recipe:
    if verdict.recipe is None:
        raise ValueError("This verdict is of functions of one's own; changes need a recipe.")
    return verdict.recipe


check_public(globals())
