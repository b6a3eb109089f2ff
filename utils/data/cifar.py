"""CIFAR-10: from disk, else from the network, else generated images of the same size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.checked import checked
from utils.data import archive, generated
from utils.data.downloads import DownloadError

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

REPOSITORY = Path(__file__).resolve().parents[2]
SPLITS = ("train", "test")
LARGEST_SET = 60_000  # images of a generated set, as many as CIFAR-10 has

# Mean and standard deviation of each colour over CIFAR-10's training images, scaled to 0..1.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

# Part of the generated set's folder name: raise it when `generated` draws or writes otherwise.
GENERATED_VERSION = 2


@dataclass(frozen=True, eq=False)
class Cifar10:
    """Ten classes of 32 x 32 images. Also a dataset for `torch.utils.data.DataLoader`.

    Attributes:
        images: uint8 (N, 3, 32, 32).
        labels: int64 (N,), 0 to 9.
        source: "cifar-10" or "generated".
        classes: The name of each label.
    """

    images: Tensor
    labels: Tensor
    source: str
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One normalised image float32 (3, 32, 32), and its label."""
        return normalize(self.images[index]), int(self.labels[index])

    @checked
    def batches(
        self, size: int, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Once through the set: normalised images float32 (size, 3, 32, 32), labels (size,).

        Args:
            size: Images in a batch.
            seed: Order of the images; None for the order on disk.
            drop_last: Leave out the last batch if it is short.

        Raises:
            ValueError: the size is not positive, or no batch of it is left.
        """
        if size < 1 or (drop_last and size > len(self)):
            raise ValueError(f"A batch of {size} is not possible: choose 1 to {len(self)} images.")
        order = torch.arange(len(self))
        if seed is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        chosen = [
            part for part in order.split(min(size, len(self))) if len(part) == size or not drop_last
        ]
        return ((normalize(self.images[part]), self.labels[part]) for part in chosen)


def normalize(images: Tensor) -> Tensor:
    """uint8 (..., 3, 32, 32) to float32 with mean 0 and deviation 1 per colour, about."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def cifar10(
    split: str = "train",
    root: str | Path | None = None,
    *,
    generated_train: int = 10_000,
    generated_test: int = 2_000,
    dataset: type[CIFAR10] | None = None,
) -> Cifar10:
    """CIFAR-10's "train" or "test" images; without it and without a network, generated ones.

    Says in one line when the images are generated, and why. The environment variable
    `COURSE_OFFLINE=1` forbids the network. Where several ranks read the set, call it once before
    they start: two downloads at a time would write into each other.

    Args:
        split: "train" or "test".
        root: Folder for the data; else the variable `CIFAR10_ROOT`, else the course's `data/`.
        generated_train, generated_test: Sizes of the generated set.
        dataset: A class derived from torchvision's, with another address; its own if None.

    Raises:
        ValueError: an unknown split, or a size below ten.
        RuntimeError: damaged data, or a folder that cannot be written; one sentence.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; write 'train' or 'test'.")
    if min(generated_train, generated_test) < 10:
        raise ValueError("A generated set needs 10 images or more for training and for testing.")
    if max(generated_train, generated_test) > LARGEST_SET:
        raise ValueError(
            f"generated_train is {generated_train:,} and generated_test {generated_test:,}; a "
            f"generated set has {LARGEST_SET:,} images at most, as CIFAR-10."
        )
    folder = Path(root or os.environ.get("CIFAR10_ROOT") or REPOSITORY / "data").expanduser()
    dataset = dataset or archive.torchvisions()
    try:
        why_not = _why_not_real(folder, dataset)
        if not why_not:
            images, labels, classes = archive.load(folder, split, dataset)
            return Cifar10(images, labels, "cifar-10", tuple(classes))
        return _generated(folder, split, generated_train, generated_test, why_not)
    except OSError as error:
        raise RuntimeError(
            f"The data folder {folder} cannot be used ({error.strerror or error}). Make room or "
            "choose another with cifar10(root=...) or the variable CIFAR10_ROOT."
        ) from error


def _why_not_real(folder: Path, dataset: type[CIFAR10]) -> str:
    """Empty once CIFAR-10 is on disk; else the reason why it is not."""
    if archive.is_there(folder, dataset):
        return ""
    if os.environ.get("COURSE_OFFLINE", "0") not in ("", "0"):
        return "COURSE_OFFLINE is set"
    try:
        archive.fetch(folder, dataset)
    except DownloadError as error:
        return str(error)
    return ""


def _generated(folder: Path, split: str, train: int, test: int, why: str) -> Cifar10:
    kept = folder / "generated-cifar-10" / f"v{GENERATED_VERSION}-{train}-{test}"
    if not kept.exists():
        generated.write(kept, train, test)
    images, labels = (torch.from_numpy(array) for array in generated.read(kept, split))
    print(f"Not CIFAR-10 but {len(images):,} generated {split} images of ten drawn shapes: {why}.")
    return Cifar10(images, labels, "generated", tuple(generated.SHAPES))
