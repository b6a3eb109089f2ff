"""Configurations of models by name, from a file or from the Hub: sizes alone, never weights or foreign code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.catalog.hub_models import config_file, hub_name, hub_names
from utils.catalog.lookup import find
from utils.fitting.config_files import ModelConfigError, config_in, first_words, read_config

if TYPE_CHECKING:  # the library takes seconds to import
    from transformers import PreTrainedConfig

__all__ = ["ModelConfigError", "auto_class", "model_config", "model_names", "published_parameters"]

# The first that knows a model's kind trains it; what its file names under `architectures` goes before.
AUTO_CLASSES = {
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


def model_names() -> list[str]:
    """Names on the Hub of the shipped configurations, sorted."""
    return hub_names()


def published_parameters(name: str) -> int:
    """How many parameters the published checkpoint of a shipped model has, tied ones counted once.

    Raises:
        ModelConfigError: no shipped model has that name.
    """
    shipped = hub_name(name)
    if shipped is None:
        raise ModelConfigError(_nearest(name))
    return json.loads(config_file(shipped).read_text(encoding="utf-8"))["_parameters"]


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
    if isinstance(source, str) and (shipped := hub_name(source)):
        return read_config(config_file(shipped), shipped)
    if not str(source).strip():
        raise ModelConfigError(_nearest(str(source)))
    path = Path(source).expanduser()
    if path.exists():
        return read_config(config_in(path) if path.is_dir() else path, str(source))
    if isinstance(source, Path) or source.startswith((".", "/", "~")) or path.suffix == ".json":
        raise ModelConfigError(
            f"There is no file or folder {source}. Give a config.json, the folder that holds it, or a "
            "name on the Hugging Face Hub such as 'Qwen/Qwen2.5-7B'."
        )
    return read_config(_fetched(source), source)


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
            f"A model of the kind {config.model_type!r} is none of those that are trained here: "
            "causal, masked and sequence-to-sequence language models, models of images with text, of "
            "speech to text, and of image classification. Build it in a function of your own."
        )
    named = [name for name, model in takers.items() if model in (config.architectures or ())]
    return getattr(transformers, [*named, *takers][0])


def _nearest(name: str) -> str:
    """The sentence on a name that is not shipped."""
    full = hub_names()
    table = {key if "/" in name else key.partition("/")[2]: key for key in full}
    try:
        return f"{find(table, name, 'shipped model')} is shipped."
    except ValueError as error:
        return (
            f"{error} model_names() lists all {len(full)}; any other comes from its folder, its "
            "config.json, or the Hugging Face Hub as 'organisation/name'."
        )


def _fetched(name: str) -> Path:
    """The `config.json` of a model on the Hub, in the Hub's cache on this machine."""
    from huggingface_hub import errors, hf_hub_download

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelConfigError(_nearest(name))
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
        reason = "that cannot be a name on the Hub"
    except OSError as error:
        reason = f"the Hub did not answer ({first_words(error)})"
        reason = "COURSE_OFFLINE is set" if offline else reason
    raise ModelConfigError(
        f"{name} is not shipped and could not be had: {reason}. {_nearest(name)}"
    )
