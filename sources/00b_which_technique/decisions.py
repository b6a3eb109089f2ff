"""Which way to fine-tune fits which card: a square for each model, method and card.

A square first says what the step as asked takes; where that is too much, the cheapest cure or pair of
cures that makes room; where none does, over how many cards FSDP2 has to share the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from typing import Any

from tqdm.auto import tqdm

from utils.catalog import device
from utils.checked import check_public
from utils.fitting import FitVerdict, Recipe, Trials, mixed_precision, model_config
from utils.fitting.cures import PACKED, Cure, candidates
from utils.fitting.fitted import NOT_TRIED
from utils.fitting.seconds import predicted_seconds
from utils.fitting.verdict import usable_bytes
from utils.simulation.cublas import workspace_bytes
from utils.simulation.devices import simulated_device
from utils.units import GIB, Category, Evidence, format_bytes

from .several_cards import Shared, least_cards, parameters_of

__all__ = ["Answer", "Deciding", "Square", "decide"]

# The least bytes a parameter that any cure here leaves on one card: weights in 16 bits, or four.
LEAST_BYTES = {"full": 2.0, "lora": 2.0, "qlora": 0.5}
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


class Answer(StrEnum):
    """What a square says, in a word."""

    FITS = "fits"
    CURE = "cure"
    CARDS = "several cards"
    NONE = "none"


@dataclass(frozen=True)
class Square:
    """One model, one method, one card.

    Attributes:
        model, method, card: What was asked.
        answer: Whether it fits, and by what kind of change.
        how: The change in words; empty where none is needed.
        needed_bytes: What that takes of each card.
        evidence: Of these bytes: simulated on one card, predicted on several.
        asked: The step as asked on one card; None where the weights alone are too much for any cure.
        cards: How many of them.
        cures: What is changed on one card.
        texts: That a step takes.
        step_seconds: Of a step, predicted; None where the planner has none.
    """

    model: str
    method: str
    card: str
    answer: Answer
    how: str
    needed_bytes: float
    evidence: Evidence
    asked: FitVerdict | None
    cards: int = 1
    cures: tuple[Cure, ...] = ()
    texts: int = 1
    step_seconds: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the cures leave the arithmetic of training as it was."""
        changed = {name: to for cure in self.cures for name, to in cure.changes.items()}
        return "precision" not in changed and "8bit" not in changed.get("optimizer", "")

    @property
    def gib(self) -> str:
        """The bytes as a square prints them."""
        return f"{self.needed_bytes / GIB:.1f} GiB"

    def row(self) -> dict[str, str]:
        """As a row of a table."""
        asked = (
            format_bytes(self.asked.needed_bytes) if self.asked else "weights alone are too much"
        )
        return {
            "model": self.model.rpartition("/")[2],
            "method": self.method,
            "card": self.card,
            "as asked": asked,
            "verdict": str(self.answer),
            "with": self.how,
            "seconds a text (predicted)": f"{self.step_seconds / self.texts:.2g}"
            if self.step_seconds
            else "",
            "which costs, beside time": "; ".join(cure.costs for cure in self.cures),
            "a card then holds": self.gib,
            "of": format_bytes(usable_bytes(self.card)),
            "evidence": str(self.evidence),
        }


@dataclass
class Deciding:
    """Squares of some models at one text length; a step is simulated once for all cards that run it alike.

    Attributes:
        tokens: Of the one text that a step takes.
        trials: What was simulated, by model and kind of card.
    """

    tokens: int
    trials: dict[tuple[str, Any], Trials] = field(default_factory=dict)

    def square(self, model: str, method: str, card: str) -> Square:
        """The answer for one model, method and card.

        Raises:
            ModelConfigError: no such model.
            SimulationError, ValueError: no such card, or a step that cannot be simulated.
        """
        recipe = Recipe(method=method, tokens=self.tokens, precision=mixed_precision(card))
        trials = self._trials(model, card)
        if LEAST_BYTES[method] * parameters_of(trials.config) > usable_bytes(card):
            return _shared(trials, recipe, model, card, None)
        asked = _on(card, trials, recipe)
        if _is_safe(asked):
            return _square(model, Answer.FITS, "", asked, asked)
        for cures in ways(trials, asked):
            found = _tried(card, trials, recipe, cures)
            if found and _is_safe(found):
                how = " + ".join(cure.name for cure in cures)
                return _square(model, Answer.CURE, how, found, asked, cures)
        return _shared(trials, recipe, model, card, asked)

    def _trials(self, model: str, card: str) -> Trials:
        """One for all cards on which the simulated step is the same: the same kernels and workspaces."""
        seen = simulated_device(card)
        kind = seen.flash, workspace_bytes(seen.capability), device(card).bf16_native
        if (model, kind) not in self.trials:
            self.trials[model, kind] = Trials(model, model_config(model), card)
        return self.trials[model, kind]


def decide(
    models: Iterable[str], methods: Iterable[str], cards: Iterable[str], tokens: int
) -> list[Square]:
    """A square for each model, method and card, in this order.

    Args:
        models: Names as `model_config` takes them.
        methods: Of `Recipe`.
        cards: GPUs of the catalog.
        tokens: Of the one text that a step takes.

    Raises:
        ModelConfigError, SimulationError, ValueError: as `Deciding.square`.
    """
    asked = [(m, way, card) for m in models for way in methods for card in cards]
    deciding = Deciding(tokens)
    return [deciding.square(*one) for one in tqdm(asked, desc="deciding", leave=False)]


