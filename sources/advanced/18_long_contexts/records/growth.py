"""`python -m utils.lessons.lesson_18.records.growth`: the peaks and reserved bytes of lesson 18's steps, kept."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from utils.catalog import model_shape
from utils.memory.measurement import Measurement

from ..at_size import of_one_rank
from ..ring import ring_attention

MODEL = "qwen2.5-7b"
LENGTHS = (8_192, 32_768, 131_072, 262_144, 524_288, 1_048_576)
RANKS = 8
BF16_BYTES = 2
VERSION = torch.__version__.partition("+")[0]
FILE = Path(__file__).parents[1] / "growth.json"
TWO = ("chunked loss", "checkpointing")
LINES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "chunked loss": TWO[:1],
    "checkpointing": TWO[1:],
    "both": TWO,
    "both, checkpoints offloaded": (*TWO, "offload"),
    "both, over a ring of 8": TWO,
    "both, offloaded, over a ring of 8": (*TWO, "offload"),
    "both, over a ring of 16": TWO,
    "both, offloaded, MLP tiled": (*TWO, "offload", "tiled MLP"),
}
DRAWN = tuple(name for name in LINES if name != "both, over a ring of 16")
_OFFLOADED, _RING = "both, checkpoints offloaded", "both, over a ring of 8"
_TILED, _BOTH_WAYS = "both, offloaded, MLP tiled", "both, offloaded, over a ring of 8"
# Of each curve, at which lengths the picture writes its height, and on which side.
TOLD = {
    "plain": ("above", 2**17), "chunked loss": ("below", 2**17), "checkpointing": ("above", 2**17),
    "both": ("above", 2**17), _OFFLOADED: ("below", 2**17, 2**18), _TILED: ("above", 2**18, 2**19),
    _RING: ("above", 2**18, 2**19, 2**20), _BOTH_WAYS: ("below", 2**20),
}  # fmt: skip
# The rows of the last table: from what fits at 128k to what fits at 1M.
VERDICT = (
    ("both", 2**17), (_OFFLOADED, 2**17), (_RING, 2**17),
    (_OFFLOADED, 2**18), (_TILED, 2**18), (_RING, 2**18),
    (_TILED, 2**19), (_RING, 2**19),
    (_RING, 2**20), (_BOTH_WAYS, 2**20), ("both, over a ring of 16", 2**20),
)  # fmt: skip


def ring_of(line: str) -> int:
    """How many GPUs share one sequence in one of `LINES`; 1 without a ring."""
    return int(line.rpartition("ring of ")[2]) if "ring of " in line else 1


def simulated(line: str, tokens: int) -> Measurement:
    """A step of one rank, of one of `LINES`, at a length of the sequence."""
    if (ring := ring_of(line)) == 1:
        return of_one_rank(MODEL, tokens, *LINES[line])
    return of_one_rank(MODEL, tokens // ring, *LINES[line], attend=ring_attention, ranks=ring)


def fits(reserved_bytes: int, room_bytes: int, above: float) -> str:
    """GiB of a step with half, all and twice of a part more than it reserves, and whether each fits a GPU."""
    with_room = [(part, (1 + part) * reserved_bytes) for part in (above / 2, above, 2 * above)]
    return ", ".join(
        f"+{part:.0%} {size / 2**30:.0f} {'fits' if size < room_bytes else 'no'}"
        for part, size in with_room
    )


def on_host_bytes(line: str, tokens: int) -> int:
    """Bytes of blocks' inputs that one GPU keeps in host memory, in one of `LINES`."""
    if "offload" not in LINES[line]:
        return 0
    shape = model_shape(MODEL)
    return shape.layers * tokens // ring_of(line) * shape.hidden * BF16_BYTES


def is_the_same(found_bytes: int, kept_bytes: int) -> bool:
    """Whether a peak is the one that was kept; of another PyTorch, whose kernels keep otherwise, to 5%."""
    kept_with = json.loads(FILE.read_text(encoding="utf-8"))["torch"]
    if kept_with == VERSION:
        return found_bytes == kept_bytes
    return abs(found_bytes / kept_bytes - 1) < 0.05


def recorded(kind: str = "peak_bytes") -> dict[str, dict[int, int]]:
    """What was kept, by line and tokens: "peak_bytes", or "reserved_bytes" of the caching allocator."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    return {line: {int(n): size for n, size in curve.items()} for line, curve in kept.items()}


if __name__ == "__main__":
    kinds: dict[str, dict[str, dict[str, int]]] = {"peak_bytes": {}, "reserved_bytes": {}}
    for each in LINES:
        found = {str(n): simulated(each, n) for n in LENGTHS}
        for kind, curves in kinds.items():
            curves[each] = {n: getattr(one, kind) for n, one in found.items()}
    FILE.write_text(
        json.dumps({"model": MODEL, "torch": VERSION, **kinds}, indent=1) + "\n",
        encoding="utf-8",
    )
