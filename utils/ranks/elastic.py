"""`run_elastic`: a script under elastic torchrun on two hosts of our own, to which faults happen.

Each host has an agent (torchrun) that starts its ranks. Where the system lets us, hosts are network
namespaces joined by a link that can be cut; elsewhere both agents share this machine's loopback, and
links cannot be cut. An agent that ends is started again, as a cluster's own supervisor does.
What a script notes stands in `utils.ranks.elastic_job`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from utils.checked import check_public
from utils.files import scratch
from utils.ranks.as_root import call_as_root, is_unprivileged
from utils.ranks.elastic_job import ElasticJob, JobOrder, Patience
from utils.ranks.launch import check_world
from utils.ranks.namespaces import NamespaceError, linked_hosts, namespaces_problem
from utils.ranks.recovery import ElasticRun, Fault
from utils.ranks.server import working_folder

__all__ = ["Fault", "Patience", "run_elastic"]

BYTES_PER_SECOND = 125e6
RESTARTS = 100


def run_elastic(
    script: str | os.PathLike[str],
    *args: object,
    hosts: int = 2,
    ranks_per_host: int = 1,
    least_hosts: int = 1,
    faults: Sequence[Fault] = (),
    restarts: int = RESTARTS,
    most_bytes: int | None = None,
    patience: Patience | None = None,
    timeout_seconds: float = 120.0,
) -> ElasticRun:
    """Run a script by elastic torchrun on one or two hosts, and let faults happen to it.

    It ends when all ranks are done, or when time is over. No process, namespace, store or file is left
    when this returns or raises, and nothing that is opened for it is reached from another machine. Without
    namespaces, another user of this one reaches the ranks' store, as with `run_torchrun`.

    Args:
        script: the Python file; it keeps a journal.
        args: its arguments.
        hosts: 1 or 2.
        ranks_per_host: ranks on each.
        least_hosts: with how many the job goes on.
        faults: in the order of their steps.
        restarts: how often an agent starts its ranks again. With 0 nobody starts an agent again
            either, and the job may end without being done.
        most_bytes: a rank whose memory grows beyond is killed, as by a cluster's scheduler.
        patience: how long agents wait for others; `Patience()` if None.
        timeout_seconds: for all of it.

    Raises:
        FileNotFoundError: there is no such script, or the working folder has been deleted.
        ValueError: these hosts, ranks or faults cannot be; or a link is to be cut where this system
            does not let us make namespaces.
        TimeoutError: time was over before all ranks were done; it says where the job stood.
        JournalError: the script noted what is no line of a journal.
    """
    working_folder()
    path = Path(script).resolve()
    _check(path, hosts, ranks_per_host, least_hosts, faults, timeout_seconds)
    call = JobOrder(path, tuple(map(str, args)), hosts, ranks_per_host, least_hosts, tuple(faults),
                 restarts, most_bytes, patience or Patience(), timeout_seconds)  # fmt: skip
    try:
        return _in_namespaces(call)
    except NamespaceError as error:
        why = f"no hosts of namespaces: {error}."
    if is_unprivileged() and (
        found := call_as_root(_in_namespaces, call, timeout_seconds=timeout_seconds)
    ):
        return found
    if any(fault.kind == "cut the link" for fault in faults):
        raise ValueError(f"A link cannot be cut here: {why}")
    return _run(call, (None,) * hosts, why)


def link_problem() -> str:
    """Why no link can be cut here, as a sentence without its full stop; "" if one can."""
    problem = namespaces_problem()
    if problem and is_unprivileged():
        found = call_as_root(namespaces_problem, timeout_seconds=30)
        return problem if found is None else found
    return problem


def _in_namespaces(call: JobOrder) -> ElasticRun:
    with linked_hosts(BYTES_PER_SECOND) as found:
        return _run(call, found[: call.hosts], "")


def _run(call: JobOrder, places: Sequence[str | None], why: str) -> ElasticRun:
    with scratch("elastic") as folder:
        job = ElasticJob(call, folder, places, list(call.faults))
        try:
            job.run()
        finally:
            job.end()
        transport = "loopback" if why else "network namespaces"
        return ElasticRun(sorted(job.moments, key=lambda m: m.seconds), transport, why, job.output)


def _check(
    script: Path, hosts: int, ranks: int, least: int, faults: Sequence[Fault], timeout: float
) -> None:
    check_world(ranks, timeout, "The script comes first: run_elastic(path, ranks_per_host=2).")
    if not script.is_file():
        raise FileNotFoundError(f"There is no script {script}: check its name and folder.")
    if hosts not in (1, 2) or least not in range(1, hosts + 1):
        raise ValueError(
            f"hosts={hosts!r}, least_hosts={least!r}: one or two hosts can be made here, and the "
            "job goes on with 1 to as many."
        )
    for fault in faults:
        most = {"kill a rank": hosts * ranks, "kill a host": hosts, "cut the link": 2}[fault.kind]
        if fault.target >= most or (fault.kind == "cut the link" and hosts == 1):
            raise ValueError(f"{fault}: {hosts} hosts with {ranks} ranks each have no such target.")
        if fault.kind == "kill a host" and fault.target == 0 and hosts == 2:
            raise ValueError(
                "Host 0 holds the store where agents meet: a job does not survive its death. Kill "
                "host 1, or a rank."
            )


check_public(globals())
