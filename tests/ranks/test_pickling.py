"""What a notebook's functions need to travel to another process."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch.distributed as dist

from utils.ranks.pickling import pickled


def test_a_function_that_uses_dist_and_an_attribute_config_travels() -> None:
    def layers(model: Any) -> int:
        return model.config.layers if dist.is_available() else 0

    assert type(sys.modules["torch.distributed.config"]) is not ModuleType, (
        "torch.distributed.config is a plain module now: packing needs no class of its own"
    )
    sent = cloudpickle.loads(pickled(layers))
    assert sent(SimpleNamespace(config=SimpleNamespace(layers=4))) == 4


def test_a_module_made_by_hand_travels_with_its_contents() -> None:
    made = ModuleType("made_by_hand")
    made.answer = 42  # type: ignore[attr-defined]
    assert cloudpickle.loads(pickled(made)).answer == 42


def test_what_cannot_travel_says_so() -> None:
    with pytest.raises(TypeError, match="generator"):
        pickled(_ for _ in ())
