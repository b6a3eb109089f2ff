"""A training script from a plan: FSDP2, DTensor and torch.distributed.pipelining.

The pieces of text stand in `script_parts`; here they are chosen, so that a script holds only what
its plan needs. Nothing here imports torch: the script does.
"""

from __future__ import annotations

import json
import re
from textwrap import fill, indent

from utils.catalog import ModelShape
from utils.planner.cluster import Cluster
from utils.planner.export import script_parts as parts
from utils.planner.export.deepspeed import CLIP, LEARNING_RATE
from utils.planner.export.precision import convention_notes, precision
from utils.planner.export.script_imports import IMPORTS, PLAIN_IMPORTS
from utils.planner.layout import Batch, Plan
from utils.planner.stages import padded_vocabulary, stages


LINE = 100  # characters


def obstacle(model: ModelShape, plan: Plan, batch: Batch) -> str | None:
    """Why the course's `Transformer` cannot run this plan; None where it can."""
    reasons = [
        (model.family != "llama" or model.positions != "rotary",
         f"{model.name} is of the {model.family!r} family with {model.positions!r} positions; the "
         "course's Transformer is Llama-style."),
        (model.head_dim % 2 == 1,
         f"Rotary positions turn pairs of channels, and a head is {model.head_dim} wide."),
        (plan.lora is not None,
         "Adapters: the script trains every parameter. utils.techniques.add_lora makes them."),
        (plan.cp > 1,
         f"Context parallelism (cp {plan.cp}): the course's Transformer counts positions from 0 on "
         "every rank."),
        (model.key_value_heads % plan.tp > 0,
         f"tp {plan.tp} does not divide {model.key_value_heads} key-value heads; the script does "
         "not copy heads."),
        (plan.pp > 1 and model.tied,
         "Embedding and head are one matrix, and the script's stages share none."),
        (plan.pp > plan.micro_batches(batch),
         f"torch.distributed.pipelining needs a micro-batch for each of {plan.pp} stages; the plan "
         f"has {plan.micro_batches(batch)}."),
        (not all(stage.layers or stage.head for stage in stages(model, plan))
         or not stages(model, plan)[-1].head,
         f"partition={plan.partition!r} leaves a stage without parameters."),
    ]  # fmt: skip
    found = [text for applies, text in reasons if applies]
    return f"{' '.join(found)} Use the Megatron-LM arguments instead." if found else None


def layer_chunks(model: ModelShape, plan: Plan) -> list[tuple[int, int]]:
    """First layer, and the one after the last, of every chunk in the order that data passes."""
    if plan.virtual_stages > 1:
        size = model.layers // (plan.pp * plan.virtual_stages)
        counts = [size] * (plan.pp * plan.virtual_stages)
    else:
        counts = [stage.layers for stage in stages(model, plan)]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [(start, start + count) for start, count in zip(starts, counts, strict=True)]


