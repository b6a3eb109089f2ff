"""The command that starts an agent of the lesson's job, as a person would type it."""

from __future__ import annotations

from utils.checked import check_public
from utils.ranks.elastic import RESTARTS, Patience
from utils.ranks.elastic_job import PORT
from utils.ranks.namespaces import ADDRESSES


def launch_command(*, linked: bool) -> str:
    """What `run_elastic` tells host 0's agent: one rank on each of one or two hosts.

    `linked` says whether hosts are joined by a link; else agents meet in a file of a folder.
    """
    patience = Patience()
    address = ADDRESSES[0].partition("/")[0] if linked else "127.0.0.1"
    meet = f"{address}:{PORT}" if linked else "$FOLDER/rendezvous"
    settings = (  # one word for a shell, though too long for one line
        f"store_type={'tcp' if linked else 'file'},is_host=true,"
        f"keep_alive_interval={patience.keep_alive_seconds},keep_alive_max_attempt=3,\\\n"
        f"last_call_timeout={patience.last_call_seconds},join_timeout=600,read_timeout={patience.read_seconds}"
    )
    lines = (
        f"torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts={RESTARTS} --monitor-interval=0.1",
        f"--rdzv-backend=c10d --rdzv-endpoint={meet} --rdzv-id=1 --local-addr={address}",
        f"--rdzv-conf={settings}",
        "train.py",
    )
    return " \\\n    ".join(lines)


__all__ = ["launch_command"]

check_public(globals())
