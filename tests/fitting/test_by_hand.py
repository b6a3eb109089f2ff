"""A recipe beside the program that a user writes by hand, and an extended step beside the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers as hf

from utils.fitting import Recipe, Trials, model_config, recipe_step
from utils.fitting.inputs import micro_batch
from utils.simulation import simulate

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own
CARD = "RTX 4090"
OPTIMIZERS: Any = bnb.optim
BASE = Recipe(tokens=128, micro_batch=2, rank=4)
FOUR_BITS = hf.BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def loaded(folder: Path, **settings: Any) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, **settings)


def plain_step(model: Any, optimizer: Any) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def lora(model: Any) -> Any:
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    ).train()


# What a user writes by hand for each recipe, loaded from a folder and not made from a configuration.
BY_HAND: dict[str, tuple[Recipe, Any, Any]] = {
    "full": (
        BASE.but(method="full"),
        lambda at: (m := loaded(at, dtype=torch.float32).to("cuda").train(), adamw(m)),
        plain_step,
    ),
    "lora": (
        BASE,
        lambda at: (m := lora(loaded(at, dtype=torch.bfloat16).to("cuda")), adamw(m)),
        plain_step,
    ),
    "qlora": (
        BASE.but(method="qlora"),
        lambda at: (
            m := lora(loaded(at, quantization_config=FOUR_BITS, device_map={"": 0}, dtype=torch.bfloat16)),
            adamw(m),
        ),
        plain_step,
    ),
    "checkpointing": (
        BASE.but(checkpointing=1),
        lambda at: (m := lora(_checkpointed(loaded(at, dtype=torch.bfloat16).to("cuda"))), adamw(m)),
        plain_step,
    ),
    "8-bit moments": (
        BASE.but(method="full", optimizer="adamw-8bit"),
        lambda at: (
            m := loaded(at, dtype=torch.float32).to("cuda").train(),
            OPTIMIZERS.AdamW8bit(m.parameters()),
        ),
        plain_step,
    ),
    "paged moments": (
        BASE.but(method="full", optimizer="paged-adamw"),
        lambda at: (
            m := loaded(at, dtype=torch.float32).to("cuda").train(),
            OPTIMIZERS.PagedAdamW(m.parameters()),
        ),
        plain_step,
    ),
    "activations to the host": (
        BASE.but(offload_activations=True),
        lambda at: (m := lora(loaded(at, dtype=torch.bfloat16).to("cuda")), adamw(m)),
        lambda model, optimizer: _on_host(model, optimizer),
    ),
    "pure bf16": (
        BASE.but(method="full", precision="bf16"),
        lambda at: (m := loaded(at, dtype=torch.bfloat16).to("cuda").train(), adamw(m)),
        lambda model, optimizer: _without_autocast(model, optimizer),
    ),
}  # fmt: skip


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _on_host(model: Any, optimizer: Any) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.long, device="cuda")
    with torch.autograd.graph.save_on_cpu(pin_memory=True), torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _without_autocast(model: Any, optimizer: Any) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.long, device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", BY_HAND)
def test_a_recipe_takes_what_the_program_written_by_hand_takes(name: str, tiny: Path) -> None:
    recipe, build, step = BY_HAND[name]
    found = Trials("tiny", model_config(tiny), CARD).verdict(recipe).measurement
    by_hand = simulate(lambda: build(tiny), step, device=CARD)
    # Trainer's forward hands its logits out in fp32, a plain loop does not: at most one more copy.
    copy_bytes = 4 * 2 * 128 * 512 if recipe.autocast else 0
    assert 0 <= found.peak_bytes - by_hand.peak_bytes <= 0.01 * by_hand.peak_bytes + copy_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpointing": 2},
        {"checkpointing": 1, "spared": 3},
        {"method": "full", "loss": "chunked"},
    ],
)
def test_the_extended_step_is_the_whole_one(changes: dict[str, Any], tiny: Path) -> None:
    recipe, config = BASE.but(**changes), recipe_step.shallower(model_config(tiny), 17)
    short = recipe_step.depths(config, recipe)
    assert short.small is not None, "17 layers are to be extended from three shallow models"
    found = Trials("tiny", config, CARD).verdict(recipe).peak_bytes
    whole = simulate(
        lambda: recipe_step.build(hf.AutoModelForCausalLM, config, recipe),
        lambda model, optimizer: recipe_step.step(
            model, optimizer, micro_batch(config, recipe), recipe
        ),
        device=CARD,
    )
    assert found == whole.peak_bytes


def test_an_encoder_and_its_decoder_are_extended_together() -> None:
    config: Any = hf.WhisperConfig(
        d_model=64, encoder_layers=7, decoder_layers=7, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=64,
        max_source_positions=32, max_target_positions=32, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    recipe = BASE.but(method="full", tokens=32)
    assert recipe_step.depths(config, recipe.but(checkpointing=2)).small is None, (
        "1, 3 and 5 are more"
    )
    found = Trials("whisper", config, CARD).verdict(recipe)
    assert "Extended from 1, 2 and 3 layers to 7" in " ".join(found.notes)
    whole = simulate(
        lambda: recipe_step.build(hf.AutoModelForSpeechSeq2Seq, config, recipe),
        lambda model, optimizer: recipe_step.step(
            model, optimizer, micro_batch(config, recipe), recipe
        ),
        device=CARD,
    )
    assert found.peak_bytes == whole.peak_bytes
