"""`python -m utils.lessons.lesson_18.records.growth`: the peaks and reserved bytes of lesson 18's steps, kept."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from utils.catalog import model_shape
from utils.memory.measurement import Measurement

from ..at_size import of_one_rank
from ..published import ALST_TOKENS, LLAMA_3_ALONE_FLOPS, LLAMA_3_FLOPS, QWEN3_8B, TRL_GB
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
    "chunked loss, checkpoints": TWO,
    "checkpoints on the host": (*TWO, "offload"),
    "on the host, MLP tiled": (*TWO, "offload", "tiled MLP"),
    "MLP tiled": (*TWO, "tiled MLP"),
    "ring of 8": TWO,
    "ring of 8, MLP tiled": (*TWO, "tiled MLP"),
    "ring of 8, on the host": (*TWO, "offload"),
    "ring of 16": TWO,
}
_, _CHECKPOINTS, _HOST, _HOST_TILED, _, _RING, _RING_TILED, _RING_HOST, _ = LINES
DRAWN = (_CHECKPOINTS, _HOST, _HOST_TILED, _RING, _RING_TILED)
# Of each curve, at which lengths the picture writes its height, and on which side.
TOLD = {
    _CHECKPOINTS: ("above", 2**17), _HOST: ("above", 2**18), _HOST_TILED: ("above", 2**18, 2**19),
    _RING: ("above", 2**19, 2**20), _RING_TILED: ("below", 2**20),
}  # fmt: skip
# The rows of the last table: from what fits at 128k to what fits at 1M.
VERDICT = (
    (_CHECKPOINTS, 2**17), (_HOST_TILED, 2**19), (_RING_TILED, 2**19), (_HOST_TILED, 2**20), (_RING, 2**20), (_RING_TILED, 2**20),
)  # fmt: skip

# Above what is reserved: none, half of torchtitan's first row, that row, and twice.
MARGINS = (0, 0.05, 0.10, 0.20)

# Published runs that the simulator was not set on, with the lengths of a sequence that are simulated.
OUTSIDE = {"TRL": (2**20,), "ALST": (250_000, 500_000)}
_STATES_AWAY = (
    1024  # ranks: what one holds of the states is next to nothing, as where they wait on the host
)


def ring_of(line: str) -> int:
    """How many GPUs share one sequence in one of `LINES`; 1 without a ring."""
    return int(line.removeprefix("ring of ").partition(",")[0]) if "ring of " in line else 1


def simulated(line: str, tokens: int) -> Measurement:
    """A step of one rank, of one of `LINES`, at a length of the sequence."""
    if (ring := ring_of(line)) == 1:
        return of_one_rank(MODEL, tokens, *LINES[line])
    return of_one_rank(MODEL, tokens // ring, *LINES[line], attend=ring_attention, ranks=ring)


def simulated_outside(run: str, tokens: int) -> Measurement:
    """A step of one GPU as in one of the runs `OUTSIDE`, at a length of the sequence."""
    if (
        run == "TRL"
    ):  # eight GPUs share a sequence; theirs gather keys and values, these go around a ring
        return of_one_rank(QWEN3_8B, tokens // RANKS, *LINES[_RING_HOST], attend=ring_attention)
    return of_one_rank("llama-3-8b", tokens, *LINES[_HOST_TILED], ranks=_STATES_AWAY)


def longest(curve: dict[int, int], room_bytes: float) -> float:
    """Tokens at which a curve's bytes reach the room, on a straight line through its two longest lengths."""
    (low, fewer), (high, more) = sorted(curve.items())[-2:]
    return low + (high - low) * (room_bytes - fewer) / (more - fewer)


def fits(reserved_bytes: int, room_bytes: int) -> str:
    """Whether a step fits a GPU with each of the `MARGINS` above what it reserves."""
    return "".join(
        f"{'fits' if (1 + part) * reserved_bytes < room_bytes else 'no':>6}" for part in MARGINS
    )


