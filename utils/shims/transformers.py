"""transformers: its attention masks and its loading of weights, on tensors without data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from utils.shims.shim import Library, Shim

TRANSFORMERS = Library("transformers", "5.23.0", "utils/shims/transformers.py")
_PACKED = Shim(
    TRANSFORMERS,
    "transformers.masking_utils:find_packed_sequence_indices",
    "one_sequence_a_row",
    "it looks at the positions for several sequences packed into a row",
    patched=True,
)
_FOUR_BIT = Shim(
    TRANSFORMERS,
    "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer.validate_environment",
    "four_bit_announced",
    "it imports bitsandbytes on its own, in the midst of a simulation",
    patched=True,
)
_LOADED = Shim(
    TRANSFORMERS,
    "transformers.integrations.bitsandbytes:Bnb4bitQuantize.convert",
    "four_bits_packed",
    "it quantizes by moving a tensor of a class of its own",
    patched=True,
)
_CONSENT = Shim(
    TRANSFORMERS,
    "transformers.dynamic_module_utils:TIME_OUT_REMOTE_CODE",
    "from_this_machine",
    "it waits for an answer on the keyboard before it runs a repository's code",
)
_UNPACKED = Shim(
    TRANSFORMERS,
    "transformers.modeling_utils:PreTrainedModel._keep_in_fp32_modules",
    "never_packed",
    "a model names layers that no quantizer packs: T5 casts what it multiplies to their type",
)
SHIMS = (_PACKED, _FOUR_BIT, _LOADED, _CONSENT, _UNPACKED)


def never_packed(model: Any) -> tuple[str, ...]:
    """Names of layers that `from_pretrained` leaves as they are when it packs the others."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())


def one_sequence_a_row() -> AbstractContextManager[Any]:
    """Inside, no row is taken for a packed one.

    transformers finds none in a plain batch, and takes attention without a mask; where it cannot
    look, it makes a mask of (sequence, sequence) instead.
    """
    return _PACKED.replaced(lambda positions: None)


def four_bit_announced(announce: Callable[[], None]) -> AbstractContextManager[Any]:
    """Inside, `announce()` is called before a model is loaded in four bits of bitsandbytes."""
    plain = _FOUR_BIT.get()

    def announced(quantizer: Any, *args: Any, **kwargs: Any) -> Any:
        announce()
        return plain(quantizer, *args, **kwargs)

    return _FOUR_BIT.replaced(announced)


def four_bits_packed(pack: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Inside, each four-bit weight is packed by `pack` as it is loaded, as it is with data."""
    plain = _LOADED.get()

    def converted(*args: Any, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        made = {name: pack(weight) for name, weight in plain(*args, model=model, **kwargs).items()}
        for name, weight in made.items():
            model.get_submodule(name.rpartition(".")[0]).quant_state = weight.quant_state
        return made

    return _LOADED.replaced(converted)


@contextlib.contextmanager
def from_this_machine() -> Iterator[None]:
    """Inside, `from_pretrained` takes what this machine has, in the program's own thread.

    Nothing is asked of the Hub. A repository's own code runs if `trust_remote_code=True` says so,
    and no one is asked on the keyboard.
    """
    import huggingface_hub.constants
    import transformers.modeling_utils  # noqa: F401  (here, and so with data; from_pretrained needs it)

    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        _CONSENT.replaced(0),
    ):
        yield
