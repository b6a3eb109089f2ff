"""What the lessons train on: CIFAR-10, real or generated, and text as byte tokens."""

from utils.checked import check_public
from utils.data.cifar import Cifar10, cifar10, normalize
from utils.data.downloads import DownloadError, download
from utils.data.text import docstring_pairs, text_batches, text_tokens

__all__ = [
    "Cifar10",
    "DownloadError",
    "cifar10",
    "docstring_pairs",
    "download",
    "normalize",
    "text_batches",
    "text_tokens",
]

check_public(globals())
