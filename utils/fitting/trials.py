"""Recipes of one model on one card, each simulated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from utils.fitting.inputs import not_trained
from utils.fitting.model_configs import auto_class
from utils.fitting.recipe import Recipe
from utils.fitting.recipe_simulation import simulated_step
from utils.fitting.seconds import predicted_seconds
from utils.fitting.tried_cures import Cure, Tried, compatible
from utils.fitting.verdict import FitVerdict, usable_bytes
from utils.memory.measurement import Measurement
from utils.simulation import SimulationError
from utils.simulation.result_cache import SharedResults

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What a cure may meet: an operation that PyTorch refuses, a library that is not installed.
NOT_TRIED = (SimulationError, ValueError, RuntimeError, ModuleNotFoundError)


@dataclass
class Trials:
    """What was simulated of a model on a card, by recipe."""

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
            notes = filter(None, [not_trained(self.config), *step.notes[1:]])
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

    def if_possible(self, recipe: Recipe, cures: Sequence[Cure]) -> Tried | None:
        """As `tried`; None where they contradict each other or cannot be simulated together."""
        if not compatible(cures):
            return None
        try:
            return self.tried(recipe, cures)
        except NOT_TRIED:
            return None
