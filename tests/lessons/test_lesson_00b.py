"""Which technique: squares are the engine's own verdicts, none is missing, and links lead to cells that draw."""

from __future__ import annotations

import functools
import re
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import nbformat
import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, TrainingArguments
from transformers.integrations import sdpa_attention
from transformers.training_args import OptimizerNames

from utils.catalog import device
from utils.fitting import Recipe, Trials, fit_model, mixed_precision, model_config
from utils.fitting.verdict import MARGIN, usable_bytes
from utils.lessons.lesson_00b.decision_figure import draw_decisions
from utils.lessons.lesson_00b.decisions import (
    LEAST_BYTES,
    Answer,
    Deciding,
    Square,
    decide,
    price_word,
)
from utils.lessons.lesson_00b.repeated_heads import kept_scores, repeated_heads
from utils.lessons.lesson_00b.several_cards import least_cards, parts_of_a_card, slower_links
from utils.lessons.lesson_00b.ways import changes_numbers, room_bytes, ways
from utils.units import GIB, Evidence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks/00b_which_technique.ipynb"
CARDS = ("T4", "RTX 4090", "A100-80GB")
LINK = re.compile(r"\]\(([^)#\s]+\.ipynb)#([^)\s]+)\)")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of 16 narrow layers, whose long texts fill a card."""
    folder = tmp_path_factory.mktemp("small")
    LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131072,
    ).save_pretrained(folder)
    return str(folder)


def test_squares_say_what_fit_says(small: str) -> None:
    tokens, card = 65_536, "RTX 4090"
    deciding = Deciding(tokens)
    deciding.square(small, "lora", "A100-80GB")  # simulated first on another card of the same kind
    square = deciding.square(small, "lora", card)
    recipe = Recipe(method="lora", tokens=tokens, precision=mixed_precision(card))
    found = fit_model(small, recipe, card=card, cures=False)
    assert square.asked and square.asked.needed_bytes == found.verdict.needed_bytes
    assert square.asked.usable_bytes == found.verdict.usable_bytes == usable_bytes(card)
    assert square.asked.seconds == found.verdict.seconds
    assert not found.fits and square.answer is Answer.CURE, "a text that needs a change"
    same = Trials(small, model_config(small), card).tried(recipe, square.cures)
    assert square.needed_bytes == same.verdict.needed_bytes and same.verdict.fits
    room = usable_bytes(card) / (1 + MARGIN)
    assert square.needed_bytes <= room
    (trials,) = deciding.trials.values()
    earlier = list(ways(trials, square.asked))
    for way in earlier[: earlier.index(square.cures)]:
        assert trials.tried(recipe, way).verdict.needed_bytes > room, (
            "what comes earlier has no room"
        )


def test_what_is_skipped_would_not_have_fitted(small: str) -> None:
    """Each change alone, on a card where the step does not fit: a way that is left out leaves no room."""
    tokens, card = 65_536, "RTX 4090"
    recipe = Recipe(method="full", tokens=tokens)
    trials = Trials(small, model_config(small), card)
    asked = trials.verdict(recipe)
    tried = list(ways(trials, asked))
    all_room = replace(asked, usable_bytes=10**15)
    left_out = [way for way in ways(trials, all_room, singly=True) if way not in tried]
    assert left_out, "some cannot make room"
    for way in left_out:
        assert trials.tried(recipe, way).verdict.needed_bytes > room_bytes(asked), way[0].name


def test_the_same_numbers_come_first_and_pages_last_of_them(small: str) -> None:
    trials = Trials(small, model_config(small), "RTX 4090")
    asked = replace(trials.verdict(Recipe(method="full", tokens=128)), usable_bytes=10**15)
    order = list(ways(trials, asked))
    kinds = [
        (changes_numbers(way), any("paged" in cure.name for cure in way), len(way)) for way in order
    ]
    assert kinds == sorted(kinds) and {kind[0] for kind in kinds} == {False, True}
    assert all(len(way) == 1 for way in ways(trials, asked, singly=True))


def test_a_t4_is_handed_repeated_heads_and_other_cards_are_not(small: str) -> None:
    before = sdpa_attention.use_gqa_in_sdpa
    for card, is_patched in (("T4", True), ("RTX 4090", False)):
        with repeated_heads(card):
            assert (sdpa_attention.use_gqa_in_sdpa is not before) == is_patched
        assert sdpa_attention.use_gqa_in_sdpa is before
    square = Deciding(2048).square(small, "lora", "T4")
    scores = float(re.findall(r"([0-9.]+) GiB", kept_scores(small, "lora", "T4", 2048))[0])
    assert square.asked and scores > square.asked.needed_bytes / GIB, "scores are kept without it"


def test_a_step_that_fits_is_as_asked(small: str) -> None:
    square = Deciding(128).square(small, "qlora", "RTX 4090")
    found = fit_model(small, Recipe(method="qlora", tokens=128), card="RTX 4090", cures=False)
    assert (square.answer, square.how, square.evidence) == (Answer.FITS, "", Evidence.SIMULATED)
    assert square.needed_bytes == found.verdict.needed_bytes and found.fits


def test_weights_that_no_cure_makes_small_are_shared_without_a_simulation() -> None:
    model = "meta-llama/Llama-3.1-70B"
    deciding = Deciding(2048)
    for card in CARDS:
        square = deciding.square(model, "full", card)
        assert square.asked is None and square.evidence is Evidence.PREDICTED
        assert square.answer is Answer.CARDS and square.needed_bytes < device(card).memory_bytes
        assert square.cards * device(card).memory_bytes > LEAST_BYTES["full"] * 70e9
    assert all(not trials.found for trials in deciding.trials.values())


def test_fewer_cards_are_too_few() -> None:
    config = model_config("Qwen/Qwen2.5-7B")
    more, fewer = (least_cards(config, Recipe(method=m), "RTX 4090") for m in ("full", "lora"))
    assert more and fewer and more.cards > fewer.cards >= 2
    assert more.a_card_bytes < usable_bytes("RTX 4090")


def test_the_fewest_cards_are_the_fewest_at_every_degree() -> None:
    config, recipe = model_config("meta-llama/Llama-3.1-70B"), Recipe(method="full")
    for card in CARDS:
        found = least_cards(config, recipe, card)
        assert found and found.cards % 8 == 0
        one_node_less = parts_of_a_card(config, recipe, card, (found.cards - 8,))
        assert [row["tensor parallel"] for row in one_node_less] == ["1", "2", "4", "8"]
        assert {row["fits"] for row in one_node_less} == {"no"}
        assert "yes" in {
            row["fits"] for row in parts_of_a_card(config, recipe, card, (found.cards,))
        }


def test_seconds_need_a_link_that_was_published_and_slower_links_take_longer() -> None:
    config, recipe = model_config("meta-llama/Llama-3.1-70B"), Recipe(method="full")
    seconds = {card: least_cards(config, recipe, card).step_seconds for card in CARDS}  # type: ignore[union-attr]
    assert [card for card, one in seconds.items() if one] == ["A100-80GB"]
    rows = slower_links(config, recipe, "A100-80GB", (1, 1 / 2, 1 / 4))
    steps = [float(row["seconds a step"]) for row in rows]
    assert steps == sorted(steps) and len(set(steps)) == 3
    assert slower_links(config, recipe, "T4", (1,)) == []


def test_a_model_without_a_formula_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="The planner has no formula for a gpt2"):
        decide(["openai-community/gpt2-xl"], ["full"], ["T4"], 128)


def square(card: str, answer: Answer = Answer.FITS) -> Square:
    return Square("a/b", "full", card, answer, "", 2**30, Evidence.SIMULATED, None)


def test_each_answer_has_a_word_a_colour_and_a_hatch_and_no_square_is_missing() -> None:
    figure = draw_decisions([square(card, answer) for card, answer in zip(
        ("T4", "RTX 4090", "A100-80GB", "H100"), Answer, strict=True)], "All answers")  # fmt: skip
    patches = [patch for patch in figure.axes[0].patches if patch.get_height() > 0.5]  # no bars
    assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in patches}) == len(Answer)
    assert len({patch.get_hatch() for patch in patches}) == len(Answer), "in grey, too"
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"fits", "with a change", "1 cards", "none"} <= words
    other = Square("a/c", "full", "T4", Answer.FITS, "", 1.0, Evidence.SIMULATED, None)
    with pytest.raises(ValueError, match=r"No verdict for \('a/c', 'full', 'H100'\)"):
        draw_decisions([square("T4"), square("H100"), other], "One is missing")


def test_the_stored_picture_has_a_verdict_for_every_square() -> None:
    told = "".join(str(cell.get("outputs", "")) for cell in nbformat.read(PAGE, 4).cells)
    for model in ("Llama-3.2-1B", "Qwen2.5-7B", "Llama-3.1-70B"):
        for method, card in product(("full", "lora", "qlora"), CARDS):
            assert re.search(rf"{model} {method} on {card}: ({'|'.join(Answer)}), ", told), card


def test_the_margin_in_the_prose_is_the_one_that_decides() -> None:
    text = "\n".join(c.source for c in nbformat.read(PAGE, 4).cells if c.cell_type == "markdown")
    said = set(re.findall(r"\b(\d+%) of\s+its need|[Tt]he (\d+%)", text))
    assert {number for pair in said for number in pair if number} == {f"{MARGIN:.0%}"}


def test_another_answer_says_what_it_costs() -> None:
    assert price_word(None) == "seconds not predicted" and price_word(0.114) == "0.11 card-seconds"
    two_cards = Deciding(2048).square("meta-llama/Llama-3.2-1B", "full", "T4").instead
    assert re.fullmatch(r"\d cards, .*: [\d.]+ GiB a card, seconds not predicted", two_cards)


def test_what_is_to_be_typed_are_arguments_that_exist() -> None:
    text = "\n".join(c.source for c in nbformat.read(PAGE, 4).cells if c.cell_type == "markdown")
    calls = re.findall(r"`TrainingArguments\(([^)]+)\)`", text)
    typed = [pair for call in calls for pair in re.findall(r"(\w+)=([^,]+)", call)]
    known = {field.name for field in fields(TrainingArguments)}
    assert len(calls) == 5 and {name for name, _ in typed} <= known
    optimizers = {value.strip('"') for name, value in typed if name == "optim"}
    assert "adamw_torch_fused" in optimizers
    assert optimizers <= {name.value for name in OptimizerNames}
    (call,) = re.findall(r"`LoraConfig\(.*?\)`", text)
    assert eval(call.strip("`"), {"LoraConfig": LoraConfig}).r == 16
    (call,) = re.findall(r"`(?:also )?BitsAndBytesConfig\(.*?\)`", text)
    assert eval(call.strip("`"), {"BitsAndBytesConfig": BitsAndBytesConfig, "torch": torch})


@functools.cache
def drawn(path: Path) -> dict[str, bool]:
    """By anchor, whether a picture stands below that heading, up to the next."""
    found: dict[str, bool] = {}
    anchor = ""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for title in re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE):
                anchor = title.strip().replace(" ", "-")
                found.setdefault(anchor, False)
        elif "image/png" in str(cell.outputs):
            found[anchor] = True
    return found


def links(page: Path) -> list[tuple[Path, str]]:
    """The cells that a page leads to: notebook and anchor."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join(
            c.source for c in nbformat.reads(text, 4).cells if c.cell_type == "markdown"
        )
    return [((page.parent / place).resolve(), anchor) for place, anchor in LINK.findall(text)]


@pytest.mark.parametrize(
    ("page", "count"), [(ROOT / "README.md", 10), (PAGE, 10)], ids=("README", "page")
)
def test_links_lead_to_headings_with_a_cell(page: Path, count: int) -> None:
    found = links(page)
    assert len(found) == len(set(found)) == count, "each question leads to a place of its own"
    lost = [f"{path.name}#{anchor}" for path, anchor in found if anchor not in drawn(path)]
    assert lost == [], f"no such headings: {lost}"
    if page.suffix == ".md":
        bare = [f"{path.name}#{anchor}" for path, anchor in found if not drawn(path)[anchor]]
        assert bare == [], f"no picture below: {bare}"
