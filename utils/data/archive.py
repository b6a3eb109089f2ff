"""The real CIFAR-10 on disk: found, unpacked and checked, with torchvision doing the reading."""

from __future__ import annotations

import importlib
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.data.downloads import download, md5_of
from utils.data.files import whole_folder

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10


def torchvisions() -> type[CIFAR10]:
    """Its class, imported when it is needed: ranks that only normalize images need none of it."""
    return importlib.import_module("torchvision.datasets").CIFAR10


def is_there(root: Path, dataset: type[CIFAR10]) -> bool:
    """Whether `root` holds CIFAR-10, as a folder of batches or as the archive."""
    return (root / dataset.base_folder).exists() or (root / dataset.filename).exists()


def fetch(root: Path, dataset: type[CIFAR10]) -> None:
    """Download the archive into `root`.

    Raises:
        DownloadError: it did not arrive.
        OSError: the folder cannot be written.
    """
    download(dataset.url, root / dataset.filename, dataset.tgz_md5)


def load(root: Path, split: str, dataset: type[CIFAR10]) -> tuple[Tensor, Tensor, list[str]]:
    """Images (N, 3, 32, 32) uint8, labels (N,) int64 and class names, unpacking if need be.

    Raises:
        RuntimeError: the archive or a batch is damaged; the sentence names it.
        OSError: the folder cannot be written.
    """
    if not (root / dataset.base_folder).exists():
        unpack(root, dataset)
    _check_batches(root / dataset.base_folder, dataset)
    data = dataset(root, train=split == "train", download=False)
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(data.targets), list(data.classes)


def unpack(root: Path, dataset: type[CIFAR10]) -> None:
    """Unpack the archive beside itself; its folder appears whole or not at all."""
    archive = root / dataset.filename
    if md5_of(archive) != dataset.tgz_md5:
        raise RuntimeError(
            f"{archive} is damaged: its checksum is wrong. Delete it and run this again."
        )
    with whole_folder(root / dataset.base_folder) as folder, tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (content := tar.extractfile(member)):
                (folder / Path(member.name).name).write_bytes(content.read())


def _check_batches(folder: Path, dataset: type[CIFAR10]) -> None:
    meta = [dataset.meta["filename"], dataset.meta["md5"]]
    check_integrity = importlib.import_module("torchvision.datasets.utils").check_integrity
    for name, md5 in [*dataset.train_list, *dataset.test_list, meta]:
        if not check_integrity(str(folder / name), md5):
            raise RuntimeError(
                f"{folder / name} is damaged or missing. Delete the folder {folder.name} "
                "that it belongs in and run this again."
            )
