"""What one block keeps for backward: by what is trained, and how."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_06.kept import PARTS, draw_kept, kept_by_block

pytestmark = [
    pytest.mark.deepspeed,  # transformers and peft import it
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft asks for it
]
HIDDEN, FORWARD = 128, 384
TRAINED, ADAPTERS = "inputs of trained linear layers", "inputs of adapters"


@pytest.fixture(scope="module")
def arms() -> dict[str, dict[str, float]]:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=FORWARD,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    some = ["q_proj", "v_proj"]
    return {
        "all": kept_by_block(config),
        "some": kept_by_block(config, some),
        "adapters": kept_by_block(config, "all-linear"),
        "wide": kept_by_block(config, "all-linear", autocast=False),
        "checkpointed": kept_by_block(config, "all-linear", checkpointed=True),
    }


def test_frozen_layers_keep_no_input_and_adapters_keep_theirs(
    arms: dict[str, dict[str, float]],
) -> None:
    assert arms["all"][TRAINED] > 0 and arms["all"][ADAPTERS] == 0
    for name in ("some", "adapters"):
        assert arms[name][TRAINED] == 0
        gate = "activation function and product"
        assert arms[name][gate] == arms["all"][gate]
    copies = 4 * HIDDEN + 2 * HIDDEN + FORWARD  # q, k, v, o; gate, up; down
    assert 2 * copies <= arms["adapters"][ADAPTERS] < 2.2 * copies
    assert arms["some"][ADAPTERS] < arms["adapters"][ADAPTERS]
    assert arms["wide"][ADAPTERS] == pytest.approx(2 * arms["adapters"][ADAPTERS], rel=0.1)


def test_a_checkpointed_block_keeps_its_input_alone(arms: dict[str, dict[str, float]]) -> None:
    kept = dict(arms["checkpointed"])
    assert kept.pop("input of the block") == 2 * HIDDEN
    assert set(kept.values()) == {0.0}


def test_each_bar_tells_its_sum(arms: dict[str, dict[str, float]]) -> None:
    figure = draw_kept(arms, "kept")
    told = {text.get_text().strip() for text in figure.axes[0].texts}
    assert {f"{sum(kept.values()) / 1000:.0f} KB" for kept in arms.values()} <= told
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(PARTS)
