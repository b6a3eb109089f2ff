"""Sliders and menus around a figure. The static figure comes from the same function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from utils.views.images import image_html


def explore(
    draw: Callable[..., tuple[Figure, str]],
    start: Mapping[str, Any] | None = None,
    /,
    **controls: Any,
) -> widgets.VBox:
    """A figure that is redrawn whenever a control moves.

    Args:
        draw: takes one value per control, by name; returns the figure and its alternative text.
        start: the value to begin with, by control; the first of its values where none is given.
        controls: a list makes a menu, a list of numbers a slider over these values.

    Raises:
        ValueError: no controls, or an empty one, or a start that no control offers.
    """
    if not controls or not all(controls.values()):
        raise ValueError("explore() needs at least one control, each with values to choose from.")
    for name, value in (start or {}).items():
        if value not in controls.get(name, []):
            raise ValueError(
                f"explore() cannot start with {name}={value!r}: {name} offers "
                f"{controls.get(name, 'nothing, there is no such control')}."
            )
    picked = {name: _control(name, values) for name, values in controls.items()}
    for name, value in (start or {}).items():
        picked[name].value = value
    picture = widgets.HTML()

    def redraw(change: object = None) -> None:
        figure, alt = draw(**{name: control.value for name, control in picked.items()})
        picture.value = image_html(figure, alt)

    for control in picked.values():
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([*picked.values(), picture])


def _control(name: str, values: list[Any]) -> widgets.SelectionSlider | widgets.Dropdown:
    """A slider for numbers, a menu for the rest. It reports when it is let go, not on the way."""
    label = name.replace("_", " ")
    layout, style = widgets.Layout(width="420px"), {"description_width": "110px"}
    if all(isinstance(value, (int, float)) for value in values):
        return widgets.SelectionSlider(
            options=values, description=label, continuous_update=False, layout=layout, style=style
        )
    return widgets.Dropdown(options=values, description=label, layout=layout, style=style)
