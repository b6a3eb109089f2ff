"""Verdicts and cures of models by name: what each saves, what is said of it, and in which order."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from utils.catalog import device
from utils.fitting import (
    Fit,
    Recipe,
    Trials,
    cure_sets,
    fit_model,
    model_config,
    model_fit,
    recipe_step,
)
from utils.fitting import (
    trials as simulated,
)
from utils.fitting.answer_table import lesser, ranked, rows, small
from utils.fitting.cures import checkpointing_of, single_cures
from utils.fitting.sharing import not_simulated
from utils.fitting.tried_cures import added
from utils.fitting.verdict import MARGIN
from utils.memory.measurement import Measurement
from utils.simulation import SimulationError

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own
CARD = "RTX 4090"
BASE = Recipe(tokens=128, micro_batch=2, rank=4)


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
    rate = device(CARD).host_link.sustained_bytes_per_second
    assert on_host.added_seconds == pytest.approx(2 * sent_bytes / rate, rel=1e-6)
    assert on_host.row()["added a step"].startswith(("+", "under"))


def test_two_sizes_on_the_host_are_not_one_time(tiny: Path) -> None:
    trials, recipe = Trials("tiny", model_config(tiny), CARD), BASE.but(offload_activations=True)
    one, twice = (trials.verdict(recipe.but(micro_batch=size)) for size in (2, 4))
    assert one.seconds and twice.seconds
    host = [verdict.measurement.host_bytes or 0 for verdict in (one, twice)]
    assert host[1] > 1.5 * host[0]
    rate = device(CARD).host_link.sustained_bytes_per_second
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
    monkeypatch.setattr(simulated, "usable_bytes", lambda card: room)
    found = list(model_fit._shorter(Trials("tiny", model_config(tiny), CARD), recipe))
    assert found and found[-1].verdict.word == "yes"
    assert all(tried.verdict.word != "yes" for tried in found[:-1])
    assert found[0].name == "1,024 tokens in place of 2,048"


def test_what_was_left_out_is_said(tiny: Path) -> None:
    asked = BASE.but(method="qlora")
    config = model_config(tiny)
    said = not_simulated(config, asked, 2)
    assert "bnb_4bit_quant_storage" in said["FSDP2 over 2 cards"]
    assert said["one sequence over 2 cards"].startswith("it shares states by FSDP2")
    assert not not_simulated(config, asked, 1) and not not_simulated(config, BASE, 2)
    names = {cure.name for cure in single_cures(model_config(tiny), BASE, 2)}
    assert "FSDP2 over 2 cards" in names, "there it is tried"


def test_what_gains_nothing_is_named_apart(answer: Fit) -> None:
    assert "fused AdamW" in {tried.name for tried in answer.without_gain}, "backward decides here"
    assert not any(tried.gains for tried in answer.without_gain)
    assert not {t.name for t in answer.without_gain} & {t.name for t in answer.cures}


def test_no_more_blocks_are_recomputed_than_leave_a_margin(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = BASE.but(tokens=256, micro_batch=8)
    config = recipe_step.shallower(model_config(tiny), 29)  # one more than whole threes and fours
    ways = [(0, 0), *cure_sets.FEWER, (1, 0)]
    trials = Trials("tiny", config, CARD)
    needs = {
        way: trials.verdict(recipe.but(checkpointing=way[0], spared=way[1])).needed_bytes
        for way in ways
    }
    assert list(needs.values()) == sorted(needs.values(), reverse=True), "fewer blocks take more"
    # Two thirds of the blocks leave a margin, half do not.
    room = int((1.01 + MARGIN) * needs[1, 3])
    assert room < (1 + MARGIN) * needs[2, 0]
    monkeypatch.setattr(simulated, "usable_bytes", lambda card: room)
    smaller = {way: replace(verdict, usable_bytes=room) for way, verdict in trials.found.items()}
    on_it = Trials("tiny", config, CARD, smaller)
    every = on_it.tried(recipe, [checkpointing_of(1)])
    found = cure_sets._thinned(on_it, recipe, every, [every])
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
