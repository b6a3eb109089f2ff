"""Ten classes of drawn shapes of CIFAR-10's size, for machines without a network.

A shape has a random place, size, tilt and colour on a random background, under noise. Half of
the images carry their class's favourite hue, so that a model learns something at once, and must
look at shapes to learn the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from utils.data.files import whole_folder

Grid = np.ndarray  # float32 (images, 32, 32)

SIDE = 32
NOISE = 42.0  # standard deviation, of 255
FILES = {"train": "train.npz", "test": "test.npz"}

# Which points belong to a shape; (u, v) run over -1..1 within it, right and down.
SHAPES: dict[str, Callable[[Grid, Grid], Grid]] = {
    "disc": lambda u, v: u**2 + v**2 < 1,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.9,
    "triangle": lambda u, v: (v < 0.8) & (v > 2 * abs(u) - 1),
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 1),
    "ring": lambda u, v: (u**2 + v**2 < 1) & (u**2 + v**2 > 0.3),
    "frame": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.maximum(abs(u), abs(v)) > 0.5),
    "bars": lambda u, v: (np.maximum(abs(u), abs(v)) < 1) & (np.sin(8 * v) > 0),
    "columns": lambda u, v: (np.maximum(abs(u), abs(v)) < 1) & (np.sin(8 * u) > 0),
    "checks": lambda u, v: (np.maximum(abs(u), abs(v)) < 1) & (np.sin(5 * u) * np.sin(5 * v) > 0),
    "bow tie": lambda u, v: (abs(u) < 1) & (abs(v) < abs(u)),
}


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 3, 32, 32) uint8 and labels (count,) int64, the same for the same seed."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % len(SHAPES))
    inside = _masks(labels, random)[:, None]
    background = random.random((count, 3, 1, 1), dtype=np.float32)
    images = random.standard_normal((count, 3, SIDE, SIDE), dtype=np.float32)
    images *= NOISE
    images += 255 * np.where(inside, _colours(labels, random), background)
    return np.clip(images, 0, 255, out=images).astype(np.uint8), labels


def _masks(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Where each image's shape lies: bool (images, 32, 32)."""
    count = len(labels)
    radius = random.uniform(6, 13, (count, 1, 1)).astype(np.float32)
    tilt = random.uniform(-0.4, 0.4, (count, 1, 1)).astype(np.float32)  # radians
    centre = random.uniform(10, SIDE - 10, (2, count, 1, 1)).astype(np.float32)
    line = np.arange(SIDE, dtype=np.float32)
    x, y = (line[None, None, :] - centre[0]) / radius, (line[None, :, None] - centre[1]) / radius
    u, v = x * np.cos(tilt) + y * np.sin(tilt), y * np.cos(tilt) - x * np.sin(tilt)
    masks = np.empty((count, SIDE, SIDE), dtype=bool)
    for label, shape in enumerate(SHAPES.values()):
        chosen = labels == label
        masks[chosen] = shape(u[chosen], v[chosen])
    return masks


def _colours(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A colour per image, float32 (images, 3, 1, 1) in 0..1; half near the class's own hue."""
    count = len(labels)
    own = labels / len(SHAPES) + random.normal(0, 0.04, count)
    hue = np.where(random.uniform(size=count) < 0.5, own, random.uniform(size=count))
    thirds = np.array([0, 1 / 3, 2 / 3])
    waves = 0.5 + 0.5 * np.cos(2 * np.pi * (hue[:, None] - thirds))
    return waves[:, :, None, None].astype(np.float32)


def write(folder: Path, train: int, test: int, seed: int = 0) -> None:
    """Write `train` + `test` images as two files into `folder`, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    images, labels = draw(train + test, seed)
    with whole_folder(folder) as unfinished:
        _write(unfinished / FILES["train"], images[:train], labels[:train])
        _write(unfinished / FILES["test"], images[train:], labels[train:])


def _write(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    np.savez(path, images=images, labels=labels)


def read(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of a folder's "train" or "test" file.

    The file may come from anyone, so nothing in it is run: plain arrays alone are read.

    Raises:
        RuntimeError: it is missing or damaged; the sentence names it.
    """
    path = folder / FILES[split]
    try:
        # Opened here: numpy would leave a damaged archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        _check(images, labels)
    except Exception as error:  # a damaged archive may raise anything
        raise RuntimeError(
            f"{path} is damaged or missing ({error}). Delete the folder {folder.name} that it is "
            "in and run this again."
        ) from error
    return images, labels


def _check(images: np.ndarray, labels: np.ndarray) -> None:
    if images.shape != (len(labels), 3, SIDE, SIDE) or images.dtype != np.uint8:
        raise ValueError(f"its images have the shape {images.shape} and the type {images.dtype}")
    if (
        labels.ndim != 1
        or labels.dtype != np.int64
        or not np.isin(labels, range(len(SHAPES))).all()
    ):
        raise ValueError(f"its labels are not whole numbers from 0 to {len(SHAPES) - 1}")
