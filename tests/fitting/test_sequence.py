"""A text over several cards trains as one process that has it whole, and takes what real ranks take."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from sequence_cases import CONFIGS, LENGTH, Apart, Case, config_of, on_a_rank, run_step

from utils.fitting import Recipe, Trials, cure_sets, model_config, model_fit, recipe_step
from utils.fitting import seconds as predicted
from utils.fitting import trials as simulated
from utils.fitting.cures import checkpointing_of, single_cures
from utils.fitting.seconds import exchanged_bytes, predicted_seconds, shape_of
from utils.fitting.sequence_program import share_heads
from utils.fitting.sequence_rules import PROVED, most_cards
from utils.fitting.sharing import not_simulated
from utils.planner import Cluster
from utils.planner.step_seconds.collectives import Group, all_to_all_seconds
from utils.ranks import run_ranks
from utils.simulation import simulate

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
WITHIN, WITHIN_MIXED = 1e-5, 2e-4  # fp32 sums in another order; bf16 rounds them at 4e-3
BASE = Recipe(method="full", precision="fp32", optimizer="sgd", tokens=LENGTH, rank=4)
MIXED = BASE.but(precision="bf16-mixed", optimizer="adamw")
METERED = BASE.but(tokens=256, micro_batch=2, optimizer="adamw")
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


def restarted(given: dict[str, Any]) -> dict[str, Any]:
    """A fault: places that begin anew on each rank."""
    places = given["position_ids"]
    return given | {"position_ids": places - places[:, :1]}


def unshifted(given: dict[str, Any]) -> dict[str, Any]:
    """A fault: each rank shifts its own labels, and its last token learns nothing."""
    return {name: value for name, value in given.items() if name != "shift_labels"}


def cases(ranks: int) -> dict[str, Case]:
    both = {"cards": ranks, "sequence_cards": ranks}
    qwen, copied = config_of("qwen2"), config_of("qwen2", num_key_value_heads=1)
    found: dict[str, Case] = {kind: (config_of(kind), BASE.but(**both), None) for kind in CONFIGS}
    changes: dict[str, tuple[Any, Recipe]] = {
        "adapters, checkpointed": (qwen, BASE.but(method="lora", checkpointing=1, **both)),
        "copies of key-value heads": (copied, BASE.but(**both)),
        "chunked loss": (qwen, BASE.but(loss="chunked", **both)),
        "states on the host": (qwen, BASE.but(offload_states=True, **both)),
        "several texts": (qwen, BASE.but(cards=ranks, sequence_cards=max(2, ranks // 2))),
        "mixed": (qwen, MIXED.but(**both)),
        "mixed, adapters": (qwen, MIXED.but(method="lora", **both)),
    }
    found |= {name: (config, recipe, None) for name, (config, recipe) in changes.items()}
    found["fault: places restart"] = qwen, BASE.but(**both), restarted
    found["fault: labels unshifted"] = qwen, BASE.but(**both), unshifted
    return found


def metered_recipes(ranks: int) -> dict[str, Recipe]:
    one = METERED.but(cards=ranks, sequence_cards=ranks)
    found = {"full": one.but(checkpointing=1), "adapters": one.but(method="lora")}
    return found if ranks == 2 else found | {"several texts": one.but(sequence_cards=2)}


@functools.cache
def on_ranks(ranks: int) -> tuple[dict[str, Apart], dict[str, int]]:
    """All that needs ranks, in one start of them; what rank 0 found."""
    given = cases(ranks), metered_recipes(ranks), wider()
    return run_ranks(on_a_rank, ranks, *given, timeout_seconds=300)[0]


def wider() -> Any:
    return config_of("qwen2", max_position_embeddings=256, vocab_size=512)


def test_each_kind_that_is_admitted_is_tried() -> None:
    assert {*CONFIGS} == {*PROVED}


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_a_text_train_as_one_process(ranks: int) -> None:
    apart, _ = on_ranks(ranks)
    for name, found in apart.items():
        within = WITHIN_MIXED if "mixed" in name else WITHIN
        if "fault" in name:
            assert found.loss > 5 * WITHIN and found.gradient > 5 * WITHIN, name
            continue
        assert found.loss < within, name
        # A gradient of bf16 products is rounded at 4e-3, whoever computes it.
        assert found.gradient < (2e-2 if "mixed" in name else WITHIN), name


@pytest.mark.parametrize("ranks", RANKS)
def test_the_simulated_rank_takes_what_a_real_one_takes(ranks: int) -> None:
    _, peaks = on_ranks(ranks)
    config = wider()
    for name, recipe in metered_recipes(ranks).items():
        found = simulate(
            lambda recipe=recipe: recipe_step.build(hf.AutoModelForCausalLM, config, recipe),
            run_step(config, recipe),
            device="cpu",
            world=ranks,
        )
        assert found.peak_bytes == pytest.approx(peaks[name], rel=0.01), name


@pytest.mark.parametrize(
    ("model", "cards", "says"),
    [
        ("Qwen/Qwen2.5-7B", 8, "28 query heads and 4 key-value heads.*Choose sequence_cards=4"),
        ("google/gemma-2-9b", 2, "not for gemma2. Choose sequence_cards=1"),
        ("tiiuae/falcon-mamba-7b", 2, "not for falcon_mamba"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 2, "not for qwen2_5_vl"),
        ("microsoft/Phi-3-mini-4k-instruct", 2, "where all layers attend to all tokens"),
    ],
)
def test_a_text_that_cannot_be_shared_is_refused(model: str, cards: int, says: str) -> None:
    recipe = Recipe(tokens=1024, cards=cards, sequence_cards=cards)
    trials = Trials(model, model_config(model), "H100")
    with pytest.raises(ValueError, match=says):
        trials.verdict(recipe)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "all layers attend to all"),
    ],
)
def test_what_depends_on_more_than_a_cards_tokens_is_refused(
    changes: dict[str, Any], says: str
) -> None:
    config = config_of("qwen2", **changes)
    assert most_cards(config, BASE, 2) == 1
    assert says in not_simulated(config, BASE, 2)["one sequence over 2 cards"]
    assert not any("sequence_cards" in cure.changes for cure in single_cures(config, BASE, 2))


def test_a_window_is_refused_by_the_program_too() -> None:
    """Whoever puts another model into the script gets an error, not another loss."""

    def build() -> tuple[Any, Any]:
        model = hf.AutoModelForCausalLM.from_config(config_of("mistral", sliding_window=8))
        share_heads(model, 2)
        return model, None

    def step(model: Any, optimizer: Any) -> None:
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long))

    with pytest.raises(ValueError, match="sees all that come before it alone"):
        simulate(build, step, device="cpu", world=2)


@pytest.mark.parametrize("changes", [{}, {"checkpointing": 1}, {"num_key_value_heads": 1}])
def test_what_is_sent_is_what_seconds_are_predicted_of(changes: dict[str, Any]) -> None:
    config = config_of("qwen2", num_key_value_heads=changes.get("num_key_value_heads", 4))
    recipe = METERED.but(cards=2, sequence_cards=2, checkpointing=changes.get("checkpointing", 0))
    found = simulate(
        lambda: recipe_step.build(hf.AutoModelForCausalLM, config, recipe),
        run_step(config, recipe),
        device="cpu",
        world=2,
    )
    sent = sum(t.payload_bytes for t in found.traffic if t.collective == "all-to-all")
    shape = shape_of(config)
    assert shape
    passes = 3 if recipe.checkpointing else 2
    assert sent == 2 * shape.layers * passes * sum(exchanged_bytes(shape, recipe))  # fp32


def test_exchanges_take_the_place_of_the_planners_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    config, card = model_config("meta-llama/Llama-3.1-8B"), "H100"
    recipe = Recipe(tokens=65536, checkpointing=1, cards=8, sequence_cards=8)
    asked = predicted_seconds(config, recipe, card)
    whole = predicted_seconds(config, recipe.but(sequence_cards=1), card)
    assert asked and whole
    # Eight cards do one text in place of eight: an eighth of the work, and what they exchange.
    assert 1 < 8 * asked[1] / whole[1] < 1.1
    monkeypatch.setattr(predicted, "all_to_all_seconds", lambda *given: 0.0)
    without = predicted_seconds(config, recipe, card)
    cluster, own = Cluster(gpu=card, nodes=1, gpus_per_node=8), 65536 // 8 * 128 * 2
    heads = 32 + 8 + 8 + 32
    exchanged = 3 * 32 * all_to_all_seconds(cluster, Group(8), heads * own)
    assert without and asked[1] - without[1] == pytest.approx(exchanged, rel=1e-6)


def test_more_cards_are_no_answer_where_others_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials("small", config_of("qwen2", max_position_embeddings=4096), "H100")
    recipe = MIXED.but(tokens=4096, micro_batch=8)
    texts = next(c for c in single_cures(trials.config, recipe, 2) if "sequence_cards" in c.changes)
    both = [trials.tried(recipe, [cure]) for cure in (texts, checkpointing_of(1))]
    assert all(single.gains for single in both)
    needed = sorted(single.verdict.needed_bytes for single in both)

    def chosen(room: float) -> str:
        smaller = {r: replace(v, usable_bytes=int(room)) for r, v in trials.found.items()}
        on_it = Trials("small", trials.config, "H100", smaller)
        again = [on_it.tried(recipe, single.cures) for single in both]
        monkeypatch.setattr(simulated, "usable_bytes", lambda card: int(room))
        found = cure_sets.together(on_it, recipe, again)
        return found.name if found else ""

    assert chosen(1.2 * needed[1]) == "checkpointing of all blocks"
    assert texts.name in chosen(1.2 * needed[0])


def test_the_cure_takes_the_most_cards_that_divide_and_counts_the_seconds_of_all() -> None:
    config = model_config("Qwen/Qwen2.5-7B")
    cure = next(c for c in single_cures(config, Recipe(), 8) if "sequence_cards" in c.changes)
    assert cure.name == "one sequence over 4 of 8 cards"
    assert dict(cure.changes) == {"cards": 8, "sequence_cards": 4}
    assert "share_tokens(model, 4)" in cure.line and "nproc-per-node 8" in cure.line
    on_eight = [*single_cures(config, Recipe(cards=8), 2)]
    assert cure.name in {c.name for c in on_eight}, "also of cards that share states already"
    small = Trials("small", config_of("qwen2", num_hidden_layers=2), "H100")
    recipe = MIXED.but(tokens=256, micro_batch=2)
    cures = [c for c in single_cures(small.config, recipe, 2) if "cards" in c.changes]
    states, texts = (small.tried(recipe, [c]) for c in cures)
    asked, after = small.verdict(recipe).seconds, texts.verdict.seconds
    assert asked and after and texts.added_seconds == pytest.approx(2 * after[1] - asked[1])
    assert not model_fit._gains(texts, [states, texts]), "a short text saves next to nothing"
