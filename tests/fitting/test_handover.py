"""Where no card count fits, the page's line runs in lesson 15's studio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from utils.catalog import ModelShape
from utils.fitting import Recipe, Trials, fit_model, model_config
from utils.fitting.model_fit import Fit
from utils.fitting.seconds import shape_of
from utils.lessons.lesson_00a.handover import studio_line, written

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
STUDIO = Path("sources/advanced/15_design_studio/lesson.py")


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"])
def test_the_line_makes_the_shape_again(name: str) -> None:
    shape = shape_of(model_config(name))
    assert shape and eval(written(shape), {"ModelShape": ModelShape}) == shape


def test_the_line_runs_in_the_studio_where_nothing_fits() -> None:
    found = fit_model(
        "Qwen/Qwen2.5-7B", Recipe(method="full", tokens=512), card="RTX 4090", cures=False
    )
    assert not found.fits
    monday = STUDIO.read_text().partition("## On Monday")[2]
    lines = [line.removeprefix("# ") for line in monday.splitlines()]
    first, shape, last = (
        next(n for n, line in enumerate(lines) if line.startswith(words))
        for words in ("from utils import", "shape = model_shape(", "plans = search(")
    )
    lines[shape] = studio_line(found)
    names: dict[str, Any] = {}
    exec("\n".join(lines[first : last + 1]), names)
    plans = names["plans"]
    assert plans.best and plans.best.fits and "Qwen2.5-7B" in plans.best.model.name


def test_no_line_where_it_fits(tiny: Path) -> None:
    found = fit_model(tiny, Recipe(tokens=64), card="RTX 4090", cures=False)
    assert found.fits and studio_line(found) == ""


def test_an_architecture_without_a_shape_ends_in_a_sentence() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=512, n_head=4, vocab_size=50_000)
    large = Recipe(method="full", tokens=256, micro_batch=4096)
    trials = Trials("tiny", config, "RTX 4090")
    found = Fit(trials.verdict(large), trials=trials)
    assert not found.fits
    with pytest.raises(ValueError, match="lays out no 'gpt2'.*cards=8"):
        studio_line(found)
