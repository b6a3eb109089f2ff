"""How fast the device itself is: matmul ceiling, memory bandwidth, link to the host."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from evidence.record.experiment import Experiment, Stage, Trial
from evidence.record.store import Row
from utils.techniques.precision import Precision, offered, tf32
from utils.units import GIB, MIB

TRIALS = 10
TRIAL_SECONDS = 0.02  # a trial repeats the action until it takes this long: starts weigh nothing

# Rows of the left matrix, inner size, columns of the right one.
Shape = tuple[int, int, int]
SQUARES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384))
LAYERS = (
    (8192, 4096, 11008),  # Llama-2-7B, gate or up projection, 8,192 tokens
    (8192, 8192, 28672),  # Llama-2-70B, the same
    (8192, 12288, 49152),  # GPT-3 175B, first matrix of the MLP
)
CPU_SHAPES = ((512, 512, 512), (256, 512, 1376))


def trials(device: torch.device) -> list[Trial]:
    """Matmuls in every precision and shape, a copy within the device, and both ways to the host."""
    on_gpu = device.type == "cuda"
    shapes = SQUARES + LAYERS if on_gpu else CPU_SHAPES
    found = [_matmul_trial(shape, kind, device) for kind in offered(device) for shape in shapes]
    # Far larger than any cache, and small enough for any card.
    copied = 4 * GIB if on_gpu else 64 * MIB
    found.append(Trial({"quantity": "memory bandwidth"}, partial(_bandwidth, copied, device)))
    if on_gpu:
        for way in ("host to device", "device to host"):
            found.append(Trial({"quantity": way}, partial(_host_link, way, device)))
    return found


def _matmul_trial(shape: Shape, precision: Precision, device: torch.device) -> Trial:
    rows, inner, columns = shape
    name = precision.name.removeprefix("amp ")
    settings = {"quantity": "matmul", "precision": name, "m": rows, "k": inner, "n": columns}
    return Trial(settings, partial(_matmul, shape, precision, device))


def _matmul(shape: Shape, precision: Precision, device: torch.device, stage: Stage) -> Row:
    rows, inner, columns = shape
    dtype = precision.autocast or torch.float32
    # Random numbers: zeros switch fewer transistors, so a GPU would clock higher than in training.
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, columns, device=device, dtype=dtype)
    result = torch.empty(rows, columns, device=device, dtype=dtype)
    stage.name = "matmul"
    with tf32(precision.tf32):
        seconds = time_action(lambda: torch.mm(left, right, out=result), device)
    return rates(2 * rows * inner * columns / 1e12, "TFLOP/s", seconds)


def _bandwidth(copied_bytes: int, device: torch.device, stage: Stage) -> Row:
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stage.name = "copy"
    seconds = time_action(lambda: target.copy_(source), device)
    moved_bytes = 2 * copied_bytes  # each byte is read once and written once
    return {"moved_bytes": moved_bytes, **rates(moved_bytes / 1e9, "GB/s", seconds)}


def _host_link(way: str, device: torch.device, stage: Stage) -> Row:
    stage.name = "pinning memory"
    host = torch.zeros(GIB, dtype=torch.uint8).pin_memory()
    there = torch.zeros(GIB, dtype=torch.uint8, device=device)
    target, source = (there, host) if way == "host to device" else (host, there)
    stage.name = "copy"
    seconds = time_action(lambda: target.copy_(source, non_blocking=True), device)
    return {"moved_bytes": GIB, **rates(GIB / 1e9, "GB/s", seconds)}


def rates(amount: float, unit: str, seconds: list[float]) -> Row:
    """Best and median rate. The best is the ceiling, the median what lasts."""
    return {
        "best": amount / min(seconds),
        "median": amount / statistics.median(seconds),
        "unit": unit,
        "best_seconds": min(seconds),
        "trials": len(seconds),
    }


def time_action(action: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of one action, TRIALS times over, on the device's own clock where it has one."""
    trial = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    trial(action, 2)  # the first calls load kernels and take memory
    repeats = max(1, math.ceil(TRIAL_SECONDS / max(trial(action, 1), 1e-6)))
    return [trial(action, repeats) for _ in range(TRIALS)]


def _cuda_seconds(action: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def _cpu_seconds(action: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


EXPERIMENT = Experiment(
    name="device_speed",
    summary="the device itself: matmul ceiling, memory bandwidth, link to the host",
    configuration={
        "trials": TRIALS,
        "trial_seconds": TRIAL_SECONDS,
        "matmul": "m x k times k x n, random normal, one matrix type for inputs and output",
        "memory bandwidth": "bytes read plus bytes written of one copy within the device",
        "host link": "one copy of 1 GiB from or to pinned memory",
    },
    trials=trials,
)
