"""Which way to fine-tune fits which card: a square for each model, method and card.

A square first says what the step as asked takes; where that is too much, the first change or pair of
changes that makes room, in the order of `ways`; where none does, over how many cards it has to be shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tqdm.auto import tqdm

from utils.catalog import device
from utils.checked import check_public
from utils.fitting import FitVerdict, Recipe, Trials, mixed_precision, model_config
from utils.fitting.seconds import predicted_seconds
from utils.fitting.trials import NOT_TRIED
from utils.fitting.tried_cures import Cure
from utils.fitting.verdict import MARGIN, usable_bytes
from utils.simulation.cublas import workspace_bytes
from utils.simulation.devices import simulated_device
from utils.units import GIB, Evidence

from .repeated_heads import repeated_heads
from .several_cards import Shared, least_cards, parameters_of
from .ways import changes_numbers, room_bytes, ways

__all__ = ["Answer", "Deciding", "Square", "decide"]

# The least bytes a parameter of weights on one card: 16 bits, or four in the layers that QLoRA packs.
LEAST_BYTES = {"full": 2.0, "lora": 2.0, "qlora": 0.5}


class Answer(StrEnum):
    """What a square says, in a word."""

    FITS = "fits"
    CURE = "with a change"
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
        asked: The step as asked on one card; None where the weights alone are too much for it.
        cards: How many of them.
        cures: What is changed on one card.
        texts: That a step takes.
        tokens: Of a text.
        step_seconds: Of a step, predicted; None where there is no such prediction.
        host_bytes: What waits in the host's memory.
        instead: Another answer, in words.
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
    tokens: int = 2048
    step_seconds: float | None = None
    host_bytes: float = 0.0
    instead: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the changes leave the numbers of training as they were."""
        return not changes_numbers(self.cures)

    @property
    def is_unproven(self) -> bool:
        """Whether weights of four bits are shared among cards in a way that no known library trains."""
        return self.method == "qlora" and self.cards > 1

    @property
    def gib(self) -> str:
        """The bytes as a square prints them."""
        return f"{self.needed_bytes / GIB:.1f} GiB"

    @property
    def asked_gib(self) -> str:
        """What the step as asked takes of one card."""
        return f"{self.asked.needed_bytes / GIB:.1f} GiB" if self.asked else "not simulated"

    @property
    def card_seconds(self) -> float | None:
        """Of 1,000 tokens, all cards together, predicted."""
        if self.step_seconds is None:
            return None
        return 1000 * self.step_seconds * self.cards / (self.texts * self.tokens)

    def row(self) -> dict[str, str]:
        """As a row of a table."""
        host = f", {self.host_bytes / GIB:.0f} GiB on the host" if self.host_bytes > GIB else ""
        return {
            "model": self.model.rpartition("/")[2],
            "method": self.method,
            "card": self.card,
            "as asked": self.asked_gib,
            "change": f"{self.cards} cards: {self.how}" if self.cards > 1 else self.how + host,
            "a card then holds": self.gib,
            "card-seconds": seconds_word(self.card_seconds),
            "or": self.instead,
        }


def seconds_word(card_seconds: float | None) -> str:
    """Card-seconds of 1,000 tokens as tables print them."""
    return "not predicted" if card_seconds is None else f"{card_seconds:.2g}"


def price_word(card_seconds: float | None) -> str:
    """The same within a sentence."""
    word = seconds_word(card_seconds)
    return f"seconds {word}" if card_seconds is None else f"{word} card-seconds"


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
        if LEAST_BYTES[method] * parameters_of(trials.config) * (1 + MARGIN) > usable_bytes(card):
            return _shared(trials, recipe, model, card, None)
        asked = _on(card, trials, recipe)
        if _is_safe(asked):
            return _square(model, Answer.FITS, asked, asked)
        for cures in ways(trials, asked):
            found = _tried(card, trials, recipe, cures)
            if found and _is_safe(found):
                answer = _square(model, Answer.CURE, found, asked, cures)
                return replace(answer, instead=_instead(trials, recipe, answer))
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


def _instead(trials: Trials, recipe: Recipe, answer: Square) -> str:
    """What is quicker than an answer of the same numbers: one change of them, else cards in place of the host."""
    if answer.asked is None or not answer.is_exact:
        return ""
    for cures in ways(trials, answer.asked, singly=True):
        found = _tried(answer.card, trials, recipe, cures) if changes_numbers(cures) else None
        if found and _is_safe(found):
            other = _square(answer.model, Answer.CURE, found, answer.asked, cures)
            return f"{other.how} (other numbers): {other.gib}, {price_word(other.card_seconds)}"
    if answer.host_bytes < GIB:
        return ""
    other = _shared(trials, recipe, answer.model, answer.card, answer.asked)
    price = price_word(other.card_seconds)
    return f"{other.cards} cards, {other.how}: {other.gib} a card, {price}"


def _tried(card: str, trials: Trials, recipe: Recipe, cures: Iterable[Cure]) -> FitVerdict | None:
    """The step with changes; None where the engine says that they do not go together."""
    changes = {name: to for cure in cures for name, to in cure.changes.items()}
    try:
        return _on(card, trials, recipe.but(**changes))
    except NOT_TRIED:
        return None


def _on(card: str, trials: Trials, recipe: Recipe) -> FitVerdict:
    """The simulated step beside what this card leaves."""
    with repeated_heads(card):
        found = trials.verdict(recipe)
    seconds = predicted_seconds(trials.config, recipe, card)
    return replace(found, card=card, usable_bytes=usable_bytes(card), seconds=seconds)


def _is_safe(verdict: FitVerdict) -> bool:
    """Whether it fits with more to spare than simulations were off by."""
    return verdict.needed_bytes <= room_bytes(verdict)


def _square(
    model: str, answer: Answer, found: FitVerdict, asked: FitVerdict, cures: tuple[Cure, ...] = ()
) -> Square:
    recipe = found.recipe or Recipe()
    is_paged = recipe.optimizer == "paged-adamw"
    return Square(
        model, recipe.method, found.card, answer, " + ".join(cure.name for cure in cures),
        found.needed_bytes, found.measurement.evidence, asked, cures=cures, tokens=recipe.tokens,
        step_seconds=found.seconds[1] if found.seconds and not is_paged else None,
        host_bytes=found.measurement.host_bytes or 0,
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
            Evidence.SIMULATED if asked else Evidence.PREDICTED, asked, tokens=recipe.tokens,
        )  # fmt: skip
    return Square(
        model, recipe.method, card, Answer.CARDS, found.how, found.a_card_bytes,
        Evidence.PREDICTED, asked, cards=found.cards, texts=found.texts, tokens=recipe.tokens,
        step_seconds=found.step_seconds,
    )  # fmt: skip


check_public(globals())
