"""`fit_model`: a verdict on a model of transformers, the cures, and those that fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from utils.catalog import device
from utils.fitting import building
from utils.fitting.cures import candidates, checkpointing_of, shorter
from utils.fitting.inputs import left_out
from utils.fitting.model_configs import auto_class, model_config
from utils.fitting.recipe import Recipe
from utils.fitting.seconds import predicted_seconds
from utils.fitting.sharing import not_simulated
from utils.fitting.simulated import simulated_step
from utils.fitting.tried import GAINS_BYTES, Cure, Tried
from utils.fitting.verdict import FitVerdict, usable_bytes
from utils.memory.measurement import Measurement
from utils.simulation import SimulationError
from utils.simulation.result_cache import SharedResults

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PAIRS_TRIED = 3
USUAL = ("chunked loss", "checkpointing of all blocks")  # what fine-tunes use most, together
FEWER = ((4, 0), (3, 0), (2, 0), (1, 3), (1, 4))  # (every, spared): fewer blocks recomputed first
# What a cure may meet: an operation that PyTorch refuses, a library that is not installed.
NOT_TRIED = (SimulationError, ValueError, RuntimeError, ModuleNotFoundError)


@dataclass
class Trials:
    """Recipes of one model on one card, each simulated once."""

    name: str
    config: PreTrainedConfig
    card: str
    found: dict[Recipe, FitVerdict] = field(default_factory=dict)
    shared: SharedResults = field(default_factory=SharedResults, repr=False, compare=False)

    def verdict(self, recipe: Recipe) -> FitVerdict:
        """What the step of a recipe needs. Raises SimulationError or ValueError as `simulated_step`."""
        if recipe not in self.found:
            auto = auto_class(self.config)
            step = simulated_step(auto, self.config, recipe, self.card, self.name, self.shared)
            notes = filter(None, [left_out(self.config), *step.notes[1:]])
            self.found[recipe] = FitVerdict(
                name=self.name,
                card=self.card,
                measurement=step,
                usable_bytes=usable_bytes(self.card),
                seconds=predicted_seconds(
                    self.config, recipe, self.card, self._sent_bytes(recipe, step)
                ),
                recipe=recipe,
                notes=tuple(notes),
            )
        return self.found[recipe]

    def _sent_bytes(self, recipe: Recipe, step: Measurement) -> int | None:
        """What a micro-batch sends to the host: what waits there, without states that stay there."""
        if not recipe.offload_activations or step.host_bytes is None:
            return None
        stays = 0
        if recipe.offload_states or "paged" in recipe.optimizer:
            without = self.verdict(recipe.but(offload_activations=False))
            stays = without.measurement.host_bytes or 0
        return max(0, step.host_bytes - stays)

    def tried(self, recipe: Recipe, cures: Sequence[Cure]) -> Tried:
        """Cures together on a recipe. Raises ValueError where they contradict each other."""
        before, as_asked = self.verdict(recipe), recipe
        for cure in cures:
            recipe = recipe.but(**cure.changes)
        after = self.verdict(recipe)
        added = None
        if after.seconds and before.seconds:
            more_cards = recipe.sequence_cards / as_asked.sequence_cards
            added = more_cards * after.seconds[1] - before.seconds[1]
        saved = before.needed_bytes - after.needed_bytes
        return Tried(tuple(cures), after, saved, added)


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
        together=None if is_safe else _together(trials, recipe, gains),
        pair=_best_pair(trials, recipe, gains),
        trials=trials,
        usual=_usual(trials, recipe, tried),
        shorter=() if is_safe else tuple(_shorter(trials, recipe)),
    )


def _name(source: str | Path, config: PreTrainedConfig) -> str:
    return getattr(config, "name_or_path", "") or Path(source).name


def _singles(trials: Trials, recipe: Recipe, cards: int) -> tuple[list[Tried], dict[str, str]]:
    tried, refused = [], {}
    options = list(candidates(trials.config, recipe, cards))
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
    found = _simulated(trials, recipe, cures) if len(cures) == len(USUAL) else None
    return found if found and found.gains else None


def _shorter(trials: Trials, recipe: Recipe) -> Iterator[Tried]:
    """Shorter texts, until one fits with a margin or a shorter one gains nothing."""
    for cure in shorter(recipe):
        found = _simulated(trials, recipe, [cure])
        if found is None or not found.gains:
            return
        yield found
        if _is_safe(found):
            return


def _compatible(cures: Sequence[Cure]) -> bool:
    """Whether no two of them change the same field."""
    fields = [name for cure in cures for name in cure.changes]
    return len(fields) == len(set(fields))


def _together(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """What is quickest and enough; of more cards than asked for a text only where nothing else is.

    Such a text takes next to no time beside its cards, and would else be the answer to every recipe.
    """
    own = [single for single in gains if not _takes_more_cards(single, recipe)]
    found = _quickest(trials, recipe, own)
    if len(own) == len(gains) or (found and _is_safe(found)):
        return found
    return _quickest(trials, recipe, gains)


def _takes_more_cards(single: Tried, recipe: Recipe) -> bool:
    changes = single.cures[0].changes
    return "sequence_cards" in changes and changes["cards"] > recipe.cards


def _quickest(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """The quicker of two: the quickest cure that is enough by itself, and what `_added_up` finds."""
    several = _added_up(trials, recipe, gains)
    enough = [single for single in gains if _is_safe(single)]
    if several and (not enough or _is_safe(several)):
        enough.append(several)
    return min(enough, key=_seconds, default=None)


def _added_up(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """Cures in the order of their time per GiB until the step fits, then without those not needed."""
    chosen: list[Cure] = []
    best: Tried | None = None
    for single in gains:
        more = _simulated(trials, recipe, [*chosen, *single.cures])
        if more is None or (best and more.saved_bytes <= best.saved_bytes):
            continue
        chosen, best = list(more.cures), more
        if _is_safe(best):
            return _thinned(trials, recipe, _pruned(trials, recipe, best), gains)
    return best


def _seconds(tried: Tried) -> float:
    return float("inf") if tried.added_seconds is None else tried.added_seconds


def _is_safe(tried: Tried) -> bool:
    """Whether it fits with more to spare than simulations were off by."""
    return tried.verdict.fits and not tried.verdict.is_close


def _pruned(trials: Trials, recipe: Recipe, best: Tried) -> Tried:
    for cure in best.cures[:-1]:
        fewer = [other for other in best.cures if other is not cure]
        found = _simulated(trials, recipe, fewer) if len(best.cures) > 1 else None
        if found and _is_safe(found):
            best = found
    return best


def _thinned(trials: Trials, recipe: Recipe, best: Tried, gains: Sequence[Tried]) -> Tried:
    """The same set with as few blocks recomputed as leave a margin, where it recomputes them."""
    for fewer in _fewer(trials, recipe, best, gains):
        cures = [fewer if "checkpointing" in cure.changes else cure for cure in best.cures]
        found = _simulated(trials, recipe, cures)
        if found and _is_safe(found):
            return found
    return best


def _fewer(trials: Trials, recipe: Recipe, best: Tried, gains: Sequence[Tried]) -> Iterator[Cure]:
    """Ways to recompute fewer blocks that may be enough: a block by itself saves what all do over their number."""
    now = best.verdict.recipe.recomputed_share if best.verdict.recipe else 0.0
    a_share = max(_per_share(single) for single in gains)
    for fewer in starmap(checkpointing_of, FEWER):
        asked = recipe.but(**fewer.changes)
        more = (now - asked.recomputed_share) * a_share
        runs_whole = building.depths(trials.config, asked).small is None
        if 0 < more < best.verdict.spare_bytes and not runs_whole:
            yield fewer


def _per_share(single: Tried) -> float:
    """What a cure saves by the share of blocks that it recomputes; 0 for other cures."""
    share = single.verdict.recipe.recomputed_share if single.verdict.recipe else 0.0
    return single.saved_bytes / share if "checkpointing" in single.cures[0].changes else 0.0


def _simulated(trials: Trials, recipe: Recipe, cures: Sequence[Cure]) -> Tried | None:
    """Cures together; None where they contradict each other or cannot be simulated together."""
    if not _compatible(cures):
        return None
    try:
        return trials.tried(recipe, cures)
    except NOT_TRIED:
        return None


def _best_pair(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """Of the pairs whose savings add up to most, those that save most when simulated together."""
    pairs = [
        (one.saved_bytes + two.saved_bytes, (*one.cures, *two.cures))
        for one, two in combinations(gains, 2)
        if _compatible((*one.cures, *two.cures))
    ]
    likely = sorted(pairs, key=lambda pair: -pair[0])[:PAIRS_TRIED]
    found = [tried for _, cures in likely if (tried := _simulated(trials, recipe, cures))]
    return max(found, key=lambda tried: tried.saved_bytes, default=None)
