"""A model's `config.json`, read by transformers once it is seen to be whole and of a kind that is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.rules import whole

if TYPE_CHECKING:  # the library takes seconds to import
    from transformers import PreTrainedConfig

OWN_KEYS = ("_source", "_parameters")
DEPTH_AND_WIDTH = ("num_hidden_layers", "hidden_size")
SIZES = (*DEPTH_AND_WIDTH, "num_attention_heads", "vocab_size")


class ModelConfigError(Exception):
    """A configuration that cannot be had; the text says what to do."""


def read_config(file: Path, name: str) -> PreTrainedConfig:
    """The configuration in a file; `name` is what sentences call the model.

    Raises:
        ModelConfigError: a damaged file, a kind that the installed transformers does not know, keys
            that are missing, or values that it does not take.
    """
    import transformers

    kind = _checked_kind(_keys(file), name)
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
        sizes = {size: getattr(config, size, None) for size in SIZES}
        whole(kind, **{size: count for size, count in sizes.items() if isinstance(count, int)})
    except Exception as error:  # what the library raises for wrong values differs by kind of model
        raise ModelConfigError(
            f"The configuration of {name} has a value that transformers {transformers.__version__} "
            f"does not take ({first_words(error)}). Compare it with the one on the model's page."
        ) from error
    for key in OWN_KEYS:
        if hasattr(config, key):
            delattr(config, key)
    config.name_or_path = name
    return config


def config_in(folder: Path) -> Path:
    """The `config.json` of a folder. Raises ModelConfigError without one."""
    file = folder / "config.json"
    if file.is_file():
        return file
    if (folder / "adapter_config.json").is_file():
        raise ModelConfigError(
            f"{folder} holds adapters and no model. Give the model that they belong to."
        )
    raise ModelConfigError(
        f"{folder} has no config.json. Is it the folder above it, or a download that was cut off?"
    )


def first_words(error: Exception) -> str:
    """What an error says, in one line of 200 characters at most."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removesuffix(".")[:200]


def _keys(file: Path) -> dict[str, Any]:
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(
            f"{file} cannot be read as JSON ({first_words(error)}). Copy or download it again: it may "
            "have been cut off."
        ) from error
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise ModelConfigError(
            f"{file} names no model_type, so it is no configuration of a model of transformers. Give "
            "the config.json that lies beside the weights."
        )
    return keys


def _checked_kind(keys: dict[str, Any], name: str) -> str:
    """The model's kind, once the installed transformers knows it and its depth and width are given."""
    import transformers

    kind, version = keys["model_type"], transformers.__version__
    if kind not in transformers.CONFIG_MAPPING:
        if keys.get("auto_map"):
            raise ModelConfigError(
                f"{name} brings its own code, which is not run here, and transformers {version} has "
                f"no model of the kind {kind!r}. Read that code, then build the model in a function "
                "of your own."
            )
        raise ModelConfigError(
            f"{name} is of the kind {kind!r}, which transformers {version} does not know. A newer "
            "transformers may; or build the model in a function of your own."
        )
    if missing := _missing(transformers.CONFIG_MAPPING[kind], keys):
        raise ModelConfigError(
            f"The configuration of {name} lacks {' and '.join(missing)}; transformers would take "
            f"those of another {kind}. Copy or download the file again."
        )
    return kind


def _missing(kind: type[PreTrainedConfig], keys: dict[str, Any]) -> list[str]:
    """Names of depth and width that this kind has and the file does not give."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if "text_config" in fields and "text_config" not in keys:
        fields |= set(DEPTH_AND_WIDTH)  # older files have them beside the other parts
    stored = {size: kind.attribute_map.get(size, size) for size in DEPTH_AND_WIDTH}
    return [
        name for size, name in stored.items() if name in fields and not {name, size} & keys.keys()
    ]
