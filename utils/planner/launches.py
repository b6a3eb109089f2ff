"""Host time of eager PyTorch: operations that launch kernels, each at the host's own pace.

A program without graphs or fused kernels asks the host for every single operation. The host runs
ahead of the device, so a pass takes the longer of both: short sequences wait for the host. The
counts come from `python -m evidence.validation.launches`, which runs transformers' and peft's own code
in the simulator; a test counts again.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.planner.adapters import Lora

# A block that decodes one token in plain PyTorch launches 49 operations (counted as above), and 25
# are beside the 32 blocks of Llama 7B: embedding, places, the last norm, head and sampling. Such a
# program gave 25.5 tokens/s on an A100, "heavily CPU overhead bound" (PyTorch, Accelerating
# Generative AI II, 30 November 2023, "Starting Point").
DECODED_LAUNCHES = 49
LAUNCH_SECONDS = 1 / 25.5 / (32 * DECODED_LAUNCHES + 25)


@dataclass(frozen=True)
class Launches:
    """How many operations eager code launches.

    Attributes:
        forward, backward: Of one block whose parameters all train.
        frozen_backward: Of one block whose parameters are frozen, adapters apart.
        adapter_forward, adapter_backward: Of one adapter.
        dropout: Of an adapter's dropout, in either pass.
        unpack: To unpack one quantized matrix, in either pass.
        ends: Beside the blocks, in either pass: embedding, last norm, head, loss.
    """

    forward: int
    backward: int
    frozen_backward: int
    adapter_forward: int
    adapter_backward: int
    dropout: int
    unpack: int
    ends: int

    def passes(self, lora: Lora | None, matrices: int) -> tuple[int, int]:
        """Of one block, forward and backward.

        Args:
            lora: Its adapters; None where all parameters train.
            matrices: How many a block has, which matters where they are quantized.
        """
        if lora is None:
            return self.forward, self.backward
        count, extra = len(lora.targets), self.dropout * lora.adapter_dropout
        unpacked = self.unpack * matrices * (lora.base != "bf16")
        forward = self.forward + count * (self.adapter_forward + extra) + unpacked
        backward = self.frozen_backward + count * (self.adapter_backward + extra) + unpacked
        return forward, backward


# transformers' Llama and peft's LoRA. bitsandbytes unpacks a matrix in one kernel, and its scales,
# quantized themselves, in two more (functional.py, dequantize_4bit).
EAGER = Launches(
    forward=38,
    backward=80,
    frozen_backward=60,
    adapter_forward=6,
    adapter_backward=11,
    dropout=1,
    unpack=3,
    ends=26,
)
