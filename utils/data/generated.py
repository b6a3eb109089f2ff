"""Ten classes of drawn shapes in CIFAR-10's own file format, for machines without a network.

A shape has a random place, size, tilt and colour on a random background, under noise. Half of
the images carry their class's favourite hue, so that a model learns something at once, and must
look at shapes to learn the rest.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from utils.data.files import whole_folder

Grid = np.ndarray  # float32 (images, 32, 32)

SIDE = 32
NOISE = 42.0  # standard deviation, of 255
TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_FILES = ["test_batch"]

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
    """Write `train` + `test` images as CIFAR-10's batch files into `folder`, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    images, labels = draw(train + test, seed)
    sections = np.array_split(np.arange(train), len(TRAIN_FILES))
    sections.append(np.arange(train, train + test))
    with whole_folder(folder) as unfinished:
        for name, section in zip(TRAIN_FILES + TEST_FILES, sections, strict=True):
            _write_batch(unfinished / name, images[section], labels[section])
        (unfinished / "batches.meta").write_bytes(
            pickle.dumps({"label_names": list(SHAPES), "num_vis": 3 * SIDE * SIDE}, protocol=2)
        )


def _write_batch(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    batch = {
        "batch_label": f"generated {path.name}",
        "data": images.reshape(len(images), -1),
        "labels": labels.tolist(),
        "filenames": [f"{path.name}_{index:05d}.png" for index in range(len(images))],
    }
    path.write_bytes(pickle.dumps(batch, protocol=2))


def read(folder: Path, files: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of some of a folder's batch files.

    Raises:
        RuntimeError: a file is missing or damaged; the sentence names it.
    """
    batches = [_read_batch(folder / name) for name in files]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return images.reshape(-1, 3, SIDE, SIDE), labels


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with open(path, "rb") as file:
            batch = pickle.load(file, encoding="latin1")
        images, labels = batch["data"], np.array(batch["labels"], dtype=np.int64)
        if images.shape != (len(labels), 3 * SIDE * SIDE) or images.dtype != np.uint8:
            raise ValueError(f"its images have the shape {images.shape}")
    except Exception as error:  # a damaged pickle may raise anything
        raise RuntimeError(
            f"{path} is damaged or missing ({error}). Delete the folder {path.parent.name} "
            "that it is in and run this again."
        ) from error
    return images, labels
