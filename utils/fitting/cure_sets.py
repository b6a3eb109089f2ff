"""Which cures to take together: a quick set that is enough, and the pair that saves most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, starmap

from utils.fitting import recipe_step
from utils.fitting.cures import checkpointing_of
from utils.fitting.recipe import Recipe
from utils.fitting.trials import Trials
from utils.fitting.tried_cures import Cure, Tried, compatible

PAIRS_TRIED = 3
FEWER = ((4, 0), (3, 0), (2, 0), (1, 3), (1, 4))  # (every, spared): fewer blocks recomputed first


def together(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """What is quickest and enough; of more cards than asked for a text only where nothing else is.

    Such a text takes next to no time beside its cards, and would else be the answer to every recipe.
    """
    own = [single for single in gains if not _takes_more_cards(single, recipe)]
    found = _quickest(trials, recipe, own)
    if len(own) == len(gains) or (found and found.is_safe):
        return found
    return _quickest(trials, recipe, gains)


def _takes_more_cards(single: Tried, recipe: Recipe) -> bool:
    changes = single.cures[0].changes
    return "sequence_cards" in changes and changes["cards"] > recipe.cards


def _quickest(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """The quicker of two: the quickest cure that is enough by itself, and what `_added_up` finds."""
    several = _added_up(trials, recipe, gains)
    enough = [single for single in gains if single.is_safe]
    if several and (not enough or several.is_safe):
        enough.append(several)
    return min(enough, key=_seconds, default=None)


def _added_up(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """Cures in the order of their time per GiB until the step fits, then without those not needed."""
    chosen: list[Cure] = []
    best: Tried | None = None
    for single in gains:
        more = trials.if_possible(recipe, [*chosen, *single.cures])
        if more is None or (best and more.saved_bytes <= best.saved_bytes):
            continue
        chosen, best = list(more.cures), more
        if best.is_safe:
            return _thinned(trials, recipe, _pruned(trials, recipe, best), gains)
    return best


def _seconds(tried: Tried) -> float:
    return float("inf") if tried.added_seconds is None else tried.added_seconds


def _pruned(trials: Trials, recipe: Recipe, best: Tried) -> Tried:
    for cure in best.cures[:-1]:
        fewer = [other for other in best.cures if other is not cure]
        found = trials.if_possible(recipe, fewer) if len(best.cures) > 1 else None
        if found and found.is_safe:
            best = found
    return best


def _thinned(trials: Trials, recipe: Recipe, best: Tried, gains: Sequence[Tried]) -> Tried:
    """The same set with as few blocks recomputed as leave a margin, where it recomputes them."""
    for fewer in _fewer(trials, recipe, best, gains):
        cures = [fewer if "checkpointing" in cure.changes else cure for cure in best.cures]
        found = trials.if_possible(recipe, cures)
        if found and found.is_safe:
            return found
    return best


def _fewer(trials: Trials, recipe: Recipe, best: Tried, gains: Sequence[Tried]) -> Iterator[Cure]:
    """Ways to recompute fewer blocks that may be enough: a block by itself saves what all do over their number."""
    now = best.verdict.recipe.recomputed_share if best.verdict.recipe else 0.0
    a_share = max(_per_share(single) for single in gains)
    for fewer in starmap(checkpointing_of, FEWER):
        asked = recipe.but(**fewer.changes)
        more = (now - asked.recomputed_share) * a_share
        runs_whole = recipe_step.depths(trials.config, asked).small is None
        if 0 < more < best.verdict.spare_bytes and not runs_whole:
            yield fewer


def _per_share(single: Tried) -> float:
    """What a cure saves by the share of blocks that it recomputes; 0 for other cures."""
    share = single.verdict.recipe.recomputed_share if single.verdict.recipe else 0.0
    return single.saved_bytes / share if "checkpointing" in single.cures[0].changes else 0.0


def best_pair(trials: Trials, recipe: Recipe, gains: Sequence[Tried]) -> Tried | None:
    """Of the pairs whose savings add up to most, those that save most when simulated together."""
    pairs = [
        (one.saved_bytes + two.saved_bytes, (*one.cures, *two.cures))
        for one, two in combinations(gains, 2)
        if compatible((*one.cures, *two.cures))
    ]
    likely = sorted(pairs, key=lambda pair: -pair[0])[:PAIRS_TRIED]
    found = [tried for _, cures in likely if (tried := trials.if_possible(recipe, cures))]
    return max(found, key=lambda tried: tried.saved_bytes, default=None)
