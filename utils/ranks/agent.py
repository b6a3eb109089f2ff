"""torchrun inside a killable process: what it is told, and stores that only this machine reaches."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from utils.parallel.loopback import LOCALHOST, local_store
from utils.ranks.namespaces import enter


def run_agent(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    namespace: str | None = None,
) -> dict[int, int]:
    """Be torchrun with these arguments; the exit codes of ranks that failed, by rank.

    The process becomes one that was started in `folder` with `environment`: it was forked from one
    that has others. With a `namespace` it and its ranks live on that host.
    """
    if namespace is not None:
        enter(namespace)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    as_a_fresh_process()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _keep_the_store_local()
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def rendezvous_arguments(folder: str) -> list[str]:
    """Agents meet in a file of a private folder, in place of an open port.

    torchrun keeps a pickle where its agents meet. In its TCP store, anyone who reaches the port
    could replace that, and the agents would run what it holds. With an address given, torchrun
    does not look up the machine's name, which takes minutes where nothing knows that name.
    """
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={folder}/rendezvous",
        "--rdzv-id=1",
        "--rdzv-conf=store_type=file",
        f"--local-addr={LOCALHOST}",
    ]


def as_a_fresh_process() -> None:
    """Undo what a forked process has from its parent: ignored interrupts, its input, core dumps."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs inherit an ignored one
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    resource = __import__("resource")  # here: Windows has no such module
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort is to leave no file


def _keep_the_store_local() -> None:
    """The store that the agent opens for its ranks: on its own address alone, and a new one each time.

    PyTorch 2.15 opens one store and hands it to every generation of ranks. Those that are started
    again find what the dead ones wrote about themselves there, and gloo cannot connect ("connectFullMesh
    failed"). With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 opens a new store, on every address.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"  # else rank 0 opens it, everywhere
    name, kept = "_create_tcp_store_server", ("_shared_tcp_store_server", "_bootstrap_store_info")
    if not hasattr(DynamicRendezvousHandler, name):
        raise RuntimeError(
            f"This PyTorch's torchrun has no {name}: its store would listen on every address. "
            "Install the version that constraints.txt names."
        )
    next_rendezvous = DynamicRendezvousHandler.next_rendezvous

    def create(handler: Any, address: str, port: int) -> Any:
        return local_store(address)

    def anew(handler: Any) -> Any:
        for attribute in kept:
            setattr(handler, attribute, None)
        return next_rendezvous(handler)

    for replaced, by in ((name, create), ("next_rendezvous", anew)):
        setattr(DynamicRendezvousHandler, replaced, by)
