"""train.py of a plan: which parts of `utils.parallel` it puts together, and with which settings.

The script and the modules that it imports run without the course; `modules` collects them. Nothing
here imports torch: the script does.
"""

from __future__ import annotations

import re
from itertools import groupby
from textwrap import fill, indent

from utils import parallel
from utils.catalog import ModelShape
from utils.checked import short
from utils.planner.cluster import Cluster
from utils.planner.exporters.deepspeed import CLIP, learning_rate
from utils.planner.exporters.precision import convention_notes, precision
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext, PlanContext
from utils.planner.stages import stages

LINE = 100  # characters

SCRIPT = '''\
"""Train {name} on {ranks} GPUs: {dims}, ZeRO-{zero}, recompute {recompute}.

Needs this folder and PyTorch; started by any launcher of the same export.
"""

import torch
{imports}

{constants}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all ranks, (SEQUENCES, LENGTH); -100 is no target. Put in your data."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocabulary, (SEQUENCES, LENGTH + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def train(device: torch.device, steps: int, weights=None, folder=None, every=0) -> list[float]:
    """Train on this rank; the loss of each step, over the global batch. Saves lie in `folder`."""
{body}


if __name__ == "__main__":
    run(train)
'''


def obstacle(context: PlanContext) -> str | None:
    """Why the course's `Transformer` cannot run this plan; None where it can."""
    model, plan, length = context.model, context.plan, context.batch.sequence_length
    reasons = [
        (model.family != "llama" or model.positions != "rotary",
         f"{model.name} is of the {model.family!r} family with {model.positions!r} positions; the "
         "course's Transformer is Llama-style."),
        (model.attention_width != model.hidden or model.qk_norm,
         f"Heads of {model.head_dim} are not {model.hidden} wide together, or have norms of their own."),
        (model.head_dim % 2 == 1,
         f"Rotary positions turn pairs of channels, and a head is {model.head_dim} wide."),
        (model.num_experts is not None, "The course's Transformer has no experts."),
        (plan.precision != "bf16", f"The script has no products in {plan.precision}."),
        (plan.offload_activations or plan.optimizer_in_backward or plan.recompute_layers is not None,
         "The script neither offloads activations, nor steps in backward, nor recomputes some blocks."),
        (plan.lora is not None,
         "Adapters: the script trains every parameter. utils.techniques.add_lora makes them."),
        (plan.cp > 1 and length % (2 * plan.cp) > 0,
         f"Context parallelism gives each of {plan.cp} ranks two pieces of a sequence, and "
         f"{length} tokens do not divide into {2 * plan.cp}."),
        (plan.cp > 1 and plan.zero_stage > 0 and plan.shard_group % plan.cp > 0,
         f"The script shards over whole groups of cp {plan.cp}, not over {plan.shard_group} ranks."),
        (model.key_value_heads % plan.tp > 0,
         f"tp {plan.tp} does not divide {model.key_value_heads} key-value heads; the script does "
         "not copy heads."),
        (plan.pp > 1 and model.tied,
         "Embedding and head are one matrix, and the script's stages share none."),
        (plan.pp > context.micro_batches,
         f"torch.distributed.pipelining needs a micro-batch for each of {plan.pp} stages; the plan "
         f"has {context.micro_batches}."),
        (not all(stage.layers or stage.head for stage in context.stages)
         or not context.stages[-1].head,
         f"partition={plan.partition!r} leaves a stage without parameters."),
    ]  # fmt: skip
    found = [text for applies, text in reasons if applies]
    return f"{' '.join(found)} Use the Megatron-LM arguments instead." if found else None


