"""A streamed step on a clock of its own: the seconds of lab 07's last exercise, the same everywhere.

Nothing is computed. The clock moves where the program waits or computes; the link works on beside.
"""

from __future__ import annotations

from collections.abc import Sequence

SLOTS = 2  # blocks whose weights have room on the device


class RunError(Exception):
    """The program did something that a real device would answer with garbage or out of memory."""


class Ticket:
    """A transfer that has begun."""

    def __init__(self, run: StreamedRun, ready: float) -> None:
        self._run, self._ready = run, ready

    def wait(self) -> None:
        """Stand still until it is there, and once more for the call itself."""
        self._run.waited(self._ready)


class StreamedRun:
    """One step of a model whose blocks stream: forward from the first, backward from the last.

    Attributes:
        blocks: How many.
        tensors: In each block.
        seconds: On the clock so far.
        waits: Calls of `wait` so far.
        idle_seconds: Of the device so far.

    Args:
        tensor_seconds: That one tensor of a block takes on the link, for each tensor.
        compute_seconds: Of a block's forward; backward takes three times as long.
        wait_seconds: That each call of `wait` costs.
    """

    def __init__(
        self,
        blocks: int,
        tensor_seconds: Sequence[float],
        compute_seconds: float,
        wait_seconds: float,
    ) -> None:
        self.blocks, self.tensors = blocks, len(tensor_seconds)
        self.seconds = self.idle_seconds = 0.0
        self.waits = 0
        self._times, self._compute, self._wait = list(tensor_seconds), compute_seconds, wait_seconds
        self._free = {"up": 0.0, "down": 0.0}
        self._arrives: dict[int, dict[int, float]] = {}
        self._done: list[tuple[str, int]] = []
        self._sent: dict[tuple[int, int], float] = {}
        self._waited_until = 0.0

    def send_up(self, block: int, tensor: int) -> Ticket:
        """Begin to bring one tensor of a block to the device."""
        self._check(block, tensor)
        here = self._arrives
        if block not in here and len(here) == SLOTS:
            raise RunError(
                f"block {block} is asked for while {sorted(here)} are on the device: there is room "
                f"for {SLOTS}, so release one first"
            )
        here.setdefault(block, {})[tensor] = self._begin("up", tensor)
        return Ticket(self, here[block][tensor])

    def send_down(self, block: int, tensor: int) -> Ticket:
        """Begin to send one gradient of a block to the host."""
        self._check(block, tensor)
        if ("backward", block) not in self._done:
            raise RunError(f"a gradient of block {block} leaves before its backward has run")
        self._sent[block, tensor] = self._begin("down", tensor)
        return Ticket(self, self._sent[block, tensor])

    def forward(self, block: int) -> None:
        """Compute a block's forward pass."""
        self._work("forward", block, self._compute)

    def backward(self, block: int) -> None:
        """Compute a block's forward pass again, and its backward pass."""
        self._work("backward", block, 3 * self._compute)

    def release(self, block: int) -> None:
        """Give back the room of a block's weights."""
        if self._arrives.pop(block, None) is None:
            raise RunError(f"block {block} is released, and is not on the device")

    def check_end(self) -> None:
        """All passes ran in order, and every gradient has arrived."""
        if self._done != self._order():
            raise RunError(f"{len(self._done)} passes ran, and a step has {2 * self.blocks}")
        missing = self.blocks * self.tensors - len(self._sent)
        if missing:
            raise RunError(f"{missing} gradients were never sent down")
        if max(self._sent.values()) > self.seconds + 1e-9:
            raise RunError(
                "the step ends while gradients are still on their way: wait for the last"
            )

    def waited(self, ready: float) -> None:
        """The program stood still until then."""
        self.waits += 1
        until = max(self.seconds, ready) + self._wait
        self.idle_seconds += until - self.seconds
        self.seconds = until

    def _order(self) -> list[tuple[str, int]]:
        numbers = range(self.blocks)
        return [("forward", n) for n in numbers] + [("backward", n) for n in reversed(numbers)]

    def _begin(self, way: str, tensor: int) -> float:
        self._free[way] = max(self.seconds, self._free[way]) + self._times[tensor]
        return self._free[way]

    def _work(self, kind: str, block: int, seconds: float) -> None:
        wanted = (
            self._order()[len(self._done)] if len(self._done) < 2 * self.blocks else ("nothing", 0)
        )
        if (kind, block) != wanted:
            raise RunError(f"{kind} of block {block} runs where {wanted[0]} of {wanted[1]} is due")
        arrived = self._arrives.get(block, {})
        if len(arrived) < self.tensors:
            raise RunError(
                f"{kind} of block {block} runs, and {len(arrived)} of its {self.tensors} tensors were asked for"
            )
        if max(arrived.values()) > self.seconds + 1e-9:
            raise RunError(
                f"{kind} of block {block} reads weights that are still on their way: wait for them"
            )
        self.seconds += seconds
        self._done.append((kind, block))

    def _check(self, block: int, tensor: int) -> None:
        if not (0 <= block < self.blocks and 0 <= tensor < self.tensors):
            raise RunError(f"there is no tensor {tensor} of block {block}")


def best_schedule(run: StreamedRun) -> None:
    """The par: the next block's weights come while one computes, and one wait ends all gradients.

    Forward's last two blocks stay: there is room for both, and backward begins with them.
    """
    last = _ask(run, 0)
    coming = {0: last}
    for block in range(run.blocks):
        _arrive(coming, block)
        if block + 1 < run.blocks:
            coming[block + 1] = _ask(run, block + 1)
        run.forward(block)
        if block < run.blocks - SLOTS:
            run.release(block)
    for block in reversed(range(run.blocks)):
        _arrive(coming, block)
        if 0 < block < run.blocks - 1:
            coming[block - 1] = _ask(run, block - 1)
        run.backward(block)
        last = [run.send_down(block, tensor) for tensor in range(run.tensors)][-1]
        run.release(block)
    last.wait()


def _arrive(coming: dict[int, Ticket], block: int) -> None:
    if block in coming:
        coming.pop(block).wait()


def _ask(run: StreamedRun, block: int) -> Ticket:
    return [run.send_up(block, tensor) for tensor in range(run.tensors)][-1]
