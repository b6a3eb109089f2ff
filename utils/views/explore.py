"""Sliders and menus around a figure. The static figure comes from the same function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from utils.views.show import image_html


def explore(draw: Callable[..., tuple[Figure, str]], **controls: Any) -> widgets.VBox:
    """A figure that is redrawn whenever a control moves.

    Args:
        draw: takes one value per control, by name; returns the figure and its alternative text.
        controls: a list makes a menu, a list of numbers a slider over these values.

    Raises:
        ValueError: no controls, or an empty one.
    """
    if not controls or not all(controls.values()):
        raise ValueError("explore() needs at least one control, each with values to choose from.")
    picked = {name: _control(name, values) for name, values in controls.items()}
    picture = widgets.HTML()

    def redraw(change: object = None) -> None:
        figure, alt = draw(**{name: control.value for name, control in picked.items()})
        picture.value = image_html(figure, alt)

    for control in picked.values():
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([*picked.values(), picture])


def _control(name: str, values: list[Any]) -> widgets.Widget:
    """A slider for numbers, a menu for the rest. It reports when it is let go, not on the way."""
    label = name.replace("_", " ")
    layout, style = widgets.Layout(width="420px"), {"description_width": "110px"}
    if all(isinstance(value, (int, float)) for value in values):
        return widgets.SelectionSlider(
            options=values, description=label, continuous_update=False, layout=layout, style=style
        )
    return widgets.Dropdown(options=values, description=label, layout=layout, style=style)
