"""Checkpoints that a kill at any moment leaves whole.

They are `utils.parallel`'s, since an exported script takes them along.
"""

from utils.parallel.kept import CHECKSUMS, VERSION, named, newest_whole, problems, step_of
from utils.parallel.safe_checkpoint import CheckpointError, load_newest, save_safely

__all__ = [
    "CHECKSUMS", "VERSION", "CheckpointError", "load_newest", "named", "newest_whole", "problems",
    "save_safely", "step_of",
]  # fmt: skip
