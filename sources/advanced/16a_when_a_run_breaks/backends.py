"""What gloo said of each fault, beside what NCCL says of the same: a table."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from pandas.io.formats.style import Styler

from utils.checked import check_public
from utils.ranks.recovery import Recovery

# By fault: who notices and after how long; NCCL's or PyTorch's words; where they were published.
NCCL_SAYS = {
    "kill a rank": (
        "The agent beside it, at once: exit code -9. Ranks on other hosts read of a closed connection, or hang "
        "until the timeout.",
        "NCCL WARN Net : Connection closed by remote peer",
        "pytorch/elastic issue 134",
    ),
    "kill a host": (
        "Over InfiniBand nobody closes a connection. The network card tries again, by NCCL's defaults 7 times for "
        "4.3 s (NCCL_IB_RETRY_CNT, NCCL_IB_TIMEOUT).",
        "NCCL WARN NET/IB : Got completion from peer ... with status=12",
        "NVIDIA/nccl issue 1405",
    ),
    "cut the link": (
        "The same, or PyTorch's watchdog at the timeout, by default 10 minutes. It aborts the process: exit code "
        "-6, and no `except` of yours sees it.",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, ..., "
        "Timeout(ms)=600000) ran for 600004 milliseconds before timing out.",
        "hiyouga/LlamaFactory issue 7396; huggingface/picotron_tutorial issue 6",
    ),
}


def backends_table(rows: Sequence[tuple[Recovery, str]]) -> Styler:
    """A row a fault: what ranks saw under gloo, with its evidence, and what NCCL says, published.

    Raises:
        ValueError: a fault of which nothing is known.
    """
    if unknown := {found.fault.kind for found, _ in rows} - set(NCCL_SAYS):
        raise ValueError(f"Nothing is stored of {sorted(unknown)} under NCCL.")
    table = pd.DataFrame(
        {
            "fault": found.fault.kind,
            "gloo, on CPUs": "; ".join(
                f"rank {rank} after {seconds:.1f} s: {text}"
                for rank, (seconds, text) in found.saw.items()
            )
            + f" ({evidence})",
            "NCCL, on GPUs: who notices": NCCL_SAYS[found.fault.kind][0],
            "what it writes (published)": "“{}” ({})".format(*NCCL_SAYS[found.fault.kind][1:]),
        }
        for found, evidence in rows
    )
    look = {"text-align": "left", "white-space": "normal", "vertical-align": "top"}
    return table.style.hide().set_properties(**look)


__all__ = ["NCCL_SAYS", "backends_table"]

check_public(globals())
