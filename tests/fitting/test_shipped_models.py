"""Each shipped model, trained in each way that it can be: a verdict, or a sentence that says why not."""

from __future__ import annotations

import pytest

from utils.fitting import Recipe, Trials, auto_class, model_config, model_names
from utils.fitting.trials import NOT_TRIED
from utils.simulation import SimulationError

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own
QUICK = (
    "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "google/gemma-2-2b", "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite", "openai/whisper-large-v3", "google/vit-large-patch16-224",
    "google-t5/t5-large", "Qwen/Qwen2.5-VL-7B-Instruct", "openai-community/gpt2-xl",
)  # fmt: skip
CARD, LENGTHS = "H100", (512, 2048)
# What the libraries themselves refuse, in their words.
REFUSED = {
    ("state-spaces/mamba-2.8b-hf", "lora"): "incompatible with Mamba",
    ("state-spaces/mamba-2.8b-hf", "qlora"): "incompatible with Mamba",
    ("tiiuae/falcon-mamba-7b", "lora"): "incompatible with Mamba",
    ("tiiuae/falcon-mamba-7b", "qlora"): "incompatible with Mamba",
}
# Of learned positions, or of tokens read one after another, what a text may have.
LONGEST = {
    "google-bert/bert-large-uncased": 512,
    "openai-community/gpt2-xl": 1024,
    "state-spaces/mamba-2.8b-hf": 512,
    "tiiuae/falcon-mamba-7b": 512,
}


def verdict(name: str, method: str, tokens: int) -> None:
    config = model_config(name)
    recipe = Recipe(method=method, tokens=tokens, checkpointing=_checkpoints(name))
    trials = Trials(name, config, CARD)
    if tokens > LONGEST.get(name, tokens):
        with pytest.raises(ValueError, match=f"Choose tokens={LONGEST[name]} or fewer"):
            trials.verdict(recipe)
        return
    if says := REFUSED.get((name, method)):
        with pytest.raises(NOT_TRIED, match=says):
            trials.verdict(recipe)
        return
    try:
        found = trials.verdict(recipe)
    except SimulationError as error:
        assert ", line " in str(error), "names no file and line"
        return
    assert sum(found.measurement.breakdown.values()) == found.peak_bytes > 0
    assert found.needed_bytes >= found.peak_bytes and name in found.sentence


def _checkpoints(name: str) -> int:
    return int(getattr(auto_class(model_config(name)), "__name__", "").endswith("CausalLM"))


@pytest.mark.parametrize("name", QUICK)
def test_a_verdict_on_ten_models_of_other_kinds(name: str) -> None:
    verdict(name, "lora", 512)


@pytest.mark.parametrize("name", LONGEST)
def test_a_text_that_is_too_long_is_refused_with_the_longest_that_is_not(name: str) -> None:
    verdict(name, "full", 2048)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", model_names())
def test_a_verdict_on_every_model(name: str, method: str, tokens: int) -> None:
    verdict(name, method, tokens)
