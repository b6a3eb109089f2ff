"""Every target of an exported plan says the same world, and the same batch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from export_cases import CASES, DEEP, HALF, MIXED, TIED, TINY, tiny
from export_checks import KNOWN, check_consistent, options
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.validation.tables import source, table
from utils import export as top_level
from utils.catalog import model_shape
from utils.planner import (
    Batch,
    Cluster,
    Lora,
    Plan,
    SearchSpace,
    candidates,
    export,
)
from utils.planner.exporters.deepspeed import learning_rate
from utils.planner.exporters.script import chunk_blocks

SPACES = [
    SearchSpace(cp=(1, 2), shard_stages=True),
    SearchSpace(attention="unfused", framework="megatron-deepspeed-fp16"),
    SearchSpace(framework="fsdp", offload=("none", "optimizer", "parameters"), shard_stages=True),
    SearchSpace(framework="bf16"),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_valid_plan_is_exported_consistently(data):
    layers = data.draw(st.sampled_from([4, 6]))
    model = replace(data.draw(st.sampled_from([TINY, TIED])), layers=layers)
    nodes, per_node = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 2)]))
    cluster = Cluster(
        gpu=data.draw(st.sampled_from(["A100-80GB", "V100-32GB"])),
        nodes=nodes,
        gpus_per_node=per_node,
    )
    batch = Batch(sequences=data.draw(st.sampled_from([8, 24])), sequence_length=32)
    space = data.draw(st.sampled_from(SPACES))
    plans = list(candidates(model, cluster, batch, space))
    plan = data.draw(st.sampled_from(plans))
    if plan.pp > 1 and plan.virtual_stages == 1:
        plan = replace(plan, schedule=data.draw(st.sampled_from(["1f1b", "gpipe"])))
    check_consistent(export(model, cluster, plan, batch))


@pytest.mark.parametrize("partition", ["even", "ends", "compute"])
def test_uneven_stages_reach_every_target(partition):
    found = tiny(replace(TINY, layers=7), pp=4, partition=partition)
    check_consistent(found)
    assert "--pipeline-model-parallel-layout" in found.megatron


@pytest.mark.parametrize("found", [*CASES.values(), MIXED, HALF])
def test_the_tiny_cases_are_consistent(found):
    assert found.python is not None
    check_consistent(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_stage_reads_back(stage):
    found = tiny(dp=4, zero_stage=stage, framework="megatron")
    assert found.deepspeed["zero_optimization"]["stage"] == stage
    read = options(found)
    assert ("--use-distributed-optimizer" in read) == (stage >= 1)
    strategy = {2: "optim_grads", 3: "optim_grads_params"}.get(stage)
    assert read.get("--data-parallel-sharding-strategy") == strategy
    assert found.plan.dims.mesh == ({"shard": 4} if stage else {"replicate": 4, "shard": 1})
    assert found.python.count(f"zero_stage={stage}") == 2


def test_hsdp_shards_inside_groups():
    found = tiny(dp=4, zero_stage=3, shard_ranks=2)
    assert found.plan.dims.mesh == {"replicate": 2, "shard": 2}
    assert options(found)["--num-distributed-optimizer-instances"] == "2"
    assert any("HSDP" in note for note in found.notes["deepspeed"])


def test_tensor_parallel_ranks_are_neighbours():
    found = tiny(tp=2, pp=2)
    assert found.plan.dims.group(0, "tp") == (0, 1)
    assert "DIMS = ParallelDims(pp=2, tp=2)" in found.python


def test_interleaved_chunks_alternate_between_ranks():
    plan = Plan(pp=2, virtual_stages=2)
    assert chunk_blocks(DEEP, plan) == [1, 1, 1, 1]
    assert 'SCHEDULE = "Interleaved1F1B"' in tiny(DEEP, pp=2, dp=2, virtual_stages=2).python


@pytest.mark.parametrize(
    ("framework", "gpu", "key", "flag"),
    [
        ("fp32", "A100-80GB", None, None),
        ("bf16", "A100-80GB", "bf16", "--bf16"),
        ("fsdp", "A100-80GB", "bf16", "--bf16"),
        ("megatron", "V100-32GB", "fp16", "--fp16"),
        ("megatron-deepspeed-fp16", "A100-80GB", "fp16", "--fp16"),
    ],
)
def test_precision_is_the_frameworks_and_the_devices(framework, gpu, key, flag):
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=4)
    plan = Plan(dp=4, zero_stage=1, framework=framework)
    found = export(TINY, cluster, plan, Batch(sequences=8, sequence_length=16))
    assert [name for name in ("bf16", "fp16") if name in found.deepspeed] == [key] * bool(key)
    assert [name for name in ("--bf16", "--fp16") if name in found.megatron] == [flag] * bool(flag)
    assert ("mixed=True" in found.python) == (framework not in ("fp32", "bf16"))
    assert any("float16" in note for note in found.notes["python"]) == (key == "fp16")


SAID = [
    ({"tp": 2, "dp": 2}, "deepspeed", "Tensor parallelism (tp 2)"),
    ({"cp": 2, "dp": 2}, "deepspeed", "Context parallelism (cp 2)"),
    ({"cp": 4, "gpus": 16, "dp": 4, "sequence_length": 20}, "python", "do not divide into 8"),
    ({"cp": 4, "zero_stage": 1, "shard_ranks": 2}, "python", "whole groups of cp 4"),
    ({"pp": 2, "dp": 2, "virtual_stages": 2}, "deepspeed", "does not interleave"),
    ({"pp": 2, "dp": 2, "zero_stage": 2}, "deepspeed", "refuses ZeRO-2"),
    ({"pp": 2, "dp": 2, "zero_stage": 2}, "python", "once a step"),
    ({"pp": 4, "schedule": "gpipe"}, "megatron", "gpipe schedule is lost"),
    ({"pp": 4, "micro_batch": 8}, "python", "a micro-batch for each of 4 stages"),
    ({"dp": 4, "recompute": "selective"}, "deepspeed", "recompute='selective'"),
    ({"dp": 4, "recompute": "selective"}, "python", "nothing to do"),
    ({"dp": 4, "offload": "optimizer"}, "deepspeed", "so the JSON has stage 1"),
    ({"dp": 4, "offload": "optimizer"}, "python", "offloads them all"),
    ({"dp": 4, "zero_stage": 3, "offload": "parameters"}, "megatron", "parameters stay"),
    ({"dp": 4, "dropout": True}, "python", "no dropout"),
    ({"dp": 4, "lora": Lora()}, "megatron", "trains every parameter"),
    ({"dp": 4, "lora": Lora()}, "python", "add_lora"),
    ({"dp": 4, "framework": "megatron"}, "deepspeed", "framework='deepspeed'"),
    ({"tp": 4}, "python", "does not divide 2 key-value heads"),
]


@pytest.mark.parametrize(("plan", "target", "text"), SAID)
def test_what_a_target_cannot_say_is_in_its_notes(plan, target, text):
    assert text in " ".join(tiny(DEEP, **plan).notes[target])


def test_a_plan_that_a_target_says_in_full_has_no_note_on_it():
    found = tiny(dp=4, zero_stage=3, framework="deepspeed")
    assert found.notes["deepspeed"] == ()


REFUSED = [
    {"pp": 2, "dp": 2, "zero_stage": 2},
    {"pp": 2, "dp": 2, "virtual_stages": 2},
    {"cp": 2, "dp": 2},
]


@pytest.mark.parametrize("plan", REFUSED)
def test_deepspeed_gets_no_file_for_a_plan_that_it_does_not_run(plan, tmp_path):
    found = tiny(DEEP, **plan)
    assert found.deepspeed is None
    assert "No ds_config.json" in found.notes["deepspeed"][0]
    assert "ds_config.json" not in {path.name for path in found.write(tmp_path)}


def test_megatron_is_told_where_to_save_and_how_fast_to_learn():
    small, large = tiny(dp=4), model_shape("megatron-175b")
    read = options(small)
    assert read["--save"] == read["--load"] == "checkpoints"
    assert int(read["--save-interval"]) >= 1
    assert (learning_rate(large), learning_rate(TINY)) == (6e-5, 6e-4)
    assert any("arXiv:2005.14165" in note for note in small.notes["megatron"])


def test_experts_and_fp8_reach_megatron():
    model, cluster = model_shape("mixtral-8x7b"), Cluster(gpu="H100", nodes=2)
    plan = Plan(
        dp=4,
        tp=2,
        pp=2,
        ep=4,
        expert_tp=1,
        sequence_parallel=True,
        zero_stage=1,
        precision="fp8",
        recompute="full",
        recompute_layers=2,
    )
    found = export(model, cluster, plan, Batch(sequences=64, sequence_length=4096))
    read = options(found)
    assert (read["--num-experts"], read["--expert-model-parallel-size"]) == ("8", "4")
    assert (read["--fp8-recipe"], read["--recompute-method"]) == ("tensorwise", "block")
    assert set(read) <= set(KNOWN), set(read) - set(KNOWN)
    assert found.python is None and found.deepspeed is None
    assert "--fp8-param-gather" in read and "--grad-reduce-in-bf16" not in read


def test_what_nvidia_runs_in_mxfp8_reaches_megatron():
    plan = Plan(
        dp=8,
        tp=2,
        sequence_parallel=True,
        zero_stage=1,
        precision="mxfp8",
        loss="fused",
        framework="megatron-bridge",
    )
    found = export(
        model_shape("llama-2-7b"),
        Cluster(gpu="B200", nodes=2),
        plan,
        Batch(sequences=64, sequence_length=4096),
    )
    read = options(found)
    assert (
        {"--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag", "--grad-reduce-in-bf16"}
        <= set(read)
        <= set(KNOWN)
    )
    assert not [note for note in found.notes if "megatron-bridge" in note]
    plain = options(
        export(
            model_shape("llama-2-7b"),
            Cluster(gpu="B200", nodes=2),
            replace(plan, zero_stage=0),
            Batch(sequences=64, sequence_length=4096),
        )
    )
    assert "--fp8-param-gather" not in plain


def test_a_gpt_goes_to_megatron():
    cluster = Cluster(gpu="A100-80GB", nodes=128)
    plan = Plan(dp=16, tp=8, pp=8, virtual_stages=3, sequence_parallel=True, recompute="full")
    batch = Batch(sequences=1536, sequence_length=2048)
    found = export(model_shape("megatron-175b"), cluster, plan, batch)
    assert found.python is None
    assert "pretrain_gpt.py --num-layers 96" in found.torchrun
    assert '"$HEAD_NODE:29500"' in found.torchrun
    assert found.torchrun.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ")
    assert any("HEAD_NODE" in note for note in found.notes["torchrun"])
    check_consistent(found)


def test_write_gives_the_files_that_run(tmp_path):
    found = tiny(dp=2, pp=2, partition="ends", framework="megatron")
    names = ["launch.sh", "ds_config.json", "train.py", "megatron.sh", "notes.md"]
    folder = tmp_path / "new"
    paths = [path.relative_to(folder).as_posix() for path in found.write(folder)]
    assert paths == [*names, *found.launchers.files, *found.modules]
    assert all(Path(folder, path).is_file() for path in paths)
    assert json.loads((folder / "ds_config.json").read_text()) == found.deepspeed
    assert (folder / "train.py").read_text() == found.python
    command = (folder / "megatron.sh").read_text().split("\n", 2)[2]
    assert (
        tuple(shlex.split(command.replace("\\\n", " "))[-len(found.megatron) :]) == found.megatron
    )
    for note in sum(found.notes.values(), ()):
        assert note in (folder / "notes.md").read_text()


def test_write_leaves_out_what_there_is_not(tmp_path):
    found = tiny(dp=4, lora=Lora())
    assert {path.name for path in found.write(tmp_path)} == {
        "launch.sh",
        "ds_config.json",
        "notes.md",
    }


def test_export_needs_no_torch():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from utils import Batch, Cluster, Plan, export, model_shape\n"
        "export(model_shape('llama-2-7b'), Cluster(gpu='A100-80GB', nodes=1), Plan(dp=8),\n"
        "       Batch(sequences=8, sequence_length=4096))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert top_level is export


def test_the_list_of_names_says_where_it_is_from():
    assert re.search(r"arguments.py @[0-9a-f]{40}", source("megatron_arguments"))
    assert len(KNOWN) == len(table("megatron_arguments")) > 500
