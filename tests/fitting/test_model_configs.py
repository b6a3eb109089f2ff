"""Configurations by name: exact counts, each value kept, and the class that trains each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from config_cases import count, written

from utils.catalog.hub_models import config_file
from utils.fitting.config_files import OWN_KEYS
from utils.fitting.model_configs import (
    ModelConfigError,
    auto_class,
    model_config,
    model_names,
    published_parameters,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_OFFLINE", "1")


def shipped(name: str) -> dict[str, Any]:
    return json.loads(config_file(name).read_text(encoding="utf-8"))


def test_every_shipped_file_says_where_it_was_read() -> None:
    assert len(model_names()) >= 40
    for name in model_names():
        source = shipped(name)["_source"]
        assert source.startswith("Configuration: ") and ". Count: " in source, name
        assert source.endswith("."), name


@pytest.mark.parametrize("name", ["qwen2.5-7b", "QWEN/qwen2.5-7B", "Qwen2.5 7B", "Qwen/Qwen2.5-7B"])
def test_a_name_in_any_case_without_its_organisation(name: str) -> None:
    assert model_config(name).name_or_path == "Qwen/Qwen2.5-7B"
    assert published_parameters(name) == 7_615_616_512


def test_names_without_organisations_are_told_apart() -> None:
    short = [name.partition("/")[2].lower() for name in model_names()]
    assert len(set(short)) == len(short)
    assert model_names() == sorted(model_names(), key=str.lower)


@pytest.mark.parametrize("name", ["qwen2.5-8b", "gpt5", "a/b/c", ""])
def test_an_unknown_name_gets_the_nearest_and_the_list(name: str) -> None:
    with pytest.raises(ModelConfigError) as raised:
        model_config(name)
    said = str(raised.value)
    assert said.startswith(f"No shipped model is called {name!r}. Nearest: ")
    assert said.endswith(
        f". model_names() lists all {len(model_names())}; any other comes from its folder, its "
        "config.json, or the Hugging Face Hub as 'organisation/name'."
    )
    with pytest.raises(ModelConfigError) as again:
        published_parameters(name)
    assert str(again.value) == said


def test_the_nearest_name_is_near() -> None:
    with pytest.raises(ModelConfigError, match=r"Nearest: Qwen2\.5-7B, "):
        model_config("qwen2.5-8b")


def test_older_files_have_the_sizes_of_text_beside_the_other_parts(tmp_path: Path) -> None:
    keys = shipped("Qwen/Qwen2.5-VL-7B-Instruct")
    flat = keys | keys.pop("text_config") | {"model_type": "qwen2_5_vl"}
    config = model_config(written(tmp_path, **flat))
    assert count(config) == published_parameters("Qwen2.5-VL-7B-Instruct")
    with pytest.raises(ModelConfigError, match="lacks num_hidden_layers and hidden_size; "):
        model_config(written(tmp_path, model_type="qwen2_5_vl"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Qwen3-0.6B", "AutoModelForCausalLM"),
        ("mamba-2.8b-hf", "AutoModelForCausalLM"),
        ("gemma-3-1b-pt", "AutoModelForCausalLM"),
        ("gemma-3-4b-pt", "AutoModelForImageTextToText"),
        ("Qwen2-VL-7B-Instruct", "AutoModelForImageTextToText"),
        ("whisper-large-v3", "AutoModelForSpeechSeq2Seq"),
        ("t5-large", "AutoModelForSeq2SeqLM"),
        ("bert-large-uncased", "AutoModelForMaskedLM"),
        ("vit-large-patch16-224", "AutoModelForImageClassification"),
    ],
)
def test_the_class_that_trains_it(name: str, wanted: str) -> None:
    config = model_config(name)
    assert auto_class(config).__name__ == wanted
    config.architectures = None  # as in a configuration that was made by hand
    assert auto_class(config).__name__ == wanted


def test_the_architecture_of_the_file_goes_before_the_order() -> None:
    config = transformers.BertConfig(architectures=["BertLMHeadModel"])
    assert auto_class(config).__name__ == "AutoModelForCausalLM"


def test_no_class_trains_it() -> None:
    with pytest.raises(ModelConfigError) as raised:
        auto_class(transformers.Wav2Vec2Config())
    assert str(raised.value) == (
        "A model of the kind 'wav2vec2' is none of those that are trained here: causal, masked and "
        "sequence-to-sequence language models, models of images with text, of speech to text, and "
        "of image classification. Build it in a function of your own."
    )


def test_names_need_no_transformers() -> None:
    """Which takes seconds to import."""
    code = (
        "import sys; from utils.fitting.model_configs import model_names, published_parameters; "
        "published_parameters(model_names()[0]); print('transformers' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def differences(kept: Any, given: Any, where: str) -> list[str]:
    """Where what transformers keeps is not what a file gives."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            found
            for key, value in given.items()
            for found in differences(kept.get(key), value, f"{where}.{key}")
        ]
    return [] if kept == given else [f"{where}: {kept!r}, not {given!r}"]


@pytest.mark.parametrize("name", model_names())
def test_transformers_keeps_each_value_of_a_shipped_file(name: str) -> None:
    """So that no key is misspelled, and no value silently another one."""
    keys = {key: value for key, value in shipped(name).items() if key not in OWN_KEYS}
    config = model_config(name)
    other_names = {name: getattr(config, name, None) for name in config.attribute_map}
    kept = config.to_dict() | other_names | {"num_labels": config.num_labels}
    assert not differences(kept, keys, name)
    assert not kept.keys() & set(OWN_KEYS)
    assert config.name_or_path == name


@pytest.mark.parametrize("name", model_names())
def test_a_shipped_model_has_as_many_parameters_as_its_checkpoint(name: str) -> None:
    assert count(model_config(name)) == published_parameters(name)
