"""Linear layers in four bits where no folder of weights is loaded, and plain ones on every CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from utils.techniques.bitsandbytes_import import bitsandbytes_library

HEAD = "lm_head"  # transformers leaves it in 16 bits


def pack(model: nn.Module) -> None:
    """Put bitsandbytes' Linear4bit in place of every linear layer but the head.

    The layers that `from_pretrained(quantization_config=BitsAndBytesConfig(load_in_4bit=True,
    bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))` makes; they quantize as they are
    moved to a GPU.
    """
    bnb: Any = bitsandbytes_library()
    how: Any = {"quant_type": "nf4", "compress_statistics": True}
    for path, layer in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        if type(layer) is not nn.Linear or name == HEAD:
            continue
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            device="meta",
            **how,
        )
        made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **how)
        made.bias = layer.bias
        setattr(model.get_submodule(owner), name, made)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Inside, four-bit layers on a CPU are made as on every other.

    With AVX512-BF16 evaluation repacks a weight for a kernel of its own, and gradients that are
    taken after it are wrong.
    """
    bitsandbytes_library()
    import bitsandbytes.nn.modules

    with mock.patch.object(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False):
        yield
