"""Which technique: squares are the engine's own verdicts, none is missing, and links lead to cells that draw."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import nbformat
import pytest
from transformers import LlamaConfig

from utils.catalog import device
from utils.fitting import Recipe, Trials, fit_model, mixed_precision, model_config
from utils.fitting.seconds import predicted_seconds
from utils.fitting.verdict import MARGIN, usable_bytes
from utils.lessons.lesson_00b.decision_figure import draw_decisions
from utils.lessons.lesson_00b.decisions import LEAST_BYTES, Answer, Deciding, Square, decide
from utils.lessons.lesson_00b.several_cards import least_cards
from utils.units import Evidence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks/00b_which_technique.ipynb"
CARDS = ("T4", "RTX 4090", "A100-80GB")
LINK = re.compile(r"\]\(([^)#\s]+\.ipynb)#([^)\s]+)\)")
pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own


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
    assert not found.fits and square.answer is Answer.CURE, "a text that needs a cure"
    same = Trials(small, model_config(small), card).tried(recipe, square.cures)
    assert square.needed_bytes == same.verdict.needed_bytes and same.verdict.fits
    (trials,) = deciding.trials.values()
    cheaper = [
        verdict.needed_bytes
        for tried, verdict in trials.found.items()
        if predicted_seconds(trials.config, tried, card) < same.verdict.seconds
    ]
    room = usable_bytes(card) / (1 + MARGIN)
    assert cheaper and min(cheaper) > room, "what is cheaper leaves no margin"


def test_a_step_that_fits_is_as_asked(small: str) -> None:
    square = Deciding(128).square(small, "qlora", "T4")
    found = fit_model(
        small, Recipe(method="qlora", tokens=128, precision="fp16-mixed"), card="T4", cures=False
    )
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


def test_a_model_without_a_formula_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="The planner has no formula for a gpt2"):
        decide(["openai-community/gpt2-xl"], ["full"], ["T4"], 128)


def square(card: str, answer: Answer = Answer.FITS) -> Square:
    return Square("a/b", "full", card, answer, "", 2**30, Evidence.SIMULATED, None)


def test_each_answer_has_a_word_a_colour_and_a_hatch_and_no_square_is_missing() -> None:
    figure = draw_decisions([square(card, answer) for card, answer in zip(
        ("T4", "RTX 4090", "A100-80GB", "H100"), Answer, strict=True)], "All answers")  # fmt: skip
    patches = figure.axes[0].patches
    assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in patches}) == len(Answer)
    assert len({patch.get_hatch() for patch in patches}) == len(Answer), "in grey, too"
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"fits", "cure", "1 cards", "none"} <= words
    other = Square("a/c", "full", "T4", Answer.FITS, "", 1.0, Evidence.SIMULATED, None)
    with pytest.raises(ValueError, match=r"No verdict for \('a/c', 'full', 'H100'\)"):
        draw_decisions([square("T4"), square("H100"), other], "One is missing")


def test_the_stored_table_has_a_verdict_for_every_square() -> None:
    shown = "".join(str(cell.get("outputs", "")) for cell in nbformat.read(PAGE, 4).cells)
    counts = re.findall(rf"(?:{'|'.join(Answer)}): (\d+) squares", shown)
    assert sum(map(int, counts)) == 27, f"27 squares have a verdict, and {counts} are told"


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
