"""Configurations from a folder, a file and the Hub: what is read, and each bad one in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from config_cases import TINY, count, written
from huggingface_hub import constants, errors

from utils.fitting.model_configs import ModelConfigError, model_config

VERSION = transformers.__version__


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor a cache of the Hub but the test's own."""
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


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
