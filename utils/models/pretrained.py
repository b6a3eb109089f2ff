"""Models of the transformers library: from a published shape, or from a folder of real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from utils.catalog import ModelShape, model_shape

if TYPE_CHECKING:  # the library takes seconds to import
    from transformers import LlamaConfig, PreTrainedModel

QUANTIZATIONS = (None, "nf4", "nf4-dq")
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class BaseModelError(Exception):
    """A base model that cannot be loaded; the text says what to do."""


def llama_config(shape: ModelShape | str, **changes: Any) -> LlamaConfig:
    """The configuration of transformers' Llama for a published shape, or its name, with `changes`.

    Raises:
        ValueError: the shape is of another family, or no model has that name.
    """
    from transformers import LlamaConfig

    shape = model_shape(shape)
    if shape.family != "llama" or shape.num_experts is not None:
        raise ValueError(f"{shape.name} is no Llama: choose a shape such as 'llama-2-7b'.")
    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feedforward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "max_position_embeddings": shape.max_sequence,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
    }
    return LlamaConfig(**sizes | changes)


def load_base(
    source: str | Path,
    *,
    quantization: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a Llama, with its linear layers but the head in four bits if wanted.

    Args:
        source: a folder that `save_pretrained` wrote, or a name on the Hugging Face Hub such as
            "meta-llama/Llama-2-7b-hf" (its licence must be accepted there first).
        quantization: None, "nf4", or "nf4-dq" with double quantization; each layer is packed as
            it is loaded, so the 16-bit model never lies in memory whole.
        dtype: of what is not packed, and of the arithmetic.
        device: where the model goes.

    Raises:
        BaseModelError: nothing there, another architecture, or damaged or missing weights.
        ValueError: an unknown quantization.
        ModuleNotFoundError: a quantization is wanted and bitsandbytes is not installed.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is {quantization!r}; choose one of {QUANTIZATIONS}.")
    _check_source(source)
    from transformers import AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
            quantization_config=_packing(quantization, dtype),
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:  # what the libraries raise for damaged files differs by version
        raise BaseModelError(_cannot_load(source, error)) from error
    # The library's annotation forgets the pair that `output_loading_info` asks for.
    model, loading = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if wrong := sorted([*loading["missing_keys"], *map(str, loading["mismatched_keys"])]):
        raise BaseModelError(
            f"{source} lacks weights of this architecture, or has them in another shape: "
            f"{', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}. They would be random "
            "numbers. Copy or download the folder again."
        )
    keep_layout(model)
    return model


def keep_layout(model: nn.Module) -> None:
    """Keep packed layers as they are when a model is evaluated, in place.

    On a CPU with bfloat16 instructions bitsandbytes 0.50 repacks a layer's weights in eval mode, for
    a kernel without a backward: trained again, the layer hands wrong gradients on, and nothing fails.
    """
    part: Any
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False


def enable_checkpointing(model: Any) -> None:
    """Recompute every block in backward, without reentrant autograd, in place.

    transformers renamed the method; this calls the one that the installed version has.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)
    enable = newer or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _packing(quantization: str | None, dtype: torch.dtype) -> Any:
    if quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    from utils.techniques.bitsandbytes_import import bitsandbytes_library

    bitsandbytes_library()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization == "nf4-dq",
        bnb_4bit_compute_dtype=dtype,
    )


def _check_source(source: str | Path) -> None:
    """Look at a folder before the library does: its own messages speak of the Hub."""
    folder = Path(source)
    if not folder.is_dir():
        if (
            isinstance(source, str)
            and source.count("/") == 1
            and not source.startswith((".", "/", "~"))
        ):
            return  # a name on the Hub
        raise BaseModelError(
            f"There is no folder {source}. Give the folder that save_pretrained() wrote, or a name "
            "on the Hugging Face Hub such as 'meta-llama/Llama-2-7b-hf'."
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"{folder} has no readable config.json, so it is no saved model. Is it the folder "
            "above it, or a download that was cut off?"
        ) from error
    if config.get("model_type") != "llama":
        raise BaseModelError(
            f"{folder} holds a model of the kind {config.get('model_type')!r}. This lesson's "
            "adapters go on a Llama: choose a folder with model_type 'llama'."
        )
    _check_files(folder)


def _check_files(folder: Path) -> None:
    present = [name for name in _WEIGHTS if (folder / name).exists()]
    if not present:
        raise BaseModelError(
            f"{folder} has a configuration and no weights (model.safetensors or its index). Copy "
            "or download it again."
        )
    if not present[0].endswith(".index.json"):
        return
    try:
        found = json.loads((folder / present[0]).read_text(encoding="utf-8"))["weight_map"]
        shards = {(folder / name).relative_to(folder).as_posix() for name in found.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelError(
            f"{folder / present[0]} is no index of weights (a map `weight_map` from each name to its "
            "file). Copy or download it again."
        ) from error
    if missing := sorted(shard for shard in shards if not (folder / shard).exists()):
        raise BaseModelError(
            f"{folder} lacks {len(missing)} of {len(shards)} files of weights, such as "
            f"{missing[0]}. Finish the download."
        )


def _cannot_load(source: str | Path, error: Exception) -> str:
    reason = (
        str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    )
    if Path(source).is_dir():
        return f"The weights in {source} are damaged or cut off ({reason}). Copy or download them again."
    return (
        f"{source} could not be had from the Hugging Face Hub ({reason}). Llama's licence must be "
        "accepted on its page, and `hf auth login` must know you; or give a local folder."
    )
