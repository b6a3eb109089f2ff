"""Out-of-memory messages of PyTorch that people reported, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from utils.checked import check_public


class Message(NamedTuple):
    """What PyTorch printed, where it was reported, and what was told there of the cause."""

    source: str
    text: str
    told: str = ""

    @property
    def url(self) -> str:
        """Where it can be read."""
        repository, _, number = self.source.partition(",")[0].split()
        return f"https://github.com/{repository}/issues/{number}"

    def __str__(self) -> str:
        cause = f"\n(told there: {self.told})" if self.told else ""
        return f"{self.url}\n{self.text}{cause}"


PUBLISHED = (
    Message(
        "rwth-i6/returnn issue 1649",
        "CUDA out of memory. Tried to allocate 290.00 MiB. GPU 0 has a total capacity of 93.00 GiB of "
        "which 134.94 MiB is free. Process 118636 has 71.62 GiB memory in use. Including non-PyTorch "
        "memory, this process has 21.24 GiB memory in use. Of the allocated memory 19.85 GiB is "
        "allocated by PyTorch, and 731.17 MiB is reserved by PyTorch but unallocated.",
        "process 118636 is the same training, which had crashed before",
    ),
    Message(
        "kerrj/lerf issue 73",
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of "
        "which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in "
        "use. Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by "
        "PyTorch but unallocated.",
    ),
    Message(
        "EveryVoiceTTS/EveryVoice issue 178",
        "CUDA out of memory. Tried to allocate 112.00 MiB. GPU 2 has a total capacty of 15.78 GiB of "
        "which 27.19 MiB is free. Process 307065 has 15.75 GiB memory in use. Of the allocated memory "
        "14.24 GiB is allocated by PyTorch, and 177.74 MiB is reserved by PyTorch but unallocated.",
        "too large a batch in training",
    ),
    Message(
        "carolchenyx/MGFN. issue 35",
        "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of "
        "which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 "
        "GiB is reserved by PyTorch but unallocated.",
    ),
    Message(
        "murong-xu/CADS issue 4",
        "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of "
        "which 18.66 GiB is free. Including non-PyTorch memory, this process has 12.81 GiB memory in "
        "use. Of the allocated memory 4.69 GiB is allocated by PyTorch, and 7.82 GiB is reserved by "
        "PyTorch but unallocated.",
    ),
    Message(
        "murong-xu/CADS issue 4, again",
        "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of "
        "which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in "
        "use. Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by "
        "PyTorch but unallocated.",
    ),
)

__all__ = ["PUBLISHED", "Message"]

check_public(globals())