def on_host_bytes(line: str, tokens: int) -> int:
    """Bytes of blocks' inputs that one GPU pins in host memory, in one of `LINES`: each a power of two."""
    if "offload" not in LINES[line]:
        return 0
    shape = model_shape(MODEL)
    one_bytes = tokens // ring_of(line) * shape.hidden * BF16_BYTES
    return shape.layers * 2 ** (one_bytes - 1).bit_length()


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


def recorded_outside(run: str, kind: str = "reserved_bytes") -> dict[int, int]:
    """What was kept of one of the runs `OUTSIDE`, by tokens of a sequence."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))["outside"][run]
    return {int(tokens): sizes[kind] for tokens, sizes in kept.items()}


def told_outside(room_bytes: float) -> str:
    """A line for each of the runs `OUTSIDE`: what is simulated, beside what was published; and Llama 3's speeds.

    Args:
        room_bytes: of a GPU.
    """
    gib, alone = 2**30, recorded_outside("ALST")[ALST_TOKENS]
    peak, reserved = (
        recorded_outside("TRL", kind)[2**20] for kind in ("peak_bytes", "reserved_bytes")
    )
    kv = 2 * QWEN3_8B.key_value_heads * QWEN3_8B.head_dim * 2**20 * BF16_BYTES
    least, most = peak + kv, reserved + kv
    return (
        f"TRL:  {least / gib:.1f} GiB at the peak and {most / gib:.1f} reserved, {kv / gib:.1f} of them KV (simulated); "
        f"{TRL_GB} GB, or {TRL_GB * 1e9 / gib:.1f} GiB, and not said which (published): {TRL_GB * 1e9 / least - 1:+.0%} or {TRL_GB * 1e9 / most - 1:+.0%}\n"
        f"ALST: {alone / gib:.1f} GiB reserved at {ALST_TOKENS:,} tokens (simulated), which ran (published): the GPU's {room_bytes / gib:.1f} are {room_bytes / alone - 1:.0%} above that\n"
        f"Llama 3: {LLAMA_3_ALONE_FLOPS / 1e12:.0f} TFLOP/s at 8k, not shared, {LLAMA_3_FLOPS / 1e12:.0f} at 128k, shared by 16 (published): {LLAMA_3_FLOPS / LLAMA_3_ALONE_FLOPS:.2f}"
    )


def told_verdict(room_bytes: int) -> str:
    """The table of `VERDICT`: what a GPU reserves, with which margins that fits, and what eight pin on their host.

    Args:
        room_bytes: of a GPU.
    """
    gib, held = 2**30, recorded("reserved_bytes")
    margins = "".join(f"{f'+{part:.0%}':>6}" for part in MARGINS)
    head = (
        f"{MODEL}, chunked loss and checkpoints, GPUs of {room_bytes / gib:.1f} GiB; reserved: simulated\n"
        f"{'tokens':<30}{'GiB reserved':>14}{margins}{'GiB pinned by 8 GPUs':>22}"
    )
    rows = (
        f"{tokens // 1024:>5}k {line:<25}{held[line][tokens] / gib:>12.1f}{fits(held[line][tokens], room_bytes)}"
        f"{RANKS * on_host_bytes(line, tokens) / gib:>22,.0f}"
        for line, tokens in VERDICT
    )
    return "\n".join((head, *rows))


if __name__ == "__main__":
    kinds: dict[str, dict[str, dict[str, int]]] = {"peak_bytes": {}, "reserved_bytes": {}}
    for each in LINES:
        found = {str(n): simulated(each, n) for n in LENGTHS}
        for kind, curves in kinds.items():
            curves[each] = {n: getattr(one, kind) for n, one in found.items()}
    beside = {
        run: {str(n): simulated_outside(run, n) for n in all_n} for run, all_n in OUTSIDE.items()
    }
    outside = {
        run: {n: {kind: getattr(one, kind) for kind in kinds} for n, one in found.items()}
        for run, found in beside.items()
    }
    kept = {"model": MODEL, "torch": VERSION, **kinds, "outside": outside}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
