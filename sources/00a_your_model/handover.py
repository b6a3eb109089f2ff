"""What no few cards hold goes on to lesson 15's studio: the model's shape, as a line to copy."""

from __future__ import annotations

from dataclasses import fields

from utils.catalog import ModelShape
from utils.fitting.model_fit import Fit
from utils.fitting.seconds import shape_of


def studio_line(found: Fit) -> str:
    """`shape = ModelShape(...)` where neither the recipe nor a set of cures fits; "" where one does.

    It takes the place of `shape = model_shape(...)` in the last section of lesson 15.

    Raises:
        ValueError: nothing fits, and the planner has no shape for this architecture.
    """
    if found.runs.fits or found.trials is None:
        return ""
    config = found.trials.config
    shape = shape_of(config)
    if shape is None:
        raise ValueError(
            f"Nothing that was tried fits, and the planner lays out no {config.model_type!r}: try more "
            "cards (cards=8), a smaller batch, or adapters."
        )
    return f"shape = {written(shape)}"


def written(shape: ModelShape) -> str:
    """The call that makes a shape, without what it takes by default."""
    given = [
        f"{field.name}={getattr(shape, field.name)!r}"
        for field in fields(shape)
        if getattr(shape, field.name) != field.default
    ]
    return f"ModelShape({', '.join(given)})"
