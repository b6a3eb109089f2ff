"""Configurations by name, file and Hub: exact counts, and each bad input in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import constants, errors

from utils.fitting.config_files import OWN_KEYS
from utils.fitting.model_configs import (
    SHIPPED,
    ModelConfigError,
    auto_class,
    model_config,
    model_names,
    published_parameters,
)

VERSION = transformers.__version__
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor a cache of the Hub but the test's own."""
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def shipped(name: str) -> dict[str, Any]:
    return json.loads((SHIPPED / f"{name.replace('/', '--')}.json").read_text(encoding="utf-8"))


def written(folder: Path, **keys: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def count(config: Any) -> int:
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


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


def test_a_folder_and_its_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "tiny", **TINY)
    monkeypatch.chdir(folder)
    for source in (folder, str(folder), folder / "config.json", ".", "config.json"):
        config = model_config(source)
        assert (config.hidden_size, config.name_or_path) == (64, str(source))
    assert count(config) == 2 * 64 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def test_what_transformers_wrote_is_read_though_it_is_its_default(tmp_path: Path) -> None:
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert model_config(tmp_path).hidden_size == transformers.LlamaConfig().hidden_size


def test_older_files_have_the_sizes_of_text_beside_the_other_parts(tmp_path: Path) -> None:
    keys = shipped("Qwen/Qwen2.5-VL-7B-Instruct")
    flat = keys | keys.pop("text_config") | {"model_type": "qwen2_5_vl"}
    config = model_config(written(tmp_path, **flat))
    assert count(config) == published_parameters("Qwen2.5-VL-7B-Instruct")
    with pytest.raises(ModelConfigError, match="lacks num_hidden_layers and hidden_size; "):
        model_config(written(tmp_path, model_type="qwen2_5_vl"))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for source in (tmp_path / "none", str(tmp_path / "none"), "./none", "none.json", "~/none-here"):
        with pytest.raises(ModelConfigError, match=r"There is no file or folder .*none.*Give a "):
            model_config(source)
    with pytest.raises(ModelConfigError, match=r"has no config\.json\. Is it the folder above it"):
        model_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="holds adapters and no model"):
        model_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            json.dumps(TINY)[:40],
            r"config\.json cannot be read as JSON \(.*it may have been cut off",
        ),
        ("", r"config\.json cannot be read as JSON "),
        ("[" * 100_000, r"config\.json cannot be read as JSON "),
        ("[1]", r"names no model_type, so it is no configuration"),
        ('{"r": 8}', r"names no model_type, so it is no configuration"),
        ('{"model_type": 3}', r"names no model_type, so it is no configuration"),
    ],
)
def test_a_damaged_file(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=sentence):
        model_config(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ModelConfigError, match="cannot be read as JSON"):
        model_config(tmp_path)


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        (("hidden_size",), "lacks hidden_size; transformers would take those of another llama"),
        (("num_hidden_layers", "hidden_size"), "lacks num_hidden_layers and hidden_size; "),
    ],
)
def test_missing_keys(tmp_path: Path, lost: tuple[str, ...], sentence: str) -> None:
    keys = {key: value for key, value in TINY.items() if key not in lost}
    with pytest.raises(ModelConfigError, match=sentence):
        model_config(written(tmp_path, **keys))


def test_missing_keys_have_the_name_that_the_kind_gives_them(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="lacks n_layer; "):
        model_config(written(tmp_path, model_type="gpt2", n_embd=64))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hidden_size", "large", "hidden_size"),
        ("num_hidden_layers", 2.5, "num_hidden_layers"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1; it must be 1 or more"),
        ("vocab_size", 0, "vocab_size is 0; it must be 1 or more"),
        ("num_attention_heads", 7, "is not a multiple of the number of attention heads"),
        ("rope_parameters", {"rope_type": "yarn"}, "factor"),
    ],
)
def test_values_that_transformers_does_not_take(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    with pytest.raises(ModelConfigError) as raised:
        model_config(written(tmp_path, **TINY | {key: value}))
    said = str(raised.value)
    assert f"has a value that transformers {VERSION} does not take (" in said
    assert says in said and "\n" not in said
    assert said.endswith("Compare it with the one on the model's page.")


def test_an_unknown_kind_names_the_version(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError) as raised:
        model_config(written(tmp_path, **TINY | {"model_type": "llama99"}))
    assert str(raised.value) == (
        f"{tmp_path} is of the kind 'llama99', which transformers {VERSION} does not know. A newer "
        "transformers may; or build the model in a function of your own."
    )


def test_foreign_code_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\n"
    auto = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}
    folder = written(tmp_path / "model", **TINY | {"model_type": "foreign", "auto_map": auto})
    (folder / "foreign.py").write_text(code)
    with pytest.raises(ModelConfigError, match="brings its own code, which is not run here"):
        model_config(folder)
    written(folder, **TINY | {"auto_map": auto})  # a kind that transformers has itself
    config = model_config(folder)
    assert type(config) is transformers.LlamaConfig
    assert count(config) > 0
    assert not mark.exists()


def test_offline_a_name_of_the_hub_is_refused() -> None:
    with pytest.raises(ModelConfigError) as raised:
        model_config("Qwen/Qwen2.5-7B-Instruct")
    assert str(raised.value).startswith(
        "Qwen/Qwen2.5-7B-Instruct is not shipped and could not be had: COURSE_OFFLINE is set. No "
        "shipped model is called 'Qwen/Qwen2.5-7B-Instruct'. Nearest: "
    )
    assert ", Qwen/Qwen2.5-7B. model_names()" in str(raised.value)


def test_offline_what_the_hubs_cache_holds_is_read(tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--me--tiny"
    written(kept / "snapshots" / ("a" * 40), **TINY)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    assert model_config("me/tiny").hidden_size == 64


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """A Hub that answers with a file or an error; its requests are noted."""

    def answering(answer: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def download(*what: Any, local_files_only: bool) -> str:
            asked.append((*what, local_files_only))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setenv("COURSE_OFFLINE", "0")
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return asked

    return answering


def test_of_the_hub_one_file_is_fetched(tmp_path: Path, hub: Any) -> None:
    asked = hub(written(tmp_path, **TINY) / "config.json")
    assert model_config("me/tiny").name_or_path == "me/tiny"
    assert asked == [("me/tiny", "config.json", False)]
    model_config("Qwen/Qwen3-0.6B")
    assert len(asked) == 1


def http_error(kind: type[Exception]) -> Exception:
    """As the Hub's client raises it, without the answer that it came from."""
    error = kind.__new__(kind)
    error.args = ("no",)
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (http_error(errors.GatedRepoError), "its licence must be accepted on its page first"),
        (http_error(errors.RepositoryNotFoundError), "the Hub has no model of that name"),
        (http_error(errors.RemoteEntryNotFoundError), "it has no config.json there"),
        (errors.HFValidationError("no"), "that cannot be a name on the Hub"),
        (errors.LocalEntryNotFoundError("no route"), r"the Hub did not answer \(no route\)"),
        (errors.OfflineModeIsEnabled("off"), r"the Hub did not answer \(off\)"),
    ],
)
def test_the_hub_does_not_give_it(hub: Any, error: Exception, reason: str) -> None:
    hub(error)
    with pytest.raises(
        ModelConfigError, match=rf"me/tiny is not shipped and .*: {reason}.* Nearest: "
    ):
        model_config("me/tiny")


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
