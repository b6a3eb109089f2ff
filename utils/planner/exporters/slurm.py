"""The Slurm script: ranks are Slurm's own tasks, so that its signals reach them.

A torchrun on each node would do as well; it is one more process that must hand signals on, and
PyTorch is imported twice as often. Options: https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import shlex

from utils.planner.exporters.job import RESTARTS, TrainingJob

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gpus-per-node={tasks}
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120

# All ranks meet at the first node; the port comes from the job's number.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT{variables}
# A requeue keeps the job's number. A new job goes on from job 7's saves by: SAVES=saves-7 sbatch job.slurm
SAVES=${{SAVES:-saves-$SLURM_JOB_ID}}

# Ranks that save do not end at one moment. --kill-on-bad-exit would kill those that end after the first.
srun --kill-on-bad-exit=0 --wait=60 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec python -u {script} "$@"' rank{arguments} "$@"
code=$?

if [ "$code" = {stopped} ]; then  # saved, because Slurm asked for it
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" != 0 ]; then  # a rank failed: try again, {restarts} times after the same save
  save=$(ls "$SAVES" 2>/dev/null | tail -n 1)
  echo "after ${{save:-no save}}" >> "failures-$SLURM_JOB_ID"
  failures=$(grep -cxF "after ${{save:-no save}}" "failures-$SLURM_JOB_ID")
  if [ "$failures" -le {restarts} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$code"
"""
STOPPED = 75  # utils.parallel.saves.STOPPED, which needs torch; a test holds them together


def slurm_script(job: TrainingJob) -> str:
    """The text of job.slurm; `sbatch job.slurm --steps 1000` hands arguments on."""
    saves = ' --saves "$SAVES"' if job.is_exported else ""
    variables = "".join(f" {key}={shlex.quote(value)}" for key, value in job.variables.items())
    return SCRIPT.format(
        name=job.name,
        nodes=job.nodes,
        tasks=job.gpus_per_node,
        script=shlex.quote(job.script),
        arguments=saves + "".join(f" {shlex.quote(word)}" for word in job.arguments),
        variables=variables,
        stopped=STOPPED,
        restarts=RESTARTS,
    )


def slurm_notes(job: TrainingJob) -> list[str]:
    """What the reader must set or know before sbatch takes the script."""
    notes = [
        "Submit it from this folder, which all nodes must see: sbatch job.slurm --steps 1000.",
        "Add --partition and --account where your cluster wants them, and its longest --time.",
        "`python` is the one on the PATH at sbatch; load modules or the environment before.",
    ]
    return [*job.notes(), *notes]
