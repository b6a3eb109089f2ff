"""Configurations of models by name, from a file or from the Hub: sizes alone, never weights or foreign code.

A shipped one is the Hub's `config.json` without tokens and settings of generation, and with two keys of
our own: `_source` says where it and its count were read, `_parameters` is that count.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.catalog.lookup import find
from utils.catalog.rules import whole

if TYPE_CHECKING:  # the library takes seconds to import
    from transformers import PreTrainedConfig

SHIPPED = Path(__file__).with_name("configs")
OWN_KEYS = ("_source", "_parameters")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# The first that knows a model's kind trains it; but what its file names under `architectures` goes first.
AUTO_CLASSES = {
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


class ModelConfigError(Exception):
    """A configuration that cannot be had; the text says what to do."""


def model_names() -> list[str]:
    """Names on the Hub of the shipped configurations, sorted."""
    return sorted((path.stem.replace("--", "/", 1) for path in SHIPPED.glob("*.json")), key=str.lower)


def published_parameters(name: str) -> int:
    """How many parameters the published checkpoint of a shipped model has, tied ones counted once.

    Raises:
        ModelConfigError: no shipped model has that name.
    """
    return json.loads(_file_of(_shipped_name(name)).read_text(encoding="utf-8"))["_parameters"]


def model_config(source: str | Path) -> PreTrainedConfig:
    """The configuration of a model, with which it can be built without weights.

    Args:
        source: A shipped name in any case, with or without its organisation ("qwen2.5-7b"); a folder
            with a `config.json`, or such a file; or another name on the Hub ("organisation/name"),
            from where that one file is fetched. The environment variable `COURSE_OFFLINE=1` forbids
            the network; what the Hub's cache on this machine holds is still read.

    Raises:
        ModelConfigError: an unknown name, no network, a licence to accept first, a model that brings
            its own code, or a file that is missing, damaged, or of a kind that the installed
            transformers does not know.
    """
    if isinstance(source, str) and (name := _shipped_name(source, or_none=True)):
        return _read(_file_of(name), name)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelConfigError(_without_config(path))
        return _read(path / "config.json", str(path))
    if path.is_file():
        return _read(path, str(path))
    if isinstance(source, Path) or source.startswith((".", "/", "~")) or path.suffix == ".json":
        raise ModelConfigError(
            f"There is no file or folder {source}. Give a config.json, the folder that holds it, or a "
            "name on the Hugging Face Hub such as 'Qwen/Qwen2.5-7B'."
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        _shipped_name(source)
    return _read(_fetched(source), source)


def auto_class(config: PreTrainedConfig) -> type[Any]:
    """The class of transformers whose `from_config` makes the model that is trained.

    Raises:
        ModelConfigError: none of those whose loss the library computes takes this kind of model.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    takers = {
        name: kinds[config.model_type]
        for name, mapping in AUTO_CLASSES.items()
        if config.model_type in (kinds := getattr(modeling_auto, mapping))
    }
    if not takers:
        raise ModelConfigError(
            f"transformers {transformers.__version__} has no class that trains a model of the kind "
            f"{config.model_type!r} on text, images or speech. Build it in a function of your own."
        )
    named = [name for name, model in takers.items() if model in (config.architectures or ())]
    return getattr(transformers, [*named, *takers][0])


def _file_of(name: str) -> Path:
    return SHIPPED / f"{name.replace('/', '--')}.json"


def _shipped_name(name: str, *, or_none: bool = False) -> str | None:
    """The shipped name that is meant; without one None, or an error with the nearest."""
    full = model_names()
    table = {key if "/" in str(name) else key.partition("/")[2]: key for key in full}
    try:
        return find(table, name, "shipped model")
    except ValueError as error:
        if or_none:
            return None
        raise ModelConfigError(
            f"{error} model_names() lists all {len(full)}; any other comes from its folder, its "
            "config.json, or the Hugging Face Hub as 'organisation/name'."
        ) from None


def _fetched(name: str) -> Path:
    """The `config.json` of a model on the Hub, in the Hub's cache on this machine."""
    import httpx
    from huggingface_hub import errors, hf_hub_download

    offline = os.environ.get("COURSE_OFFLINE", "0") not in ("", "0")
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=offline))
    except errors.GatedRepoError:
        reason = "its licence must be accepted on its page first, and `hf auth login` must know you"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no model of that name, or keeps it private"
    except errors.RemoteEntryNotFoundError:
        reason = "it has no config.json there, so it is none of transformers' models"
    except errors.HFValidationError:
        reason = "that is no name on the Hub"
    except (OSError, httpx.HTTPError) as error:
        reason = "COURSE_OFFLINE is set" if offline else f"the Hub did not answer ({_first(error)})"
    raise ModelConfigError(f"{name} is not shipped and could not be had: {reason}. {_instead(name)}")


def _instead(name: str) -> str:
    try:
        _shipped_name(name)
    except ModelConfigError as error:
        return str(error)
    return ""


def _read(file: Path, name: str) -> PreTrainedConfig:
    """The configuration in a file, as transformers reads it; `name` is what the sentences call it."""
    import transformers

    kind = _checked_kind(_keys(file), name)
    try:
        config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
        whole(kind, **{size: getattr(config, size) for size in SIZES if hasattr(config, size)})
    except Exception as error:  # what the library raises for wrong values differs by kind of model
        raise ModelConfigError(
            f"The configuration of {name} has a value that transformers {transformers.__version__} "
            f"does not take ({_first(error)}). Compare it with the one on the model's page."
        ) from error
    for key in OWN_KEYS:
        if hasattr(config, key):
            delattr(config, key)
    config.name_or_path = name
    return config


def _keys(file: Path) -> dict[str, Any]:
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(
            f"{file} cannot be read as JSON ({_first(error)}). Copy or download it again: it may have "
            "been cut off."
        ) from error
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise ModelConfigError(
            f"{file} names no model_type, so it is no configuration of a model of transformers. Give "
            "the config.json that lies beside the weights."
        )
    return keys


def _checked_kind(keys: dict[str, Any], name: str) -> str:
    """The model's kind, once the installed transformers knows it and its width and depth are given."""
    import transformers

    kind, version = keys["model_type"], transformers.__version__
    if kind not in transformers.CONFIG_MAPPING:
        if keys.get("auto_map"):
            raise ModelConfigError(
                f"{name} brings its own code, which is not run here, and transformers {version} has no "
                f"model of the kind {kind!r}. Read that code, then build the model in a function of "
                "your own."
            )
        raise ModelConfigError(
            f"{name} is of the kind {kind!r}, which transformers {version} does not know. A newer "
            "transformers may; or build the model in a function of your own."
        )
    if missing := _missing(transformers.CONFIG_MAPPING[kind], keys):
        raise ModelConfigError(
            f"The configuration of {name} lacks {' and '.join(missing)}; the library would take those "
            f"of another {kind}. Copy or download the file again."
        )
    return kind


def _missing(kind: type[PreTrainedConfig], keys: dict[str, Any]) -> list[str]:
    """Names of width and depth that this kind has and the file does not give."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if "text_config" in fields and "text_config" not in keys:
        fields |= {"hidden_size", "num_hidden_layers"}  # older files have them beside the other parts
    stored = {size: kind.attribute_map.get(size, size) for size in SIZES[:2]}
    return [
        name for size, name in stored.items() if name in fields and not {name, size} & keys.keys()
    ]


def _without_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds adapters and no model. Give the model that they belong to."
    return f"{folder} has no config.json. Is it the folder above it, or a download that was cut off?"


def _first(error: Exception) -> str:
    """What an error says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removesuffix(".")[:200]
