"""What PyTorch and other libraries do differently on tensors without data, put right meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from utils.memory.host import host_memory
from utils.shims import (
    bitsandbytes,
    deepspeed,
    torch_autocast,
    torch_dispatch,
    torch_simulated,
    transformers,
)
from utils.shims.shim import check
from utils.shims.torch_ import STORAGE, with_data
from utils.simulation.checkpoint_files import headers_alone
from utils.simulation.watcher import StorageWatcher

COMPILED = (
    "torch.compile is left out: the step is simulated as it runs without. Compiled, it mostly keeps "
    "and takes less."
)
PAGED = (
    "The state of a paged optimizer is counted in host memory, from where CUDA pages it in as it is "
    "used."
)
_LIBRARIES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bitsandbytes": bitsandbytes.code_tables,
    "deepspeed": deepspeed.zero_without_data,
    "transformers": transformers.one_sequence_a_row,
}


@contextlib.contextmanager
def without_data(watcher: StorageWatcher, is_cuda: bool) -> Iterator[None]:
    """Inside, modules convert and storages resize as they do with data. Undone at the end.

    Raises:
        MovedError: a private name that this stands on is gone.
        ValueError: a library was loaded inside that has to be known before.
    """
    check((STORAGE, *torch_simulated.SHIMS, *torch_dispatch.SHIMS, *torch_autocast.SHIMS))
    with (
        torch_simulated.plain_conversion(bitsandbytes.quantize_moved),
        torch_simulated.noted_resizes(watcher.resized),
        torch_simulated.unread_initialization(),
        torch_simulated.apart_from_shapes(watcher.pausing),
        torch_simulated.device_asked_once(),
        torch_simulated.copied_without_data(),
        torch_simulated.formatted_by_value(),
        torch_simulated.compiled_as_eager(partial(watcher.remark, COMPILED)),
        torch_simulated.errors_unlogged(),
        _libraries(watcher, is_cuda),
    ):
        yield


@contextlib.contextmanager
def _libraries(watcher: StorageWatcher, is_cuda: bool) -> Iterator[None]:
    """Inside, the libraries that are loaded run on tensors without data."""
    loaded = {name for name in _LIBRARIES if name in sys.modules}
    with contextlib.ExitStack() as stack:
        for name in sorted(loaded):
            stack.enter_context(_LIBRARIES[name]())
        if "bitsandbytes" in loaded:
            _four_bits(stack, watcher, is_cuda)
        if "transformers" in loaded:
            stack.enter_context(transformers.from_this_machine())

            def announced() -> None:
                if "bitsandbytes" not in loaded:
                    loaded.add("bitsandbytes")
                    with with_data():
                        stack.enter_context(bitsandbytes.code_tables())
                        _four_bits(stack, watcher, is_cuda)
                stack.enter_context(transformers.four_bits_packed(bitsandbytes.packed))

            stack.enter_context(transformers.four_bit_announced(announced))
        stack.enter_context(headers_alone())
        yield
    for name in _LIBRARIES:
        # transformers' Trainer loads what is installed, and may use none of it.
        if name in sys.modules and name not in loaded and name in watcher.libraries:
            raise ValueError(
                f"'{name}' was imported inside of the simulation, which has to know of it before. "
                "Import it at the top, and simulate again."
            )


def _four_bits(stack: contextlib.ExitStack, watcher: StorageWatcher, is_cuda: bool) -> None:
    stack.enter_context(bitsandbytes.four_bit_weights())
    if is_cuda:
        note = partial(watcher.remark, PAGED)
        stack.enter_context(bitsandbytes.paged_on_host(host_memory, note))
