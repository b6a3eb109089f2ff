"""`export`: what runs a plan, for all its targets at once."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.catalog import ModelShape
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.exporters.deepspeed import deepspeed_config, deepspeed_notes
from utils.planner.exporters.launch import torchrun, torchrun_notes
from utils.planner.exporters.launchers import Launchers, launchers
from utils.planner.exporters.megatron import connections, megatron_arguments, megatron_notes
from utils.planner.exporters.modules import modules
from utils.planner.exporters.script import script_notes, training_script
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext

MEGATRON_SCRIPT = "pretrain_gpt.py"


@dataclass(frozen=True)
class Export:
    """One plan, as its targets take it.

    Attributes:
        model, cluster, plan, batch: What was asked.
        torchrun: The command line that starts all ranks of `python`, or of Megatron-LM's script
            where there is no `python`.
        deepspeed: DeepSpeed's configuration; None where it does not run the plan.
        python: A training script with FSDP2 and DTensor for the course's `Transformer`; None where
            that model cannot run the plan, and the notes say why.
        modules: What the script imports, by path beside it: the course's own files, so that the
            folder runs where the course is not installed.
        megatron: Arguments of Megatron-LM's pretrain_gpt.py; None for adapters.
        launchers: The files that schedulers take, by name: job.slurm, kubernetes.yaml,
            trainjob.yaml, ray_train.py, skypilot.yaml, Dockerfile, requirements.txt.
        notes: For each target, what it cannot say, or says otherwise than the plan.
    """

    model: ModelShape
    cluster: Cluster
    plan: Plan
    batch: Batch
    torchrun: str
    deepspeed: dict[str, Any] | None
    python: str | None
    modules: dict[str, str]
    megatron: tuple[str, ...] | None
    launchers: Launchers
    notes: dict[str, tuple[str, ...]]

    def write(self, folder: Path | str) -> list[Path]:
        """Write launch.sh, ds_config.json, train.py, megatron.sh, notes.md, `launchers` and modules.

        Returns:
            The files written; those that the plan does not have are left out.
        """
        folder = Path(folder)
        texts = {
            "launch.sh": f"#!/bin/sh\n{self.torchrun}\n",
            "ds_config.json": self._deepspeed_text(),
            "train.py": self.python,
            "megatron.sh": self._megatron_script(),
            "notes.md": self._notes_text(),
            **self.launchers.files,
            **self.modules,
        }
        written = []
        for name, text in texts.items():
            if text is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
                written.append(folder / name)
        return written

    @property
    def slurm(self) -> str | None:
        """The text of job.slurm; None where there is no script to start."""
        return self.launchers.files.get("job.slurm")

    @property
    def kubernetes(self) -> str | None:
        """The text of kubernetes.yaml: built-in kinds alone. Kubeflow's is trainjob.yaml."""
        return self.launchers.files.get("kubernetes.yaml")

    @property
    def ray(self) -> str | None:
        """The text of ray_train.py; None where there is no train.py."""
        return self.launchers.files.get("ray_train.py")

    @property
    def skypilot(self) -> str | None:
        """The text of skypilot.yaml."""
        return self.launchers.files.get("skypilot.yaml")

    def _deepspeed_text(self) -> str | None:
        return None if self.deepspeed is None else json.dumps(self.deepspeed, indent=2) + "\n"

    def _megatron_script(self) -> str | None:
        if self.megatron is None:
            return None
        lines = _lines(self.megatron)
        command = torchrun(self.cluster, MEGATRON_SCRIPT)
        variable = f"export CUDA_DEVICE_MAX_CONNECTIONS={connections(self.plan)}"
        return "\n".join(["#!/bin/sh", variable, " \\\n  ".join([command, *lines]), ""])

    def _notes_text(self) -> str:
        sections = [
            f"## {target}\n\n" + "\n".join(f"- {note}" for note in notes)
            for target, notes in self.notes.items()
            if notes
        ]
        return "\n\n".join(["# What the targets say otherwise", *sections]) + "\n"


def _lines(arguments: tuple[str, ...]) -> list[str]:
    """One option with its value a line."""
    lines: list[str] = []
    for token in map(shlex.quote, arguments):
        if token.startswith("--"):
            lines.append(token)
        else:
            lines[-1] += f" {token}"
    return lines


def export(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch, *, name: str | None = None
) -> Export:
    """Write a plan down as a torchrun command, DeepSpeed JSON, Python and Megatron-LM arguments.

    Beside them stand the files of schedulers, which start the same script.

    What a target cannot express stands in `Export.notes`; nothing is dropped silently.

    Args:
        model: What is trained.
        cluster: On what.
        plan: Its layout, such as `search(...).best.plan`.
        batch: The global batch of one optimizer step.
        name: What schedulers call the job; the model's where nothing is given.

    Raises:
        ValueError: plan, model, batch and cluster do not go together; the sentence has the rule,
            the numbers and the nearest valid choice.
    """
    context = ClusterPlanContext(model, plan, batch, cluster)
    context.check()
    arguments, python = megatron_arguments(context), training_script(context)
    script, command = "train.py", torchrun(cluster, "train.py")
    if python is None and arguments is not None:
        variable = f"CUDA_DEVICE_MAX_CONNECTIONS={connections(plan)}"
        script = MEGATRON_SCRIPT
        command = f"{variable} {torchrun(cluster, MEGATRON_SCRIPT, arguments)}"
    notes = {
        "torchrun": torchrun_notes(cluster, script),
        "deepspeed": deepspeed_notes(plan),
        "python": script_notes(context),
        "megatron": megatron_notes(context),
    }
    starts = launchers(
        model,
        cluster,
        None if python is None and arguments is None else script,
        (python is None and arguments) or (),
        connections(plan),
        name,
    )
    notes |= starts.notes
    return Export(
        model,
        cluster,
        plan,
        batch,
        command,
        deepspeed_config(context),
        python,
        modules(python) if python else {},
        arguments,
        starts,
        {target: tuple(texts) for target, texts in notes.items()},
    )
