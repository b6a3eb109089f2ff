"""A small diffusion U-Net: an image and a time step in, an image of the same size out.

Ronneberger et al. 2015 (the shape), Ho et al. 2020 (residual blocks that know the time step).
Shapes in comments: B batch, C channels, S side of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.rules import one_of, whole

NORMS = ("group", "batch")
WIDEST, MOST = 8192, 1000  # channels of a level; blocks of a level, channels of an image
STEP_WIDTH = 64  # channels of a time step's embedding


def step_embedding(steps: Tensor, width: int = STEP_WIDTH) -> Tensor:
    """Time steps (B,) -> cosines and sines (B, width); Vaswani et al. 2017, section 3.5."""
    channels = torch.arange(width // 2, device=steps.device, dtype=torch.float32)
    angles = torch.outer(steps.float(), torch.exp(-math.log(10_000) * channels / (width // 2)))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels) if kind == "group" else nn.BatchNorm2d(channels)


class UNetBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the time step is added between them."""

    def __init__(self, inputs: int, outputs: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm1 = _norm(norm, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.step = nn.Linear(STEP_WIDTH, outputs)
        self.norm2 = _norm(norm, outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """(B, C, S, S) and (B, STEP_WIDTH) -> (B, outputs, S, S)."""
        inside = self.conv1(F.silu(self.norm1(x)))
        inside = inside + self.step(F.silu(embedded))[:, :, None, None]
        inside = self.conv2(self.dropout(F.silu(self.norm2(inside))))
        return inside + self.shortcut(x)


def _level(
    inputs: int, width: int, count: int, norm: str, dropout: float, skip: int = 0
) -> nn.ModuleList:
    """Blocks of one level; on the way up each gets `skip` more channels."""
    widths = [(inputs if n == 0 else width) + skip for n in range(count)]
    return nn.ModuleList(UNetBlock(before, width, norm, dropout) for before in widths)


class UNet(nn.Module):
    """Images (B, 3, S, S) and time steps (B,) -> predicted noise (B, 3, S, S).

    Each level halves the side; what a level's blocks give is kept for the way up (the skips).
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 64, 128),
        blocks_per_level: int = 1,
        norm: str = "group",
        dropout: float = 0.0,
        image_channels: int = 3,
    ) -> None:
        """Build the levels, from the whole image down.

        Args:
            channels: of each level, multiples of 8; the last is the bottom.
            blocks_per_level: blocks on the way down; as many on the way up.
            norm: "group", or "batch", which keeps running statistics.
            dropout: share that is dropped inside each block in training.
            image_channels: 3 for colour.

        Raises:
            ValueError: an argument is none of its choices.
        """
        super().__init__()
        one_of("norm", norm, NORMS)
        channels = [whole("unet", channels=count)["channels"] for count in channels]
        if len(channels) < 2 or any(count % 8 or count > WIDEST for count in channels):
            raise ValueError(
                f"channels are {tuple(channels)}; give two or more, multiples of 8 up to {WIDEST:,}."
            )
        blocks_per_level, image_channels = whole(
            "unet", blocks_per_level=blocks_per_level, image_channels=image_channels
        ).values()
        if max(blocks_per_level, image_channels) > MOST:
            raise ValueError(
                f"blocks_per_level is {blocks_per_level} and image_channels {image_channels}; "
                f"neither can be above {MOST:,}."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; write a share from 0 up to below 1.")
        self.first = nn.Conv2d(image_channels, channels[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        now = channels[0]
        for width in channels[:-1]:
            self.down.append(_level(now, width, blocks_per_level, norm, dropout))
            now = width
        self.middle = UNetBlock(now, channels[-1], norm, dropout)
        now = channels[-1]
        for width in reversed(channels[:-1]):
            self.up.append(_level(now, width, blocks_per_level, norm, dropout, skip=width))
            now = width
        self.norm = _norm(norm, channels[0])
        self.last = nn.Conv2d(channels[0], image_channels, 3, padding=1)

    @property
    def blocks(self) -> list[nn.Module]:
        """All blocks in the order of their calls: down, bottom, up."""
        down = [block for level in self.down for block in level.children()]
        return [*down, self.middle, *(block for level in self.up for block in level.children())]

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        """The noise that was added to the images at these time steps.

        Raises:
            ValueError: the image's side cannot be halved often enough.
        """
        if any(side % 2 ** len(self.down) for side in images.shape[-2:]):
            raise ValueError(
                f"Images of {tuple(images.shape[-2:])} cannot be halved {len(self.down)} times: "
                f"their sides must be multiples of {2 ** len(self.down)}."
            )
        embedded, skips = step_embedding(steps), []
        x = self.first(images)
        for level in self.down:
            for block in level.children():
                x = block(x, embedded)
                skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, embedded)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2)
            for block in level.children():
                x = block(torch.cat((x, skips.pop()), dim=1), embedded)
        return self.last(F.silu(self.norm(x)))
