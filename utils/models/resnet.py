"""torchvision's ResNets, with the stem of your choice."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torchvision.models import ResNet, resnet18, resnet34, resnet50, resnet101, resnet152

DEPTHS: dict[int, Callable[..., ResNet]] = {
    18: resnet18,
    34: resnet34,
    50: resnet50,
    101: resnet101,
    152: resnet152,
}
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
    _check_choice("depth", depth, DEPTHS)
    _check_choice("stem", stem, STEMS)
    _check_choice("norm", norm, NORMS)
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; a classifier needs 1 class or more.")
    model = DEPTHS[depth](num_classes=num_classes, norm_layer=NORMS[norm])
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}; write one of {listed}.")
