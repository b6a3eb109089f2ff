"""Which memory a tensor is made in, where device and host are told apart by the program."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_on_host: contextvars.ContextVar[bool] = contextvars.ContextVar("on_host", default=False)


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """What is made inside belongs to the host, also where a GPU is simulated by CPU tensors.

    On real devices it changes nothing: there a tensor's device says where it is.
    """
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


def on_host() -> bool:
    """Whether the program is inside `host_memory()`."""
    return _on_host.get()
