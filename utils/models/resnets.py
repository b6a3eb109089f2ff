"""torchvision's ResNets, with the stem of your choice, and a small one of the same kind of blocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from utils.rules import one_of, whole

if TYPE_CHECKING:  # ranks of a small network need no torchvision: 100 MB and a second each
    from torchvision.models import ResNet

MOST_CLASSES = 2**16
DEPTHS = (18, 34, 50, 101, 152)
STEMS = ("cifar", "imagenet")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(32, channels),  # the default of Wu and He 2018
}


def resnet(
    depth: int = 50, stem: str = "cifar", num_classes: int = 10, norm: str = "batch"
) -> ResNet:
    """A ResNet that maps images (batch, 3, height, width) to logits (batch, num_classes).

    Args:
        depth: 18, 34, 50, 101 or 152 layers.
        stem: "imagenet" halves the image twice before the first block. "cifar" keeps it whole
            (3x3 convolution of stride 1, no max-pool; He et al. 2015, section 4.2), so 32 x 32
            images keep their detail; ResNet-50's activations take about 14 times the memory.
        num_classes: Outputs of the last layer.
        norm: "batch", or "group", which keeps no running statistics.

    Raises:
        ValueError: an argument is none of its choices; the sentence lists them.
    """
    one_of("depth", depth, DEPTHS)
    one_of("stem", stem, STEMS)
    one_of("norm", norm, tuple(NORMS))
    num_classes = whole("resnet", most=MOST_CLASSES, num_classes=num_classes)["num_classes"]
    make = getattr(importlib.import_module("torchvision.models"), f"resnet{depth}")
    model: ResNet = make(num_classes=num_classes, norm_layer=NORMS[norm])
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.set_submodule("maxpool", nn.Identity())
    return model


def small_resnet(norm: str = "group", num_classes: int = 10, width: int = 32) -> nn.Sequential:
    """A ResNet of three blocks, 308,650 parameters: images (batch, 3, H, W) to logits.

    For steps that several ranks take on a laptop. The stem halves the image, as do the second and
    the third block, which are 2 and 4 times as wide.

    Args:
        norm: "group" (8 groups), or "batch", which keeps running statistics.
        num_classes: Outputs of the last layer.
        width: Channels of the first block, a multiple of 8.

    Raises:
        ValueError: an argument is none of its choices.
    """
    one_of("norm", norm, tuple(NORMS))
    width, num_classes = whole(
        "small_resnet", most=MOST_CLASSES, width=width, num_classes=num_classes
    ).values()
    if width % 8:
        raise ValueError(f"width is {width}; its channels make 8 groups, so take 8, 16, 24, ...")
    make_norm = nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(8, channels)
    stem = nn.Conv2d(3, width, kernel_size=3, stride=2, padding=1, bias=False)
    blocks = [
        BasicBlock(width, width, 1, make_norm),
        BasicBlock(width, 2 * width, 2, make_norm),
        BasicBlock(2 * width, 4 * width, 2, make_norm),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes)]
    return nn.Sequential(stem, make_norm(width), nn.ReLU(), *blocks, *head)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, section 4.1)."""

    def __init__(
        self, inner: int, outer: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.downsample = nn.Sequential()  # empty: the input itself
        if (inner, stride) != (outer, 1):
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), norm(outer)
            )
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = norm(outer)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inner, H, W) -> (batch, outer, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x), inplace=True)
