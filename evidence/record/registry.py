"""The experiments by name. A new one is one file in this folder, or in its lesson's, and a line here."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evidence.record.experiment import Experiment


class RecordError(ValueError):
    """A record cannot be made, written or read; the message says what to do."""


# Each name is a module that offers EXPERIMENT: of this folder, or of the one lesson that shows it.
EXPERIMENTS = (
    "cifar_accuracy",
    "cluster_runs",
    "cluster_troubles",
    "device_speed",
    "gloo_ranks",
    "gpt1b_recompute",
    "llama7b_adapters",
    "oom_fragmentation",
    "resnet50",
    "survive",
)
_OF_LESSONS = {
    "cluster_runs": "utils.lessons.lesson_17",
    "cluster_troubles": "utils.lessons.lesson_17",
    "survive": "utils.lessons.lesson_16a.records",
}


def check_name(name: str) -> None:
    """Refuse a name that is no experiment's, and say which it may have meant.

    Raises:
        RecordError: no experiment has this name.
    """
    if name in EXPERIMENTS:
        return
    near = difflib.get_close_matches(name, EXPERIMENTS, n=2, cutoff=0.4)
    advice = f"Did you mean {' or '.join(near)}?" if near else f"There is {', '.join(EXPERIMENTS)}."
    raise RecordError(f"{name!r} is no experiment. {advice}")


def load(name: str) -> Experiment:
    """The experiment of this name.

    Raises:
        RecordError: no experiment has this name.
    """
    check_name(name)
    return importlib.import_module(f"{_OF_LESSONS.get(name, 'evidence.record')}.{name}").EXPERIMENT
