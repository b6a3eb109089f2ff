"""A whole model in few bits: the small Llama's file and text, the order of methods, bad input."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from utils.lessons import folders
from utils.lessons.lesson_08.awq import awq
from utils.lessons.lesson_08.bytes_llama import (
    FILE,
    bytes_llama,
    made_by,
    perplexity,
    sequence_losses,
)
from utils.lessons.lesson_08.gptq import gptq
from utils.lessons.lesson_08.int8 import Int8Weight
from utils.lessons.lesson_08.library_text import (
    HELD_OUT,
    LENGTH,
    calibration_tokens,
    held_out_sequences,
    held_out_tokens,
    training_tokens,
)
from utils.lessons.lesson_08.outlier import stands_out, with_outlier
from utils.lessons.lesson_08.packed_linear import pack_linears
from utils.lessons.lesson_08.rounding import round_to_nearest
from utils.lessons.lesson_08.weight_only import (
    Inputs,
    inputs_of,
    linears_of,
    quantize_weights,
)

pytestmark = pytest.mark.long

METHODS: dict[str, Callable[[Tensor, Inputs], Any]] = {
    "int8": lambda w, x: Int8Weight.of(w),
    "nearest": lambda w, x: round_to_nearest(w, 4, 32),
    "AWQ": lambda w, x: awq(w, x.moments, x.magnitudes, 4, 32),
    "GPTQ": lambda w, x: gptq(w, x.moments, 4, 32),
}


def test_the_model_has_learned_something() -> None:
    assert FILE.stat().st_size < 4e6, "the file is small enough to be part of the repository"
    found = perplexity(bytes_llama(), held_out_sequences(64))
    assert 3 < found < 6, f"perplexity {found:.2f} on held-out modules; a byte has 256 values"
    assert {"steps", "seed", "text", "torch"} <= made_by().keys(), "it says how it was made"


def test_held_out_modules_are_not_trained_on() -> None:
    seen, held = bytes(training_tokens().tolist()), bytes(held_out_tokens().tolist())
    for start in range(0, len(held) - 2000, 20_000):
        assert held[start : start + 2000] not in seen, "the training text holds a held-out passage"
    assert len(HELD_OUT) == 6, "six modules are kept back"


def test_a_window_s_target_is_the_next_byte() -> None:
    rows = held_out_sequences(4)
    assert rows.shape == (4, LENGTH + 1), "inputs and the last target"
    text = bytes(held_out_tokens().tolist())
    assert all(bytes(row.tolist()) in text for row in rows), "each row is a passage of the text"


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_methods_holds_in_every_layer(seed: int) -> None:
    """On the same inputs: int8 < GPTQ-4, AWQ-4 < round-to-nearest-4."""
    model, tokens = bytes_llama(), calibration_tokens(seed=seed)
    found = {
        name: quantize_weights(bytes_llama(), tokens, method) for name, method in METHODS.items()
    }
    assert len(found["int8"]) == 28, "seven matrices in each of four blocks"
    del model
    for rows in zip(*found.values(), strict=True):
        eight, nearest, by_awq, by_gptq = (row.relative_error for row in rows)
        assert eight < min(by_awq, by_gptq), f"{rows[0].layer}: int8 has the least error"
        assert max(by_awq, by_gptq) < nearest, f"{rows[0].layer}: calibration lowers the error"


def test_eight_bits_cost_less_than_half_a_percent() -> None:
    held, model = held_out_sequences(64), bytes_llama()
    with torch.no_grad():
        for part in linears_of(model.blocks).values():
            part.weight.copy_(part.weight.half())
    before = perplexity(model, held)
    quantize_weights(model, calibration_tokens(4), METHODS["int8"])
    assert abs(perplexity(model, held) / before - 1) < 0.005, "int8 against fp16"


def test_inputs_are_those_of_the_layer() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), torch.randn(3, 5, 8)
    with inputs_of({"a": layer}) as seen:
        layer(x)
        layer(x)
    layer(x)
    rows = torch.cat([x.flatten(0, 1)] * 2)
    assert seen["a"].rows == 30, "after the block nothing is taken down"
    torch.testing.assert_close(seen["a"].moments, rows.T @ rows)
    torch.testing.assert_close(seen["a"].magnitudes, rows.abs().mean(dim=0))
    torch.testing.assert_close(seen["a"].largest, rows.abs().amax(dim=0))


def test_a_planted_channel_stands_out_where_a_norm_is_read() -> None:
    found = []
    for model in (bytes_llama(), with_outlier(bytes_llama())):
        layers = {f"blocks.{path}": layer for path, layer in linears_of(model.blocks).items()}
        with inputs_of(layers) as seen, torch.no_grad():
            model(calibration_tokens(2))
        found.append(stands_out(seen))
    before, after = found
    for label in ("query, key, value", "gate, up"):
        assert min(after[label]) > 3 * max(before[label]), f"{label} read the planted channel"
    assert after["down"] == pytest.approx(before["down"], rel=0.01), "no norm lies before it"


def test_a_block_is_calibrated_on_the_rounded_blocks_before_it() -> None:
    met: list[Tensor] = []

    def spoil(weight: Tensor, inputs: Inputs) -> Any:
        met.append(inputs.moments)
        return round_to_nearest(torch.zeros_like(weight), 4)

    with (
        inputs_of(
            {"last": linears_of(model := bytes_llama())["blocks.3.attention.query"]}
        ) as plain,
        torch.no_grad(),
    ):
        model(calibration_tokens(2))
    quantize_weights(bytes_llama(), calibration_tokens(2), spoil)
    assert not torch.allclose(met[21], plain["last"].moments), (
        "the last block reads what came before"
    )


def test_a_packed_model_says_the_same() -> None:
    few = bytes_llama()
    rows = quantize_weights(few, calibration_tokens(4), METHODS["AWQ"])
    packed = pack_linears(bytes_llama(), {row.layer: row.made for row in rows})
    held = held_out_sequences(8)
    torch.testing.assert_close(
        sequence_losses(packed, held), sequence_losses(few, held), rtol=1e-3, atol=1e-3
    )
    stored = sum(part.nbytes for part in packed.get_submodule("blocks").buffers())
    assert stored == sum(row.made.stored_bytes for row in rows), "the bytes are those of the format"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: quantize_weights(m, torch.zeros(0, 8, dtype=torch.long), METHODS["GPTQ"]), "a batch of tokens"),
        (lambda m: quantize_weights(m, torch.zeros(8, dtype=torch.long), METHODS["GPTQ"]), "a batch of tokens"),
        (lambda m: quantize_weights(m, torch.full((1, 8), 300), METHODS["GPTQ"]), "another tokenizer"),
        (lambda m: quantize_weights(m, torch.full((1, 8), -1), METHODS["GPTQ"]), "another tokenizer"),
        (lambda m: quantize_weights(m, calibration_tokens(1), {}), "No method is given for 'blocks.0"),
        (lambda m: quantize_weights(nn.Linear(2, 2), calibration_tokens(1), METHODS["GPTQ"]), "no `blocks`"),
        (lambda m: quantize_weights(m, calibration_tokens(1), lambda w, x: round_to_nearest(w, 4, 48)), "does not divide"),
    ],
)  # fmt: skip
def test_bad_input_ends_in_a_sentence(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(bytes_llama())


def test_lost_or_damaged_weights_end_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="trains it anew"):
        bytes_llama(tmp_path / "bytes_llama.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(FILE.read_bytes()[:100_000])
    with pytest.raises(ValueError, match="cut off"):
        bytes_llama(cut)
    other = tmp_path / "other.safetensors"
    shutil.copy(folders()["08"] / "gptq_layer.safetensors", other)
    with pytest.raises(ValueError, match="of another model"):
        bytes_llama(other)
