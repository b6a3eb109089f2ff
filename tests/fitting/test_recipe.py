"""A recipe refuses what cannot be trained, with the choice that would do."""

from __future__ import annotations

from typing import Any

import pytest

from utils.catalog import device
from utils.fitting import Recipe, mixed_precision


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "qlorra"}, "'full', 'lora', 'qlora'"),
        ({"precision": "int8"}, "bf16-mixed"),
        ({"optimizer": "lion"}, "'adamw'"),
        ({"tokens": 0}, "tokens is 0; it must be 1 or more"),
        ({"tokens": 10**9}, "10,000,000 is the most"),
        ({"rank": 1.5}, "whole number"),
        ({"cards": 2, "method": "qlora"}, "Choose method='lora'"),
        ({"precision": "fp32", "method": "qlora"}, "Choose precision='bf16-mixed'"),
        ({"spared": 3}, "Set checkpointing=1"),
        ({"checkpointing": 1, "spared": 1}, "spared to 2 or more"),
        ({"step_in_backward": True, "accumulation": 2}, "Set accumulation=1"),
        ({"step_in_backward": True, "cards": 2}, "Set cards=1"),
        ({"cards": 4, "sequence_cards": 3}, "Set cards=3, or a multiple"),
        ({"sequence_cards": 2}, "Set cards=2"),
        ({"cards": 2, "sequence_cards": 2, "tokens": 1023}, "Set tokens=1024"),
        ({"cards": 2, "sequence_cards": 2, "precision": "fp16-mixed"}, "precision='bf16-mixed'"),
        ({"cards": 2, "sequence_cards": 2, "step_in_backward": True}, "Set cards=1"),
        ({"offload_states": True, "method": "qlora"}, "method='lora' or 'full'"),
        ({"offload_states": True, "optimizer": "adamw-8bit"}, "optimizer='adamw'"),
        ({"offload_states": True, "step_in_backward": True}, "step_in_backward=False"),
        ({"offload_states": True, "precision": "fp16-mixed"}, "precision='bf16-mixed'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe(**fields)


def test_a_frozen_model_is_in_16_bits_and_a_trained_one_in_32_under_autocast() -> None:
    kinds = {m: Recipe(method=m).weights for m in ("full", "lora", "qlora")}
    assert kinds == {"full": "fp32", "lora": "bf16", "qlora": "bf16"}
    assert Recipe(method="full", precision="bf16").weights == "bf16"
    assert Recipe(method="full", precision="bf16").autocast is None
    assert Recipe(precision="fp16-mixed").autocast == "fp16"


def test_a_card_without_bf16_is_told_to_take_fp16() -> None:
    with pytest.raises(ValueError, match="T4 computes no bfloat16.*precision='fp16-mixed'"):
        Recipe().check_card(device("T4"))
    Recipe(precision=mixed_precision("T4")).check_card(device("T4"))
    Recipe(precision=mixed_precision("A100 80GB")).check_card(device("A100 80GB"))
    assert Recipe(method="qlora", precision="fp16-mixed").products == "fp16"
