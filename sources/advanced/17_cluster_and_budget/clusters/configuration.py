"""The files of a Slurm of N nodes in one folder: who is who, and how fast it notices what."""

from __future__ import annotations

import secrets
from pathlib import Path

CPUS, GPUS = 2, 2  # of a node; its GPUs are files that nobody computes with
MEMORY_MB = 4000
HEAD = "10.78.0.1"  # seen inside the namespaces alone; node i is 10.78.0.1i

# https://slurm.schedmd.com/slurm.conf.html. A lost node is noticed after SlurmdTimeout (300 s on a
# real cluster), and a requeued job waits for cred_expire, 120 s, before it starts again.
SLURM_CONF = """\
ClusterName=course
SlurmctldHost=head({head})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog.sh
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
SlurmdParameters=config_overrides
SlurmdTimeout={lost_after}
MessageTimeout=5
TCPTimeout=1
KillWait=3
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=200000
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp
MinJobAge=3600
{nodes}
PartitionName=train Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=n{i} NodeAddr=10.78.0.1{i} CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN"
# What a task prolog prints as `export ...` Slurm sets for the task: no rank takes a GPU of this
# machine, on which all nodes lie.
PROLOG = "#!/bin/sh\necho export CUDA_VISIBLE_DEVICES=\necho export OMP_NUM_THREADS=1\n"


def node_address(name: str) -> str:
    """The address of a node such as "n2"."""
    return f"{HEAD}{name.removeprefix('n')}"


def write_configuration(folder: Path, nodes: int, lost_after_seconds: int) -> None:
    """Everything that the daemons read, in a folder that they alone use."""
    numbers = range(1, nodes + 1)
    lines = [NODE.format(i=i, cpus=CPUS, memory=MEMORY_MB, gpus=GPUS) for i in numbers]
    hosts = [
        "127.0.0.1 localhost",
        f"{HEAD} head",
        *(f"{node_address(f'n{i}')} n{i}" for i in numbers),
    ]
    for name in ("state", "log", *(f"spool.n{i}" for i in numbers)):
        (folder / name).mkdir()
    folder.chmod(0o755)  # munge's clients must reach its socket
    texts = {
        "slurm.conf": SLURM_CONF.format(
            head=HEAD,
            folder=folder,
            nodes="\n".join(lines),
            count=nodes,
            lost_after=lost_after_seconds,
        ),
        "gres.conf": "".join(
            f"Name=gpu File={file}\n" for file in ("/dev/null", "/dev/zero")[:GPUS]
        ),
        "hosts": "\n".join([*hosts, ""]),
        "prolog.sh": PROLOG,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "prolog.sh").chmod(0o755)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
