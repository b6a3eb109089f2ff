"""Out-of-memory messages of PyTorch that people reported, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from utils.checked import check_public


class Message(NamedTuple):
    """What PyTorch printed, and where it was reported."""

    source: str
    text: str

    @property
    def url(self) -> str:
        """Where it can be read."""
        repository, _, number = self.source.split()
        return f"https://github.com/{repository}/issues/{number}"


PUBLISHED = (
    Message(
        "chatdoc-com/OCRFlux issue 42",
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 39.39 GiB of "
        "which 9.25 MiB is free. Process 25454 has 3.86 GiB memory in use. Process 104554 has 4.29 "
        "GiB memory in use. Process 30427 has 31.20 GiB memory in use. Of the allocated memory 30.21 "
        "GiB is allocated by PyTorch, with 26.00 MiB allocated in private pools (e.g., CUDA Graphs), "
        "and 217.48 MiB is reserved by PyTorch but unallocated.",
    ),
    Message(
        "kerrj/lerf issue 73",
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of "
        "which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in "
        "use. Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by "
        "PyTorch but unallocated.",
    ),
    Message(
        "netease-youdao/QAnything issue 303",
        "CUDA out of memory. Tried to allocate 132.00 MiB. GPU 0 has a total capacty of 23.64 GiB of "
        "which 67.06 MiB is free. Process 250345 has 662.00 MiB memory in use. Including non-PyTorch "
        "memory, this process has 22.90 GiB memory in use. Of the allocated memory 18.70 GiB is "
        "allocated by PyTorch, and 353.02 MiB is reserved by PyTorch but unallocated.",
    ),
    Message(
        "vllm-project/vllm issue 17835",
        "CUDA out of memory. Tried to allocate 270.00 MiB. GPU 1 has a total capacity of 21.98 GiB of "
        "which 156.94 MiB is free. Including non-PyTorch memory, this process has 21.80 GiB memory in "
        "use. Of the allocated memory 21.42 GiB is allocated by PyTorch, and 24.12 MiB is reserved by "
        "PyTorch but unallocated.",
    ),
    Message(
        "murong-xu/CADS issue 4",
        "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of "
        "which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in "
        "use. Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    ),
)

__all__ = ["PUBLISHED", "Message"]

check_public(globals())
