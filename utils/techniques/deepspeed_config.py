"""Checks of a DeepSpeed configuration: a sentence that says what to change, before ranks start."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Mapping, Set
from typing import Any

from utils.shims.deepspeed import own_reading, zero_keys

_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def check_config(config: Mapping[str, Any], world_size: int) -> None:
    """Refuse batch sizes that contradict each other, and keys that DeepSpeed does not know.

    Raises:
        ValueError: which key, and what would be right.
    """
    _check_batch(config, world_size)
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero_optimization is {zero!r}; it is a mapping, such as {{'stage': 1}}.")
    if importlib.util.find_spec("deepspeed") is not None:  # else nobody here knows its keys
        _check_keys(config, _asked_keys(), "A configuration of DeepSpeed")
        _check_keys(zero, _zero_keys(), "zero_optimization")


def read_config(config: Mapping[str, Any], world_size: int) -> Any:
    """DeepSpeed's own reading of a configuration: its `DeepSpeedConfig`, for `world_size` ranks.

    Raises:
        ValueError: as `check_config`, or what DeepSpeed itself refuses.
    """
    check_config(config, world_size)
    return _own_reading(dict(config), world_size)


def _own_reading(config: dict[str, Any], world_size: int) -> Any:
    from utils.techniques.deepspeed import load_deepspeed

    load_deepspeed()
    return own_reading(config, world_size)


def _check_batch(config: Mapping[str, Any], world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; there is 1 rank or more.")
    given = {key: config[key] for key in _BATCH if key in config}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}; it must be a whole number, 1 or more.")
    if len(given) == len(_BATCH):
        micro, steps, whole = (given[key] for key in _BATCH)
        if whole != micro * steps * world_size:
            raise ValueError(
                f"The batch sizes contradict each other: {_BATCH[0]} {micro} x {_BATCH[1]} {steps} "
                f"x {world_size} ranks is {micro * steps * world_size}, and {_BATCH[2]} is {whole}. "
                f"Leave out one of the three, or make {_BATCH[2]} the product."
            )


def _check_keys(settings: Mapping[str, Any], known: Set[str], where: str) -> None:
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{where} has no setting {key!r}.{hint}")


class _Asked(dict[str, Any]):
    """A configuration that notes which keys it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings)
        self.keys_asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # `key in config.keys()` asks too


@functools.cache
def _asked_keys() -> frozenset[str]:
    """All top-level keys that DeepSpeed's class looks for; it ignores others in silence."""
    asked = _Asked(train_batch_size=1)
    _own_reading(asked, 1)
    return frozenset(asked.keys_asked)


@functools.cache
def _zero_keys() -> frozenset[str]:
    """Names and aliases of DeepSpeed's own class."""
    from utils.techniques.deepspeed import load_deepspeed

    load_deepspeed()
    return zero_keys()