def chunk_blocks(model: ModelShape, plan: Plan) -> list[int]:
    """Blocks of every chunk, in the order that data passes them."""
    if plan.virtual_stages == 1:
        return [stage.layers for stage in stages(model, plan)]
    chunks = plan.pp * plan.virtual_stages
    return [model.layers // chunks] * chunks


def training_script(context: ClusterPlanContext) -> str | None:
    """The text of train.py; None where there is an `obstacle`."""
    if obstacle(context):
        return None
    plan = context.plan
    constants, body = _constants(context), indent("\n".join(_body(context.cluster, plan)), " " * 4)
    return SCRIPT.format(
        name=_in_docstring(context.model.name), ranks=plan.ranks, dims=plan.dims, zero=plan.zero_stage,
        recompute=plan.recompute, imports=_imports(constants + body), constants=constants, body=body,
    )  # fmt: skip


def _in_docstring(text: str) -> str:
    """A learner's own text, as inside of a double-quoted literal: it can end nothing and add nothing."""
    return ascii(text)[1:-1].replace('"', '\\"')


def _imports(text: str) -> str:
    """The course's names that the text uses, from where they are."""
    used = [name for name in sorted(parallel.__all__) if re.search(rf"\b{name}\(", f"{text} run(")]
    line = f"from utils.parallel import {', '.join(used)}"
    if len(line) > LINE:
        names = fill(", ".join(used) + ",", LINE, initial_indent=" " * 4, subsequent_indent=" " * 4)
        line = f"from utils.parallel import (\n{names}\n)"
    models = [f"from utils.models.{home} import {name}" for home, name in
              (("config", "TransformerConfig"), ("transformer", "Transformer"))]  # fmt: skip
    return "\n".join(["", *models, line])


def _constants(context: PlanContext) -> str:
    model, plan, batch = context.model, context.plan, context.batch
    sizes = {
        "vocabulary": context.vocabulary, "hidden": model.hidden,
        "layers": model.layers, "heads": model.heads, "kv_heads": model.key_value_heads,
        "feedforward": model.feedforward, "tied": model.tied, "qkv_bias": model.qkv_bias,
    }  # fmt: skip
    config = _filled(", ".join(f"{name}={_number(name, n)}" for name, n in sizes.items()) + ",")
    axes = ", ".join(f"{axis}={n}" for axis, n in plan.dims.sizes.items() if n > 1)
    numbers = {"SEQUENCES": batch.sequences, "LENGTH": batch.sequence_length,
               "MICRO_BATCH": plan.micro_batch}  # fmt: skip
    numbers |= {"MICRO_BATCHES": context.micro_batches} if plan.pp > 1 else {}
    lines = [f"CONFIG = TransformerConfig(\n{config}\n)", f"DIMS = ParallelDims({axes})"]
    lines += _pipeline_constants(model, plan) if plan.pp > 1 else []
    lines += [
        f"{', '.join(numbers)} = {', '.join(_number(name, n) for name, n in numbers.items())}",
        f"LEARNING_RATE, CLIP = {learning_rate(model)}, {CLIP}",
    ]
    return "\n".join(lines)


def _number(name: str, value: object) -> str:
    """A number or truth value as Python writes it, and nothing else: the script is run.

    Raises:
        ValueError: it is of another type.
    """
    if type(value) not in (int, bool):
        raise ValueError(f"export: {name} is {short(value)}; a script takes plain numbers alone.")
    return repr(value)


def _pipeline_constants(model: ModelShape, plan: Plan) -> list[str]:
    schedule = {"gpipe": "GPipe", "1f1b": "1F1B"}[plan.schedule]
    runs = ((n, len(list(alike))) for n, alike in groupby(chunk_blocks(model, plan)))
    blocks = " + ".join(f"({n},)" + f" * {times}" * (times > 1) for n, times in runs)
    return [
        f'SCHEDULE = "{"Interleaved" if plan.virtual_stages > 1 else ""}{schedule}"',
        f"BLOCKS = {blocks}  # of each chunk, in the order that data passes them",
    ]


def _filled(text: str) -> str:
    return fill(text, LINE, initial_indent=" " * 4, subsequent_indent=" " * 4)


def _body(cluster: Cluster, plan: Plan) -> list[str]:
    """The lines of `train`, one for each choice of the plan."""
    kind = precision(plan, cluster)
    half = ".to(torch.bfloat16)" if kind == "bf16" else ""
    return [
        *_mesh(plan),
        "positions = local_positions(DIMS, torch.distributed.get_rank(), LENGTH).to(device)",
        *_parts(plan, f"Transformer(CONFIG){half}"),
        "for part in parts:",
        *(f"    {line}" for line in _on_parts(cluster, plan)),
        f"materialise(parts, mesh, {_home(plan)}, weights)",
        *_passes(plan, "float32" if kind == "fp32" else "bfloat16"),
        "saves = Saves(folder, parts, adamw(parts, LEARNING_RATE), every)",
        "batches = local_batches(batch, steps, DIMS, positions, saves.first)",
        "losses = train_steps(batches, passes, saves.optimizer, mesh, limit=CLIP)",
        "return report(saves.kept(losses), saves.first)",
    ]


def _mesh(plan: Plan) -> list[str]:
    if plan.cp == 1:
        return ["mesh = device_mesh(DIMS, device)"]
    axis = "shard" if plan.zero_stage else "replicate"
    return [
        f'mesh = device_mesh(DIMS.with_cp_in("{axis}"), device)',
        'context = device_mesh(DIMS, device)["cp"]',
    ]


def _parts(plan: Plan, model: str) -> list[str]:
    if plan.pp == 1:
        return ['with torch.device("meta"):', f"    parts = [{model}]"]
    return [
        'held = chunks_of(SCHEDULE, mesh.get_local_rank("pp"), DIMS.pp, len(BLOCKS))',
        'with torch.device("meta"):',
        f"    parts = [keep_chunk({model}, BLOCKS, own) for own in held]",
    ]


def _on_parts(cluster: Cluster, plan: Plan) -> list[str]:
    """What is done to each part, in the order that it must be."""
    sequence = ", sequence=True" if plan.sequence_parallel else ""
    settings = [f"zero_stage={plan.zero_stage}"]
    settings += ["mixed=True"] * precision(plan, cluster).endswith("mixed")
    settings += ["offload=True"] * (plan.offload != "none")
    steps = [
        (plan.cp > 1, "apply_cp(part, context)"),
        (_keeps_scores(plan), "keep_scores(part)"),
        (plan.tp > 1, f'apply_tp(part, mesh["tp"]{sequence})'),
        (plan.recompute == "full", "recompute(part)"),
        (True, f"apply_fsdp(part, mesh, {', '.join(settings)})"),
    ]
    return [line for applies, line in steps if applies]


def _home(plan: Plan) -> str:
    return 'torch.device("cpu")' if plan.offload != "none" else "device"


def _passes(plan: Plan, dtype: str) -> list[str]:
    if plan.pp == 1:
        return [
            f"reduces = reduce_on_last_micro_batch(mesh, zero_stage={plan.zero_stage})",
            "passes = accumulated_passes(parts[0], MICRO_BATCH, positions, reduces)",
        ]
    length = "len(positions) // DIMS.tp" if plan.sequence_parallel else "len(positions)"
    return [
        f"shape = (MICRO_BATCH, {length}, CONFIG.hidden)",
        f'stream = torch.empty(shape, dtype=torch.{dtype}, device="meta")',
        "passes = pipeline_passes(parts, mesh, positions, stream, chunks=len(BLOCKS),",
        "                         schedule=SCHEDULE, micro_batches=MICRO_BATCHES)",
    ]


def _keeps_scores(plan: Plan) -> bool:
    """Plain attention keeps all scores; recomputed selectively it is what the fused kernel does."""
    return plan.attention == "unfused" and plan.recompute != "selective"


def script_notes(context: ClusterPlanContext) -> list[str]:
    """What the script does otherwise than the plan says, or why there is none."""
    reason = obstacle(context)
    if reason:
        return [f"No script: {reason}"]
    notes = ["The batches are random tokens and the learning rate is constant: put in your own."]
    notes += [text for applies, text in _said_otherwise(context) if applies]
    return notes + convention_notes("python", context.plan)


def _said_otherwise(context: ClusterPlanContext) -> list[tuple[bool, str]]:
    plan, vocabulary = context.plan, context.model.vocabulary
    kind, padded = precision(plan, context.cluster), context.vocabulary
    return [
        (kind == "fp16-mixed",
         "The script computes in bfloat16 instead of float16, which would need loss scaling."),
        (kind == "bf16-mixed" or kind == "fp16-mixed",
         "The float32 shards of FSDP2 are parameters and masters in one."),
        (padded != vocabulary,
         f"The vocabulary is padded from {vocabulary} to {padded} rows."),
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