def mesh_axes(plan: Plan) -> dict[str, int]:
    """Axes of the device mesh and their sizes, slowest first: tp stays inside a node.

    Without ZeRO every rank holds all, so that "shard" has size 1 and "replicate" the replicas.
    """
    shard = plan.shard_group if plan.zero_stage else 1
    axes = {"pp": plan.pp} if plan.pp > 1 else {}
    axes |= {"replicate": plan.dp // shard} if shard < plan.dp else {}
    return axes | {"shard": shard} | ({"tp": plan.tp} if plan.tp > 1 else {})


def training_script(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch
) -> str | None:
    """The text of train.py; None where there is an `obstacle`."""
    if obstacle(model, plan, batch):
        return None
    functions = [parts.START, parts.BATCH, *_model_functions(plan, cluster), parts.INITIALISE]
    functions += [parts.LOAD, parts.OPTIMIZER, _loss(plan), _step(plan), _main(plan)]
    body = "\n\n\n".join(text.strip("\n") for text in functions)
    head = _docstring(model, plan, batch)
    constants = _constants(model, cluster, plan, batch)
    return f"{head}\n\n{_imports(constants + body)}\n\n{constants}\n\n\n{body}\n\n\n{parts.RUN}"


def _docstring(model: ModelShape, plan: Plan, batch: Batch) -> str:
    layout = f"dp {plan.dp}, tp {plan.tp}, pp {plan.pp}, ZeRO-{plan.zero_stage}"
    return (
        f'"""Train {model.name} on {plan.ranks} GPUs: {layout}, recompute {plan.recompute}.\n\n'
        "Started by the torchrun line of the same export, with PYTHONPATH at the course's folder.\n"
        f"Global batch: {batch.sequences} sequences of {batch.sequence_length} tokens, "
        f'drawn at random.\n"""'
    )


def _imports(text: str) -> str:
    """The import lines whose names the text uses."""
    lines = []
    for module, names in IMPORTS.items():
        used = [name for name in names if re.search(rf"\b{name}\b", text)]
        line = f"from {module} import {', '.join(used)}"
        if len(line) > LINE:
            line = f"from {module} import (\n" + "".join(f"    {n},\n" for n in used) + ")"
        lines += [line] * bool(used)
    return f"{PLAIN_IMPORTS}\n" + "\n".join(lines)


def _constants(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> str:
    sizes = {
        "vocabulary": padded_vocabulary(model, plan), "hidden": model.hidden,
        "layers": model.layers, "heads": model.heads, "kv_heads": model.key_value_heads,
        "feedforward": model.feedforward, "tied": model.tied, "qkv_bias": model.qkv_bias,
    }  # fmt: skip
    config = "\n".join(f"    {name}={value}," for name, value in sizes.items())
    axes = mesh_axes(plan)
    lines = [f"CONFIG = TransformerConfig(\n{config}\n)", f"MESH = {json.dumps(axes)}  # axis: ranks"]
    data = [f'"{name}"' for name in axes if name in ("replicate", "shard")]
    lines.append(f"DATA = ({', '.join(data)}{',' * (len(data) == 1)})")
    if plan.pp > 1:
        chunks = fill(", ".join(map(str, layer_chunks(model, plan))), LINE - 4)
        lines += ["# Of each chunk of blocks: the first, and the one after the last.",
                  f"STAGES = [\n{indent(chunks, ' ' * 4)},\n]"]  # fmt: skip
    lines += [
        f"SEQUENCES, LENGTH = {batch.sequences}, {batch.sequence_length}",
        f"MICRO_BATCH, ACCUMULATE = {plan.micro_batch}, {plan.micro_batches(batch)}",
        f"LEARNING_RATE, CLIP = {LEARNING_RATE}, {CLIP}",
        f"DTYPE = torch.{'bfloat16' if precision(plan, cluster) == 'bf16' else 'float32'}",
    ]
    return "\n".join(lines) + (parts.LAYERS_SPLIT if plan.tp > 1 else "")


def _model_functions(plan: Plan, cluster: Cluster) -> list[str]:
    found = [parts.STAGE] if plan.pp > 1 else []
    if plan.tp > 1:
        found.append(parts.TENSOR_SEQUENCE if plan.sequence_parallel else parts.TENSOR)
    if plan.recompute == "full":
        found.append(parts.RECOMPUTE)
    return [*found, _shard(plan, cluster), _build(plan)]


def _shard(plan: Plan, cluster: Cluster) -> str:
    how = {"reshard_after_forward": str(plan.zero_stage == 3)}
    if precision(plan, cluster).endswith("mixed"):
        how["mp_policy"] = (
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    if plan.offload != "none":
        how["offload_policy"] = "CPUOffloadPolicy() if torch.cuda.is_available() else OffloadPolicy()"
    arguments = "".join(f'        "{name}": {value},\n' for name, value in how.items())
    return parts.SHARD.replace("HOW", arguments.rstrip("\n"))


def _build(plan: Plan) -> str:
    steps = ["split(part, mesh)"] * (plan.tp > 1)
    steps += ["recompute(part)"] * (plan.recompute == "full")
    steps += ["shard(part, mesh)"]
    whole = parts.PIPELINE_PARTS if plan.pp > 1 else parts.WHOLE_PARTS
    device = '"cpu" if torch.cuda.is_available() else device' if plan.offload != "none" else "device"
    text = parts.BUILD.replace("PARTS", whole).replace("HOME", device)
    return text.replace("STEPS", indent("\n".join(steps), " " * 8))


def _loss(plan: Plan) -> str:
    return parts.LOSS_SPLIT if plan.tp > 1 else parts.LOSS


def _step(plan: Plan) -> str:
    return _pipeline_step(plan) if plan.pp > 1 else _accumulated_step(plan)


def _main(plan: Plan) -> str:
    contexts = ["loss_parallel()"] * (plan.tp > 1)
    contexts += ["sdpa_kernel(SDPBackend.MATH)"] * _keeps_scores(plan)
    lines = "loss = passes(*batch(step, mesh, device))"
    if contexts:
        lines = f"with {', '.join(contexts)}:\n    {lines}"
    return parts.MAIN.replace("FORWARD", indent(lines, " " * 8))


def _keeps_scores(plan: Plan) -> bool:
    """Plain attention keeps all scores; recomputed selectively it is what the fused kernel does."""
    return plan.attention == "unfused" and plan.recompute != "selective"


def _pipeline_step(plan: Plan) -> str:
    if plan.virtual_stages > 1:
        schedule, given = "ScheduleInterleaved1F1B", "stages"
    else:
        schedule = "ScheduleGPipe" if plan.schedule == "gpipe" else "Schedule1F1B"
        given = "stages[0]"
    return parts.PIPELINE_STEP.replace("SCHEDULE", schedule).replace("GIVEN", given)


def _accumulated_step(plan: Plan) -> str:
    lines = []
    if plan.zero_stage <= 1:
        lines.append("model.set_requires_gradient_sync(last)  # reduced once a step")
        lines.append("model.set_reshard_after_backward(last)")
    elif len([name for name in mesh_axes(plan) if name in ("replicate", "shard")]) == 2:
        lines.append("model.set_requires_all_reduce(last)  # between groups once a step")
    text = indent("\n".join(lines), " " * 12)
    return parts.STEP.replace("SYNC\n", f"{text}\n" if lines else "")


def script_notes(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> list[str]:
    """What the script does otherwise than the plan says, or why there is none."""
    reason = obstacle(model, plan, batch)
    if reason:
        return [f"No script: {reason}"]
    notes = ["The batches are random tokens and the learning rate is constant: put in your own."]
    notes += [text for applies, text in _said_otherwise(model, cluster, plan) if applies]
    return notes + convention_notes("python", plan)


def _said_otherwise(model: ModelShape, cluster: Cluster, plan: Plan) -> list[tuple[bool, str]]:
    kind, padded = precision(plan, cluster), padded_vocabulary(model, plan)
    return [
        (kind == "fp16-mixed",
         "The script computes in bfloat16 instead of float16, which would need loss scaling."),
        (kind == "bf16-mixed" or kind == "fp16-mixed",
         "The float32 shards of FSDP2 are parameters and masters in one."),
        (padded != model.vocabulary,
         f"The vocabulary is padded from {model.vocabulary} to {padded} rows."),
        (plan.zero_stage in (1, 2),
         "FSDP2 gives up the whole parameters after the step's last backward pass and gathers them "
         "again in the next step."),
        (plan.pp > 1 and plan.zero_stage >= 2,
         "The pipeline reduces gradients once a step, so they stay whole until then."),
        (plan.recompute == "selective",
         "PyTorch's fused attention keeps no scores, so selective recomputation has nothing to do."),
        (plan.dropout, "The course's Transformer has no dropout."),
        (plan.offload == "optimizer",
         "FSDP2 offloads optimizer state, gradients and parameters together or not at all; the "
         "script offloads them all."),
    ]  # fmt: skip
