"""The step of a recipe on a card that need not be here: `simulated_step`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from utils.fitting import recipe_step
from utils.fitting.inputs import micro_batch
from utils.fitting.recipe import Recipe
from utils.memory.measurement import Measurement
from utils.simulation import extrapolate, simulate
from utils.simulation.message_stream import Misaligned
from utils.simulation.result_cache import SharedResults
from utils.techniques.bitsandbytes_import import bitsandbytes_library, has_bitsandbytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def simulated_step(
    auto: type,
    config: PreTrainedConfig,
    recipe: Recipe,
    card: str,
    name: str = "",
    shared: SharedResults | None = None,
) -> Measurement:
    """The memory of one step of a model of transformers, simulated at its whole depth.

    Where layers repeat, three shallow models are simulated and extended (`utils.simulation.extrapolation`);
    where they do not, or their steps do not, the whole model is simulated, which takes longer.

    Args:
        auto: The Auto class that trains the model.
        config: What it is made of.
        recipe: How it is trained.
        card: A GPU of the catalog; with `recipe.cards` > 1, of the first of them.
        name: What the measurement is called.
        shared: What simulations of this model's other recipes have worked out.

    Raises:
        SimulationError, ValueError: as `simulate` does.
        ModuleNotFoundError: weights or moments are packed, and bitsandbytes is not installed.
    """

    def step(model: Any, optimizer: Any) -> None:
        recipe_step.step(model, optimizer, micro_batch(config, recipe), recipe)

    asked: dict[str, Any] = {
        "device": card,
        "world": recipe.cards,
        "items": recipe.micro_batch * recipe.accumulation * recipe.tokens // recipe.sequence_cards,
        "unit": "tokens",
        "name": name or str(recipe),
        "reuse_results": shared or SharedResults(),
    }
    if recipe.needs_bitsandbytes or has_bitsandbytes():
        bitsandbytes_library()  # a simulation has to know of it before it begins
    found = recipe_step.depths(config, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' own, about weights that are not there
        if found.small:
            try:
                return extrapolate(
                    lambda layers: recipe_step.build(
                        auto, recipe_step.shallower(config, layers), recipe
                    ),
                    step,
                    layers=found.layers,
                    from_layers=found.small,
                    **asked,
                )
            except ValueError as error:
                if not isinstance(error.__cause__, Misaligned):
                    raise
        return simulate(lambda: recipe_step.build(auto, config, recipe), step, **asked)
