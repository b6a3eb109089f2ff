"""What every target of an exported plan must say: the same world, and the same batch."""

from __future__ import annotations

import ast
import json
import re
import shlex

from evidence.validation.tables import table
from utils.parallel import ParallelDims
from utils.planner import (
    Export,
)

KNOWN = {row["name"]: row for row in table("megatron_arguments")}


def options(found: Export) -> dict[str, str]:
    """Megatron-LM's arguments, read back: the value of each, "" for a flag."""
    read: dict[str, str] = {}
    for token in found.megatron or ():
        if token.startswith("--"):
            name = token
            read[name] = ""
        else:
            read[name] = token
    return read


def launched(found: Export) -> int:
    """Processes that the torchrun line starts."""
    words = shlex.split(found.torchrun)
    sizes = dict(
        word.lstrip("-").split("=") for word in words if re.match(r"--n(nodes|proc)", word)
    )
    return int(sizes["nnodes"]) * int(sizes["nproc-per-node"])


def constants(found: Export) -> dict[str, object]:
    """The values at the top of the script, calls as the arguments that they are given."""
    values: dict[str, object] = {}
    for node in ast.parse(found.python or "").body:
        if isinstance(node, ast.Assign):
            text = ast.unparse(node.value).replace("TransformerConfig(", "dict(")
            value = eval(text, {"ParallelDims": ParallelDims})
            target = node.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            many = value if isinstance(target, ast.Tuple) else [value]
            values |= {ast.unparse(n): v for n, v in zip(names, many, strict=True)}
    return values


def check_consistent(found: Export) -> None:
    """World size and global batch, read from each target."""
    assert launched(found) == found.cluster.gpus
    check_deepspeed(found)
    schedulers = {"slurm", "kubernetes", "ray", "skypilot"}
    assert set(found.notes) == {"torchrun", "deepspeed", "python", "megatron", *schedulers}
    check_megatron(found)
    if found.python is None:
        assert found.notes["python"][0].startswith("No script: ")
        return
    check_script(found)


def check_deepspeed(found: Export) -> None:
    """Sizes that multiply out, or no file at all and a note that says why."""
    plan, read = found.plan, found.deepspeed
    if read is None:
        assert plan.cp > 1 or plan.pp > 1 or plan.precision != "bf16"
        assert found.notes["deepspeed"][0].startswith("No ds_config.json")
        return
    assert "overlap_comm" not in read["zero_optimization"], "DeepSpeed has its own default"
    micro, steps = read["train_micro_batch_size_per_gpu"], read["gradient_accumulation_steps"]
    assert read["train_batch_size"] == micro * steps * plan.dp == found.batch.sequences
    assert json.loads(json.dumps(read)) == read


def check_script(found: Export) -> None:
    """What train.py holds is the plan."""
    assert found.python is not None
    plan, gpus, sequences = found.plan, found.cluster.gpus, found.batch.sequences
    values = constants(found)
    dims = values["DIMS"]
    assert dims == plan.dims
    assert (dims.ranks, dims.data_ranks) == (gpus, plan.dp)
    assert values["SEQUENCES"] == sequences
    if plan.pp > 1:
        assert values["MICRO_BATCHES"] == plan.micro_batches(found.batch)
        assert sum(values["BLOCKS"]) == found.model.layers
        assert len(values["BLOCKS"]) == plan.pp * plan.virtual_stages
    assert values["MICRO_BATCH"] == plan.micro_batch
    lines = found.python.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 60
    # Each axis is there where the plan uses it, and nowhere else.
    for name, size in (("pipeline", plan.pp), ("tensor", plan.tp), ("context", plan.cp)):
        assert (f"utils/parallel/{name}.py" in found.modules) == (size > 1)


def check_megatron(found: Export) -> None:
    """Known names, values where they belong, and a layout that multiplies out."""
    read, plan = options(found), found.plan
    for name, value in read.items():
        assert name in KNOWN, name
        assert (value != "") == (KNOWN[name]["value"] == "1"), name
        choices = KNOWN[name]["choices"].replace("AttnBackend.", "").split("|")
        assert choices == [""] or value in choices
    shape = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    ranks = plan.dp
    for axis in shape:
        ranks *= int(read[f"--{axis}-size"])
    assert ranks == found.cluster.gpus
    assert int(read["--global-batch-size"]) == found.batch.sequences
    assert found.batch.sequences % (int(read["--micro-batch-size"]) * plan.dp) == 0
    layout = read.get("--pipeline-model-parallel-layout")
    if layout:
        layers = [sum(map(int, re.findall(r"t\*(\d+)", stage))) for stage in layout.split("|")]
        assert (len(layers), sum(layers)) == (plan.pp, found.model.layers)
        assert layout.startswith("E")
        assert layout.endswith("L")
