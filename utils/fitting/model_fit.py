"""`fit_model`: a verdict on a model of transformers, the cures, and those that fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from utils.catalog import device
from utils.fitting.cure_sets import best_pair, together
from utils.fitting.cures import shorter, single_cures
from utils.fitting.model_configs import model_config
from utils.fitting.recipe import Recipe
from utils.fitting.sharing import not_simulated
from utils.fitting.trials import NOT_TRIED, Trials
from utils.fitting.tried_cures import GAINS_BYTES, Tried
from utils.fitting.verdict import FitVerdict, usable_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

USUAL = ("chunked loss", "checkpointing of all blocks")  # what fine-tunes use most, together


@dataclass(frozen=True)
class Fit:
    """The answer: does it fit, what would help, and what would not.

    Attributes:
        verdict: On the recipe as asked.
        cures: What gains something, by predicted time per GiB.
        without_gain: What was tried and gains nothing here.
        refused: What could not be tried, and why, by name.
        together: A cheap set that fits with a margin, or the one that saves most of all that was
            tried; None where the recipe fits so as it is.
        pair: The two cures that save most together.
        usual: The chunked loss with all blocks checkpointed; None where that cannot be, or gains nothing.
        shorter: Half the tokens, a quarter and so on, until a step fits with a margin.
        pairs: Of functions of one's own: all pairs that were tried.
        trials: What was simulated, for more of the same model; None for functions of one's own.
    """

    verdict: FitVerdict
    cures: tuple[Tried, ...] = ()
    without_gain: tuple[Tried, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    together: Tried | None = None
    pair: Tried | None = None
    trials: Trials | None = None
    usual: Tried | None = None
    shorter: tuple[Tried, ...] = ()
    pairs: tuple[Tried, ...] = ()

    @property
    def fits(self) -> bool:
        return self.verdict.fits

    @property
    def runs(self) -> FitVerdict:
        """What a script is to be written of: the recipe as asked, or with the set that fits."""
        if self.together and not (self.fits and not self.together.verdict.fits):
            return self.together.verdict
        return self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        said = self.verdict.to_dict()
        said["cures"] = [_as_dict(tried) for tried in self.cures]
        said["without_gain"] = [tried.name for tried in self.without_gain]
        said["refused"] = self.refused
        said["together"] = _as_dict(self.together) if self.together else None
        said["pair"] = _as_dict(self.pair) if self.pair else None
        said["usual"] = _as_dict(self.usual) if self.usual else None
        said["shorter"] = [_as_dict(tried) for tried in self.shorter]
        return said


def _as_dict(tried: Tried) -> dict[str, Any]:
    return {
        "name": tried.name,
        "changes": {key: value for cure in tried.cures for key, value in cure.changes.items()},
        "needed_bytes": tried.verdict.needed_bytes,
        "saved_bytes": tried.saved_bytes,
        "added_seconds": tried.added_seconds,
        "fits": tried.verdict.fits,
        "lines": [cure.line for cure in tried.cures],
        "costs": [cure.costs for cure in tried.cures],
    }


def fit_model(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    card: str = "RTX 4090",
    cures: bool = True,
    cards: int = 2,
) -> Fit:
    """Simulate a model's training step on a card, and what would make it need less.

    Args:
        source: A model as `model_config` takes it: a name such as "Qwen/Qwen2.5-7B", or a folder.
        recipe: How it is trained; LoRA as `Recipe` has it if None.
        card: A GPU of the catalog.
        cures: Whether changes are tried too.
        cards: Over how many of them FSDP2 is tried.

    Raises:
        ModelConfigError: no such model.
        SimulationError, ValueError: the recipe cannot be simulated; the sentence says what to change.
    """
    recipe, config = recipe or Recipe(), model_config(source)
    trials = Trials(_name(source, config), config, card)
    usable_bytes(card)  # a wrong card is told before seconds of work
    recipe.check_card(device(card))
    verdict = trials.verdict(recipe)
    if not cures:
        return Fit(verdict, trials=trials)
    tried, refused = _singles(trials, recipe, cards)
    gaining = [single for single in tried if _gains(single, tried)]
    gains = sorted(gaining, key=lambda t: (t.seconds_per_gib, -t.saved_bytes))
    is_safe = verdict.fits and not verdict.is_close
    return Fit(
        verdict=verdict,
        cures=tuple(gains),
        without_gain=tuple(t for t in tried if t not in gaining),
        refused=refused,
        together=None if is_safe else together(trials, recipe, gains),
        pair=best_pair(trials, recipe, gains),
        trials=trials,
        usual=_usual(trials, recipe, tried),
        shorter=() if is_safe else tuple(_shorter(trials, recipe)),
    )


def _name(source: str | Path, config: PreTrainedConfig) -> str:
    return getattr(config, "name_or_path", "") or Path(source).name


def _singles(trials: Trials, recipe: Recipe, cards: int) -> tuple[list[Tried], dict[str, str]]:
    tried, refused = [], {}
    options = list(single_cures(trials.config, recipe, cards))
    for cure in tqdm(options, desc="trying cures", unit="cure", leave=False):
        try:
            tried.append(trials.tried(recipe, [cure]))
        except NOT_TRIED as error:
            refused[cure.name] = str(error).splitlines()[0]
    return tried, refused | not_simulated(trials.config, recipe, cards)


def _gains(single: Tried, tried: Sequence[Tried]) -> bool:
    """Whether it saves something, and a text over several cards more than the states over them alone."""
    fewer = {name: n for name, n in single.cures[0].changes.items() if name != "sequence_cards"}
    alone = [t.saved_bytes for t in tried if t is not single and t.cures[0].changes == fewer]
    return single.gains and all(single.saved_bytes - saved >= GAINS_BYTES for saved in alone)


def _usual(trials: Trials, recipe: Recipe, tried: Sequence[Tried]) -> Tried | None:
    """Both together, where both can be tried: one may gain nothing without the other."""
    by_name = {single.name: single.cures[0] for single in tried}
    cures = [by_name[name] for name in USUAL if name in by_name]
    found = trials.if_possible(recipe, cures) if len(cures) == len(USUAL) else None
    return found if found and found.gains else None


def _shorter(trials: Trials, recipe: Recipe) -> Iterator[Tried]:
    """Shorter texts, until one fits with a margin or a shorter one gains nothing."""
    for cure in shorter(recipe):
        found = trials.if_possible(recipe, [cure])
        if found is None or not found.gains:
            return
        yield found
        if found.is_safe:
            return
