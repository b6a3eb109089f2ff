"""Verdicts and cures: whole depths, loaded models, independent runs of the printed lines."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers as hf
from torch import nn

from utils.catalog import device
from utils.fitting import Fit, Recipe, Trials, building, fit, fit_model, fitted, model_config
from utils.fitting.answer import lesser, ranked, rows, small
from utils.fitting.cures import added, candidates, checkpointing_of, not_simulated
from utils.fitting.inputs import micro_batch
from utils.memory.measurement import Measurement
from utils.simulation import SimulationError, simulate

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
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
    recipe, config = BASE.but(**changes), building.shallower(model_config(tiny), 17)
    short = building.depths(config, recipe)
    assert short.small is not None, "17 layers are to be extended from three shallow models"
    found = Trials("tiny", config, CARD).verdict(recipe).peak_bytes
    whole = simulate(
        lambda: building.build(hf.AutoModelForCausalLM, config, recipe),
        lambda model, optimizer: building.step(
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
    assert building.depths(config, recipe.but(checkpointing=2)).small is None, "1, 3 and 5 are more"
    found = Trials("whisper", config, CARD).verdict(recipe)
    assert "Extended from 1, 2 and 3 layers to 7" in " ".join(found.notes)
    whole = simulate(
        lambda: building.build(hf.AutoModelForSpeechSeq2Seq, config, recipe),
        lambda model, optimizer: building.step(
            model, optimizer, micro_batch(config, recipe), recipe
        ),
        device=CARD,
    )
    assert found.peak_bytes == whole.peak_bytes


@pytest.fixture(scope="module")
def answer(tiny: Path) -> Fit:
    return fit_model(
        tiny, BASE.but(method="full", optimizer="adamw-foreach", tokens=256), card=CARD
    )


def test_every_cure_says_what_it_saves_and_in_which_line(answer: Fit) -> None:
    gains, others = ({tried.name for tried in some} for some in (answer.cures, answer.without_gain))
    assert {"checkpointing of all blocks", "8-bit AdamW"} <= gains
    rest = {"chunked loss", "fused AdamW", "step in backward"}
    assert rest <= gains | others, "the peak decides which of them gain"
    assert not answer.refused, "each of these can be simulated"
    for tried in answer.cures:
        assert tried.gains and tried.cures[0].line and tried.cures[0].costs
        assert answer.verdict.needed_bytes - tried.verdict.needed_bytes == tried.saved_bytes
    times = [tried.seconds_per_gib for tried in answer.cures]
    assert times == sorted(times), "cheapest seconds per GiB first"


def test_copies_to_the_host_take_their_bytes_over_the_link_both_ways(answer: Fit) -> None:
    on_host = next(t for t in answer.cures if t.name == "activations to the host")
    sent_bytes = on_host.verdict.measurement.host_bytes
    assert sent_bytes and on_host.added_seconds and on_host.verdict.seconds
    rate = device(CARD).pcie.sustained_bytes_per_second
    assert on_host.added_seconds == pytest.approx(2 * sent_bytes / rate, rel=1e-6)
    assert on_host.row()["added a step"].startswith(("+", "under"))


def test_two_sizes_on_the_host_are_not_one_time(tiny: Path) -> None:
    trials, recipe = Trials("tiny", model_config(tiny), CARD), BASE.but(offload_activations=True)
    one, twice = (trials.verdict(recipe.but(micro_batch=size)) for size in (2, 4))
    assert one.seconds and twice.seconds
    host = [verdict.measurement.host_bytes or 0 for verdict in (one, twice)]
    assert host[1] > 1.5 * host[0]
    rate = device(CARD).pcie.sustained_bytes_per_second
    for verdict, sent_bytes in zip((one, twice), host, strict=True):
        kept = verdict.recipe and verdict.recipe.but(offload_activations=False)
        without = trials.verdict(kept) if kept else verdict
        assert verdict.seconds and without.seconds
        more = verdict.seconds[1] - without.seconds[1]
        assert more == pytest.approx(2 * sent_bytes / rate, rel=1e-6)


def test_states_that_stay_on_the_host_are_not_sent_with_activations(tiny: Path) -> None:
    recipe = BASE.but(method="full", optimizer="paged-adamw")
    trials = Trials("tiny", model_config(tiny), CARD)
    verdict = trials.verdict(recipe)

    def waiting(host_bytes: int) -> Measurement:
        said = {**verdict.measurement.allocator_bytes, "host peak": host_bytes}
        return replace(verdict.measurement, allocator_bytes=said)

    trials.found[recipe] = replace(verdict, measurement=waiting(1000))
    both = recipe.but(offload_activations=True)
    assert trials._sent_bytes(both, waiting(5000)) == 4000
    assert trials._sent_bytes(recipe, waiting(5000)) is None, "nothing is sent"


def test_what_is_not_modelled_is_no_zero(answer: Fit) -> None:
    packed = next(tried for tried in answer.cures if tried.name == "8-bit AdamW")
    assert packed.added_seconds == 0 and packed.row()["added a step"] == "not modelled"
    assert added(None) == "not known" and added(0.004) == "under 10 ms" and added(2) == "+2 s"


def test_the_table_has_what_fits_first_and_leaves_out_what_is_next_to_nothing(answer: Fit) -> None:
    assert answer.usual and answer.usual.name.count("+") == 1 and not answer.shorter
    names = [tried.name for tried in ranked(answer)]
    assert answer.usual.name in names and len(set(names)) == len(names)
    assert rows(answer)[-1]["cure"] == "expandable segments" and not lesser(answer)
    room = answer.verdict.peak_bytes // 2
    short = replace(answer, verdict=replace(answer.verdict, usable_bytes=room))
    assert all(tried.saved_bytes < 0.03 * -short.verdict.spare_bytes for tried in small(short))
    assert rows(short)[-1]["fits"] == "no", "the tensors alone are too much"
    words = [tried.verdict.word for tried in ranked(short)]
    assert words == sorted(words, key=("yes", "just", "no").index)


def test_shorter_texts_are_tried_until_one_fits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = BASE.but(tokens=2048, micro_batch=1)
    trials = Trials("tiny", model_config(tiny), CARD)
    room = int(1.2 * trials.verdict(recipe.but(tokens=512)).needed_bytes)
    monkeypatch.setattr(fitted, "usable_bytes", lambda card: room)
    found = list(fitted._shorter(Trials("tiny", model_config(tiny), CARD), recipe))
    assert found and found[-1].verdict.word == "yes"
    assert all(tried.verdict.word != "yes" for tried in found[:-1])
    assert found[0].name == "1,024 tokens in place of 2,048"


def test_what_was_left_out_is_said(tiny: Path) -> None:
    asked = BASE.but(method="qlora")
    assert "bnb_4bit_quant_storage" in not_simulated(asked, 2)["FSDP2 over 2 cards"]
    assert not not_simulated(asked, 1) and not not_simulated(BASE, 2)
    names = {cure.name for cure in candidates(model_config(tiny), BASE, 2)}
    assert "FSDP2 over 2 cards" in names, "there it is tried"


def test_what_gains_nothing_is_named_apart(answer: Fit) -> None:
    assert "fused AdamW" in {tried.name for tried in answer.without_gain}, "backward decides here"
    assert not any(tried.gains for tried in answer.without_gain)
    assert not {t.name for t in answer.without_gain} & {t.name for t in answer.cures}


def test_no_more_blocks_are_recomputed_than_leave_a_margin(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = BASE.but(tokens=256, micro_batch=8)
    config = building.shallower(model_config(tiny), 29)  # one more than whole threes and fours
    ways = [(0, 0), *fitted.FEWER, (1, 0)]
    trials = Trials("tiny", config, CARD)
    needs = {
        way: trials.verdict(recipe.but(checkpointing=way[0], spared=way[1])).needed_bytes
        for way in ways
    }
    assert list(needs.values()) == sorted(needs.values(), reverse=True), "fewer blocks take more"
    room = int(1.12 * needs[1, 3])  # two thirds of the blocks leave a margin, half do not
    assert room < 1.11 * needs[2, 0]
    monkeypatch.setattr(fitted, "usable_bytes", lambda card: room)
    smaller = {way: replace(verdict, usable_bytes=room) for way, verdict in trials.found.items()}
    on_it = Trials("tiny", config, CARD, smaller)
    every = on_it.tried(recipe, [checkpointing_of(1)])
    found = fitted._thinned(on_it, recipe, every, [every])
    assert found.name == "checkpointing of all but every third block"


@pytest.mark.slow
def test_the_best_pair_is_that_of_all_pairs(answer: Fit, tiny: Path) -> None:
    trials, base = Trials("tiny", model_config(tiny), CARD), answer.verdict.recipe
    assert base and answer.pair
    best = 0
    for first in answer.cures:
        for second in answer.cures:
            changes = {**first.cures[0].changes, **second.cures[0].changes}
            if len(changes) < 2:
                continue
            with contextlib.suppress(ValueError, SimulationError):
                best = max(
                    best,
                    answer.verdict.needed_bytes - trials.verdict(base.but(**changes)).needed_bytes,
                )
    assert answer.pair.saved_bytes >= 0.98 * best


def test_the_verdict_names_its_margin_and_its_parts(answer: Fit) -> None:
    verdict = answer.verdict
    assert verdict.fits and not verdict.is_close and "fits one RTX 4090" in verdict.sentence
    parts = verdict.to_dict()["at_the_peak_bytes"]
    assert sum(parts.values()) == verdict.peak_bytes
    assert verdict.seconds and verdict.seconds[0] < verdict.seconds[1] < verdict.seconds[2]
    assert f": {512 / verdict.seconds[1]:,.0f} tokens a second." in verdict.speed
    on_host = next(t.verdict for t in answer.cures if t.name == "activations to the host")
    assert "The host holds " in str(on_host) and "The host holds " not in str(verdict)


def test_a_cpu_and_an_unknown_card_are_refused_before_any_work(tiny: Path) -> None:
    with pytest.raises(ValueError, match="no limit to fit"):
        fit_model(tiny, BASE, card="cpu")
    with pytest.raises(ValueError, match="RTX 4090"):
        fit_model(tiny, BASE, card="RTX 4091")


def test_adapters_that_find_no_layer_end_in_a_sentence(tiny: Path) -> None:
    with pytest.raises(ValueError, match="query_key_value"):
        fit_model(tiny, BASE.but(targets=("query_key_value",)), card=CARD, cures=False)


class Wide(nn.Module):
    """Alike blocks in a list, which hold most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def own_build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Wide().to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def own_step(model: Any, optimizer: Any) -> None:
    model(torch.randn(4096, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_functions_of_ones_own_get_the_same_answer_and_cures() -> None:
    found = fit(own_build, own_step, card=CARD, name="wide")
    plain = simulate(own_build, own_step, device=CARD)
    assert found.verdict.peak_bytes == plain.peak_bytes and found.verdict.name == "wide"
    saved = {tried.name: tried.saved_bytes for tried in [*found.cures, *found.without_gain]}
    kept_bytes = 8 * 2 * 4096 * 1024 * 4  # what a block's two linear layers and its GELU keep
    assert saved["checkpointing of all blocks"] > 0.7 * kept_bytes
    assert set(saved) == {
        "checkpointing of all blocks", "activations to the host", "fused AdamW", "8-bit AdamW",
    }  # fmt: skip
    lines = [cure.line for tried in found.cures for cure in tried.cures]
    assert any("checkpoint_blocks(model.blocks)" in line for line in lines), (
        "the program's own name"
    )


def test_what_saves_nothing_alone_may_help_where_the_peak_moved_to() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(Wide() for _ in range(8))).to("cuda")
        return model, torch.optim.AdamW(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(1024, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = fit(build, step, card=CARD)
    alone = {tried.name: tried for tried in [*found.cures, *found.without_gain]}
    assert alone["checkpointing of all blocks"].verdict.measurement.peak_phase == "optimizer step"
    assert found.pair in found.pairs
    assert found.pair and found.pair.saved_bytes > max(t.saved_bytes for t in found.cures)


def test_a_cure_that_a_program_cannot_take_says_why() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 64).to("cuda")
        return model, torch.optim.SGD(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()

    found = fit(build, step, card=CARD)
    assert "no list of alike blocks" in found.refused["checkpointing of all blocks"]
    assert "SGD" in found.refused["8-bit AdamW"]


def test_an_error_of_ones_own_function_comes_through() -> None:
    def step(model: Any, optimizer: Any) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        fit(own_build, step, card=CARD)
