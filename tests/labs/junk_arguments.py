"""Junk for an argument, and values that fit: what `junk_cases` calls each public function with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import nn

JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "5": lambda: 5, "-1": lambda: -1, "0": lambda: 0, "1e30": lambda: 1e30,
    "nan": lambda: float("nan"), "inf": lambda: float("inf"), "-0.5": lambda: -0.5,
    "text '8'": lambda: "8", "empty text": lambda: "", "surrogate": lambda: "\ud800x",
    "long text": lambda: "x" * 100_000, "bytes": lambda: b"x", "[]": list, "{}": dict, "()": tuple,
    "set": lambda: {1}, "[None]": lambda: [None], "[[[]]]": lambda: [[[]]],
    "{'a': None}": lambda: {"a": None}, "{'': 0}": lambda: {"": 0}, "object": object,
    "lambda": lambda: lambda: None, "class": lambda: int, "module": lambda: nn.Linear(2, 2),
    "module class": lambda: nn.Linear, "tensor": lambda: torch.ones(2, 2),
    "array": lambda: np.ones((2, 2)), "array of no axis": lambda: np.array(7),
    "torch.device": lambda: torch.device("cuda"), "generator": lambda: (n for n in range(3)),
    "Path": lambda: Path("8"), "True": lambda: True, "10**400": lambda: 10**400,
    "2**62": lambda: 2**62, "complex": lambda: 1j, "dtype": lambda: torch.float16,
    "range": lambda: range(2, 4),
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def worker(*args: Any) -> int:
    return len(args)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.AdamW(model.parameters())


def build_at(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 2) -> None:
    optimizer.zero_grad()
    model(torch.ones(batch, 4)).sum().backward()
    optimizer.step()


@functools.cache
def good() -> dict[str, Any]:
    """Values that fit, by annotation or by "function.parameter"."""
    from utils import planner, simulation, views
    from utils.catalog import device, link, model_shape
    from utils.clinic import PATIENTS, admit
    from utils.lessons.lesson_05.block_choice import BlockCost
    from utils.lessons.lesson_08.rounding import round_to_nearest
    from utils.lessons.lesson_12.tensor_flow import Held
    from utils.lessons.lesson_17.decision import Option
    from utils.lessons.lesson_17.scaling import CHINCHILLA
    from utils.memory import Category
    from utils.ranks.outcome import Failure
    from utils.traffic.cost import AlphaBeta

    model, optimizer = build()
    shape, cluster = model_shape("llama-2-7b"), planner.Cluster(gpu="A100-80GB", nodes=1)
    plan, batch = planner.Plan(dp=8, zero_stage=3), planner.Batch(sequences=8, sequence_length=512)
    estimate = planner.estimate(shape, cluster, plan, batch)
    run = simulation.simulate(build, step, device="cpu")
    many = simulation.sweep(build_at, step, layers=3, batches=[2, 4], device="cpu")
    option = Option("a", {"usd": 1.0})
    bar = views.predicted("a", {"parameters": 1.0})
    runs = [(n, d, CHINCHILLA.loss(n, d)) for n in (1e8, 3e8, 1e9) for d in (1e9, 3e9, 1e10)]
    span = views.Span("work", 0.0, 1.0)
    patient = (
        admit(PATIENTS[0]) if isinstance(PATIENTS, tuple | list) else admit(next(iter(PATIENTS)))
    )
    by_annotation = {
        "ModelShape | str": shape, "ModelShape": shape, "Cluster": cluster, "Plan": plan,
        "Batch": batch, "Batch | list[Batch] | tuple[Batch, ...]": batch, "Estimate": estimate,
        "Sequence[Estimate]": [estimate], "SearchSpace": planner.SearchSpace(), "nn.Module": model,
        "torch.optim.Optimizer": optimizer, "Tensor": torch.ones(16, 16), "str": "a", "int": 2,
        "float": 2.0, "bool": False, "float | None": None, "Models": model,
        "nn.Module | Sequence[nn.Module]": model, "Measurement": run, "MemoryTimeline": run.timeline,
        "Sequence[Measurement]": list(many.values()), "Sequence[Measurement | Bar]": [run, bar],
        "Mapping[str, Measurement]": {"a": run}, "Mapping[str, Sequence[Measurement]]": {"a": list(many.values())},
        "Mapping[str, Mapping[int, Measurement]]": {"a": many}, "Breakdown": run.breakdown,
        "Evidence": run.evidence, "Category": Category.PARAMETERS, "Bar": bar,
        "Callable[..., Any]": worker, "Callable[[], Any]": worker, "Callable[[], Tensor]": lambda: model(torch.ones(2, 4)).sum(),
        "Sequence[float]": [1.0, 2.0], "Mapping[str, float]": {"a": 1.0, "b": 2.0}, "Sequence[str]": ["a", "b"],
        "Mapping[str, Sequence[float]]": {"a": [1.0, 2.0], "b": [2.0, 3.0]}, "Sequence[int]": [8, 16],
        "Mapping[str, Mapping[int, float]]": {"a": {2: 1.0, 4: 2.0}}, "Iterable[int]": [0],
        "Mapping[str, Mapping[float, float]]": {"a": {2.0: 1.0, 4.0: 0.5}}, "Mapping[str, int]": {"tp": 2, "pp": 2},
        "Mapping[str, Mapping[float, Sequence[float]]]": {"a": {2.0: [0.5], 4.0: [0.6]}},
        "Mapping[str, Mapping[int, Sequence[float]]]": {"a": {2: [0.5], 4: [0.6]}},
        "Mapping[str, Mapping[str, float]]": {"a": {"x": 1.0}}, "Iterable[nn.Parameter]": list(model.parameters()),
        "Sequence[nn.Parameter]": list(model.parameters()), "Sequence[nn.Module]": [net(), net()],
        "Iterable[nn.Module]": [net(), net()], "Mapping[str, nn.Linear]": {"a": nn.Linear(16, 16)},
        "Path": Path("nothing.txt"), "str | Path": "nothing", "Path | str": "nothing", "str | os.PathLike[str]": "nothing.py",
        "tuple[Any, ...]": (), "Callable[[int], object]": worker, "Sequence[Option]": [option], "Option": option,
        "Device | str": device("T4"), "Link": link("nvlink3"), "str | Link": "nvlink3", "ScalingLaw": CHINCHILLA, "Sequence[Run]": runs,
        "Mapping[str, ScalingLaw]": {"a": CHINCHILLA}, "Sequence[BlockCost]": [BlockCost(8, 8, 8)] * 3,
        "Callable[[float], Sequence[Option]]": lambda price: [option], "Mapping[str, Sequence[Span]]": {"a": [span]},
        "Callable[[float], Mapping[str, float]]": lambda share: {"usd": 1.0}, "tuple[StageMemory, ...]": estimate.stages,
        "torch.dtype": torch.bfloat16, "torch.device | str": "cpu", "dict[str, float]": {"a": 1.0}, "tuple[int, ...]": (4, 4),
        "str | int | Budget": "16GB", "str | int": "16GB", "str | ModelShape": "llama-2-7b", "dict[str, Any]": {}, "Patient": patient,
        "Sequence[Sequence[str]]": [["a", "b"], ["a", "b"]], "tuple[float, float]": (1.0, 2.0), "TransformerConfig": small_config(),
        "str | Measured": run, "Failure": Failure("error", "x"), "Dataset": torch.utils.data.TensorDataset(torch.ones(16, 2)),
        "BuildAt": build_at, "Build[Model]": build, "Step[Model]": step, "Mapping[str, Points]": {"a": [(8, 1.0), (16, 2.0)]},
        "Mapping[str, AlphaBeta]": {"a": AlphaBeta(1e-5, 1e9)}, "Mapping[str, Collection[str]]": {"a": ["parameters"]},
        "Sequence[Sequence[Move]]": [], "Figure | Path": matplotlib.figure.Figure(), "Stage": estimate.stages[0].stage, "StepTime": estimate.time,
        "InFewBits": round_to_nearest(torch.ones(16, 16), 4), "nn.Linear | NF4Linear": nn.Linear(16, 16),
        "date | None": None, "int | None": None, "object": 1, "Mapping[Category, int]": dict(run.breakdown),
        "dict[Category, float]": {Category.PARAMETERS: 1.0}, "bytes": b"", "list[float]": [1.0], "list[Any]": [],
        "tuple[float, ...]": (1.0,), "tuple[str, ...]": ("a",), "torch.dtype | None": None, "tuple[Estimate, ...]": (estimate,),
        "dict[str, str]": {}, "tuple[int, int]": (8, 0), "Framework | str": "megatron",
        "Mapping[str, Sequence[tuple[float, float]]]": {"a": [(0.0, 1.0), (1.0, 2.0)]},
    }  # fmt: skip
    by_parameter = {
        "measure.step": lambda: step(model, optimizer), "phase.name": "forward", "draw_bits.format": "fp16",
        "draw_bits.value": 1.5, "ring_bytes.collective": "all-reduce", "device.name": "T4", "link.name": "nvlink3",
        "framework.name": "megatron", "price.gpu": "A100-80GB", "setup.lesson": "01", "design.gpu": "A100-80GB",
        "design.link": "InfiniBand HDR x 8", "design.recompute": "none", "design.offload": "none", "design.nodes": 1, "design.zero_stage": 1,
        "design.tp": 1, "design.pp": 1, "design.virtual_stages": 1, "design.micro_batch": 1, "design.sequences": 8,
        "draw_over_time.category": "parameters", "draw_budget_map.limit": "16GB", "sweep.step": step, "sweep.layers": 3,
        "sweep.batches": [2, 4], "sweep.device": "cpu", "extrapolate.step": step, "extrapolate.layers": 3, "extrapolate.device": "cpu",
        "simulate.device": "cpu", "draw_purchase.train_flop": 1e20, "draw_purchase.loss": 2.5, "run_killable.timeout_seconds": 5.0,
        "run_to_outcome.timeout_seconds": 5.0, "dequantize_nf4.packed": torch.zeros(8, dtype=torch.uint8), "round_to_nearest.bits": 4,
        "dequantize_nf4.scales": torch.ones(1), "text_batches.tokens": torch.zeros(100, dtype=torch.uint8), "in_segments.size": 1,
        "TensorDataset": None, "ModelShape.family": "llama", "ModelShape.heads": 2, "ModelShape.hidden": 4, "Fault.kind": "kill",
        "GPTBlock.heads": 2, "GPTBlock.hidden": 8, "NumberFormat.exponent_bits": 5, "NumberFormat.mantissa_bits": 10, "Cluster.gpu": "T4",
        "check.name": "01.no_such", "measure_disk.folder": ".", "sharded_loader.batch": 4, "op_problem.name": "CPUAdam",
        "recorded_table.experiment": "resnet50", "choose_autocast_dtype.device": "cpu", "decide.options": [option], "decide.weights": {"usd": 1.0},
        "accumulated_backward.micro_batches": [torch.ones(2, 4)], "accumulated_backward.summed_loss": lambda m, b: m(b).sum(),
        "accumulated_backward.count": lambda b: len(b), "draw_losses.curves": {"a": [1.0, 2.0]}, "draw_cluster.history": [],
        "quantize_weights.method": "rtn", "quantize_weights.tokens": torch.zeros(2, 4, dtype=torch.long), "step_cost.attention_flops": 0.0,
        "reconcile.prediction": {"parameters": 100.0}, "predicted.bytes_by_category": {"parameters": 1.0}, "numbered.source": "a\nb",
        "run_loader.workers": 1,
        "run_loader.prefetch": 1,
        "run_ranks.world_size": 1, "run_hosts.ranks_per_host": 1, "run_torchrun.world_size": 1, "kubectl_says.path": "nothing.yaml",
        "check_kubernetes.text": "a: 1", "read_yaml.text": "a: 1", "check_train_job.text": "a: 1", "review.tokens": 1e9, "review.days": 30.0,
        "review.usd": 1e6, "goodput.cluster": cluster, "cost.tokens": 1e9, "download.url": "http://127.0.0.1:9/nothing", "download.md5": "0" * 32,
        "winners.limits": None, "crossing_bytes.sent": {"tp": 1.0, "pp": 1.0}, "draw_tensor_flow.schemes": {"a": [Held("x", "whole")]},
        "draw_kept.measured": {"a": 1.0}, "draw_kept.parts": {"a": {"x": 1.0}}, "draw_context_memory.cards": {"a": 1e10},
        "draw_context_memory.memory_bytes": {"a": {8: 1.0, 16: 2.0}}, "draw_decoding.bound": [1.0, 2.0], "draw_decoding.published": [1.0, 2.0],
        "draw_forgotten.uninterrupted": [3.0, 2.0, 1.0], "draw_forgotten.resumed": {"a": [1.5]}, "draw_forgotten.first_step": 1,
        "Account.model_flops": 1e15, "ScalingLaw.a": 400.0, "ScalingLaw.b": 400.0, "ScalingLaw.alpha": 0.3, "ScalingLaw.beta": 0.3,
        "ScalingLaw.e": 1.7, "linears_of.module": net(), "inputs_of.layers": {"a": nn.Linear(16, 16)}, "NumericsRecorder.model": model,
        "stream_blocks.link": link_to_host(), "Price.usd_per_gpu_hour": 1.0, "Price.as_of": "2026-01-01", "draw_staircase.predicted_bytes": {"a": {2: 1.0, 4: 2.0}},
        "OffloadedOptimizer.optimizer": torch.optim.AdamW(net().parameters()), "merge_lora.model": net(), "add_lora.targets": ["0"],
    }  # fmt: skip
    return by_annotation | by_parameter


def warm_up() -> None:
    """What takes long once in a process: the server of ranks, the meter's extension, libraries."""
    import utils
    from utils.lessons.lesson_11.hosts import run_hosts
    from utils.ranks import run_killable

    good()
    for launch in (utils.run_ranks, run_hosts):
        launch(worker, 1)
    run_killable(worker, timeout_seconds=60.0)
    model, _ = build()
    utils.measure(lambda: model(torch.ones(2, 4)), model=model)
    utils.llama_config("llama-2-7b")


def small_config() -> Any:
    from utils.models import TransformerConfig

    return TransformerConfig(vocabulary=16, hidden=16, layers=1, heads=2, feedforward=16)


def link_to_host() -> Any:
    from utils.lessons.lesson_07.link import Link

    return Link()
