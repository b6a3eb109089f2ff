"""A clock that the reader starts and sees; it runs in the browser, so a busy kernel does not stop it."""

from __future__ import annotations

import ipywidgets as widgets


def countdown(minutes: float, label: str = "") -> widgets.HBox:
    """A bar that fills in so many minutes, with buttons to start, pause and reset it.

    Args:
        minutes: Until it is full.
        label: What it is for.

    Raises:
        ValueError: no time at all.
    """
    if not minutes > 0:
        raise ValueError(f"A clock runs for more than 0 minutes; got {minutes}.")
    seconds = round(60 * minutes)
    play = widgets.Play(min=0, max=seconds, interval=1000, description="start the clock")
    bar = widgets.IntProgress(
        min=0,
        max=seconds,
        description=label,
        bar_style="info",
        style={"description_width": "initial"},
        tooltip=f"{label}: seconds gone",
    )
    gone = widgets.BoundedIntText(
        min=0,
        max=seconds,
        disabled=True,
        description="seconds",
        layout=widgets.Layout(width="160px"),
    )
    widgets.jslink((play, "value"), (bar, "value"))
    widgets.jslink((play, "value"), (gone, "value"))
    return widgets.HBox([play, bar, gone, widgets.Label(f"of {seconds}")])
