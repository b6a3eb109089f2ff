"""The lesson's scenarios at the size that was asked for: published speeds, and a table of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from evidence.validation.tables import table
from utils.models import resnet
from utils.simulation import simulate
from utils.units import Evidence, format_bytes

from .sending import Bucket

__all__ = ["asked", "published_speeds"]

IMAGENET_IMAGES = 1_281_167  # to train on
DEVICE = "A100 80GB"
ARITHMETIC = {"TF32": "TF32", "AMP": "bf16 (fp16 in published runs)"}
COLUMNS = {"TF32": "fp32_or_tf32_images_s", "AMP": "mixed_images_s"}


def published_speeds() -> dict[str, list[float]]:
    """NVIDIA's images a second of ResNet-50 on one A100 and on eight, by arithmetic."""
    rows = [row for row in table("nvidia_resnet50") if row["gpu"] == "A100-80GB"]
    return {name: [float(row[column]) for row in rows] for name, column in COLUMNS.items()}


def build(ranks: int) -> tuple[nn.Module, Optimizer]:
    """ResNet-50 for ImageNet, with batch norm as in NVIDIA's run, and SGD with momentum."""
    model: nn.Module = resnet(50, stem="imagenet", num_classes=1000)
    if ranks > 1:
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: Optimizer, *, mixed: bool, images: int) -> None:
    """One of training, in mixed precision or not."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = model(torch.randn(images, 3, 224, 224))
        loss = F.cross_entropy(logits, torch.randint(1000, (images,)))
    loss.backward()
    optimizer.step()


def asked(
    cases: Mapping[str, tuple[int, str]],
    speeds: Mapping[str, Sequence[float]],
    buckets: Sequence[Bucket],
    images: int,
) -> tuple[str, pd.DataFrame]:
    """The bet at this size in words, and a row for each case: peak, payload and minutes an epoch.

    Minutes of several GPUs reach from no loss at all to the efficiency of the published eight.

    Args:
        cases: GPUs and arithmetic by name; the first one is one GPU.
        speeds: images a second of one GPU and of eight, by arithmetic.
        buckets: in which a step should send its gradients.
        images: of a rank.
    """
    rows, peaks_bytes = [], []
    for name, (gpus, kind) in cases.items():
        found = simulate(
            partial(build, gpus),
            partial(step, mixed=kind == "AMP", images=images),
            device=DEVICE,
            world=gpus,
            items=images,
            unit="images",
            name=name,
        )
        payload, calls = _reduced(found.traffic)
        wanted = buckets if gpus > 1 else []
        assert payload == sum(b.payload_bytes for b in wanted), "every gradient once"
        assert calls == len(wanted), "section 5's buckets should be DDP's"
        peaks_bytes.append(found.peak_bytes)
        row = {
            "": name,
            "arithmetic": ARITHMETIC[kind],
            "peak a GPU (simulated)": format_bytes(peaks_bytes[-1]),
        }
        row["payload a step (simulated)"] = format_bytes(payload)
        rows.append(row | {"minutes an epoch": _minutes(gpus, *speeds[kind])})
    bet = simulate(
        partial(build, 4),
        partial(step, mixed=False, images=images // 4),
        device=DEVICE,
        world=4,
        name="the bet",
    )
    said = (
        f"The bet: one GPU takes {images} images, or each of four {images // 4} under DDP: "
        f"{format_bytes(bet.peak_bytes)} a GPU, {bet.peak_bytes / peaks_bytes[0]:.0%} of one GPU's peak "
        f"({Evidence.SIMULATED}, TF32)"
    )
    return said, pd.DataFrame(rows).set_index("")


def _reduced(traffic: Sequence[Any]) -> tuple[int, int]:
    """Bytes and calls of all-reduces."""
    rows = [row for row in traffic if row.collective == "all-reduce"]
    return sum(row.payload_bytes for row in rows), sum(row.calls for row in rows)


def _minutes(gpus: int, lone: float, eight: float) -> str:
    best = IMAGENET_IMAGES / lone / gpus / 60
    if gpus == 1:
        return f"{best:.1f} (from published speed)"
    return f"{best:.1f} to {best * 8 * lone / eight:.1f} (predicted)"