def ways(trials: Trials, asked: FitVerdict) -> Iterator[tuple[Cure, ...]]:
    """Cures, then pairs whose savings add up to enough, each by predicted seconds.

    What crosses PCIe in pages comes last, because those seconds are not predicted. The method stays,
    and so does the one card.
    """
    recipe = _recipe(asked)
    single = [
        cure
        for cure in candidates(trials.config, recipe)
        if not {"method", "cards"} & set(cure.changes)
    ]
    alone = [(cure,) for cure in single if _least_bytes(asked, [cure]) <= asked.usable_bytes]
    yield from sorted(alone, key=lambda cures: _price(trials, asked, cures))
    pairs = [pair for pair in combinations(single, 2) if _make_room(trials, asked, pair)]
    yield from sorted(pairs, key=lambda cures: _price(trials, asked, cures))


def _make_room(trials: Trials, asked: FitVerdict, pair: tuple[Cure, ...]) -> bool:
    """Whether two cures go together and what each saves alone, added up, is enough."""
    if not _go_together(pair) or _least_bytes(asked, pair) > asked.usable_bytes:
        return False
    needed = asked.needed_bytes
    for cure in pair:
        found = _tried(asked.card, trials, _recipe(asked), [cure])
        needed -= asked.needed_bytes - found.needed_bytes if found else 0
    return needed <= asked.usable_bytes


def _price(trials: Trials, asked: FitVerdict, cures: tuple[Cure, ...]) -> tuple[bool, float]:
    recipe = _recipe(asked)
    for cure in cures:
        recipe = recipe.but(**cure.changes)
    seconds = predicted_seconds(trials.config, recipe, asked.card)
    return "paged" in recipe.optimizer, seconds[1] if seconds else 0.0


def _go_together(cures: tuple[Cure, ...]) -> bool:
    """Whether no two of them change the same thing."""
    changed = [name for cure in cures for name in cure.changes]
    return len(changed) == len(set(changed))


def _least_bytes(asked: FitVerdict, cures: Iterable[Cure]) -> float:
    """What surely stays of the peak: the states that none of the cures touches."""
    held = {part: asked.measurement.breakdown.get(part, 0) for part in STATES}
    return sum(held[part] * _kept(part, cures) for part in STATES)


def _kept(part: Category, cures: Iterable[Cure]) -> float:
    """The share of a kind of state that cures may leave."""
    share = 1.0
    for cure in cures:
        if "precision" in cure.changes:
            share /= 2
        if part is Category.OPTIMIZER_STATE and cure.changes.get("optimizer") in PACKED:
            share = 0.0
        if part is Category.GRADIENTS and "step_in_backward" in cure.changes:
            share = 0.0
    return share


def _tried(card: str, trials: Trials, recipe: Recipe, cures: Iterable[Cure]) -> FitVerdict | None:
    """The step with cures; None where the engine says that they do not go together."""
    changes: Mapping[str, Any] = {name: to for cure in cures for name, to in cure.changes.items()}
    try:
        return _on(card, trials, recipe.but(**changes))
    except NOT_TRIED:
        return None


def _on(card: str, trials: Trials, recipe: Recipe) -> FitVerdict:
    """The simulated step beside what this card leaves."""
    found = trials.verdict(recipe)
    seconds = predicted_seconds(trials.config, recipe, card)
    return replace(found, card=card, usable_bytes=usable_bytes(card), seconds=seconds)


def _is_safe(verdict: FitVerdict) -> bool:
    """Whether it fits with more to spare than simulations were off by."""
    return verdict.fits and not verdict.is_close


def _recipe(verdict: FitVerdict) -> Recipe:
    if verdict.recipe is None:
        raise ValueError("This verdict is of functions of one's own; cures need a recipe.")
    return verdict.recipe


def _square(
    model: str, answer: Answer, how: str, found: FitVerdict, asked: FitVerdict,
    cures: tuple[Cure, ...] = (),
) -> Square:  # fmt: skip
    return Square(
        model, _recipe(found).method, found.card, answer, how, found.needed_bytes,
        found.measurement.evidence, asked, cures=cures,
        step_seconds=found.seconds[1] if found.seconds else None,
    )  # fmt: skip


def _shared(
    trials: Trials, recipe: Recipe, model: str, card: str, asked: FitVerdict | None
) -> Square:
    """What several cards hold, by the planner's formulas."""
    found: Shared | None = least_cards(trials.config, recipe, card)
    if found is None:
        weights = LEAST_BYTES[recipe.method] * parameters_of(trials.config)
        needed = asked.needed_bytes if asked else weights
        return Square(
            model, recipe.method, card, Answer.NONE, "no number of them that was tried", needed,
            Evidence.SIMULATED if asked else Evidence.PREDICTED, asked,
        )  # fmt: skip
    return Square(
        model, recipe.method, card, Answer.CARDS, found.how, found.a_card_bytes,
        Evidence.PREDICTED, asked, cards=found.cards, texts=found.texts,
        step_seconds=found.step_seconds,
    )  # fmt: skip


check_public(globals())
