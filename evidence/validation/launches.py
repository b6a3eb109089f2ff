"""`python -m evidence.validation.launches`: operations that launch kernels, counted on the code itself.

transformers' Llama and peft's LoRA run in the simulator, forward and backward, once with two blocks
and once with four; the difference is what a block launches. `utils.planner.launches` holds what
comes out, so that the planner needs no torch, and a test counts again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.simulation import simulate

# They make no kernel run: memory alone, or a word for the host.
SILENT = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "_local_scalar_dense",
        "lift_fresh",
        "_unsafe_view",
        "_reshape_alias",
        "set_",
        "resize_",
    }
)
DEVICE, HIDDEN, HEADS, LENGTH = "A100 80GB", 1024, 8, 256


class LaunchCounter(TorchDispatchMode):
    """Counts operations that launch a kernel, by phase; views and empty tensors launch none."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace not in ("prim", "profiler") and name not in SILENT and not func.is_view:
            self.counts[self.phase] += 1
        return out


@dataclass(frozen=True)
class Counted:
    """Launches of one block and of all that is beside the blocks, forward and backward."""

    block: tuple[int, int]
    ends: tuple[int, int]

    def __str__(self) -> str:
        return f"a block {self.block[0]} + {self.block[1]}, beside them {self.ends[0]} + {self.ends[1]}"


def training(targets: tuple[str, ...] = (), dropout: float = 0.0) -> Counted:
    """transformers' Llama; with `targets`, peft's LoRA of those matrices.

    Args:
        targets: Names of matrices as transformers has them: "q_proj".
        dropout: Of the adapters' input.
    """
    few, many = (_run(layers, targets, dropout) for layers in (2, 4))
    block = tuple((many[phase] - few[phase]) // 2 for phase in ("forward", "backward"))
    ends = few["forward"] - 2 * block[0], few["backward"] - 2 * block[1]
    return Counted((block[0], block[1]), ends)


def _run(layers: int, targets: tuple[str, ...], dropout: float) -> Counter[str]:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=32_000,
        use_cache=False,
    )
    counter = LaunchCounter()

    def build() -> tuple[nn.Module, None]:
        net: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()  # pyright: ignore[reportArgumentType]
        lora = peft.LoraConfig(
            r=8, target_modules=list(targets), lora_dropout=dropout, task_type="CAUSAL_LM"
        )
        return (peft.get_peft_model(net, lora) if targets else net), None

    def step(net: nn.Module, _: None) -> None:
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        counter.phase, counter.counts = "forward", Counter()
        with counter:
            loss = net(input_ids=tokens, labels=tokens).loss
            counter.phase = "backward"
            loss.backward()

    simulate(build, step, device=DEVICE)
    return counter.counts


class DecodedBlock(nn.Module):
    """A Llama block for one token beside a cache, of single operations: plain PyTorch as it reads.

    The operations are those that PyTorch's post on fast generation starts from: norms and rotary
    embedding in float32, one matrix for q, k and v, a cache that is written at the token's place,
    attention under a boolean mask.
    """

    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.norms = nn.ParameterList([torch.ones(HIDDEN) for _ in range(2)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, False), nn.Linear(HIDDEN, HIDDEN, False)
        self.gate, self.up = (nn.Linear(HIDDEN, 3 * HIDDEN, False) for _ in range(2))
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, False)
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.register_buffer("keys", torch.zeros(1, HEADS, LENGTH, width))
        self.register_buffer("values", torch.zeros(1, HEADS, LENGTH, width))

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        """One token through the block."""
        parts = self.qkv(_norm(x, self.norms[0])).view(1, 1, 3 * HEADS, -1).split(HEADS, 2)
        q, k = (_rotated(part, angles).transpose(1, 2) for part in parts[:2])
        self.keys[:, :, place] = k
        self.values[:, :, place] = parts[2].transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).contiguous().view(1, 1, HIDDEN))
        h = _norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
    return scaled.type_as(x) * weight


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs, cosine, sine = x.float().unflatten(-1, (-1, 2)), angles[..., 0], angles[..., 1]
    first, second = pairs[..., 0], pairs[..., 1]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.stack(turned, -1).flatten(-2).type_as(x)


def decoding() -> int:
    """Launches of one block for one token in plain PyTorch."""
    counter = LaunchCounter()

    def build() -> tuple[nn.Module, None]:
        return DecodedBlock().to(torch.bfloat16), None

    def step(net: nn.Module, _: None) -> None:
        x = torch.zeros(1, 1, HIDDEN, dtype=torch.bfloat16)
        angles = torch.zeros(1, 1, 1, HIDDEN // HEADS // 2, 2, dtype=torch.bfloat16)
        mask, place = (
            torch.ones(1, 1, 1, LENGTH, dtype=torch.bool),
            torch.zeros(1, dtype=torch.long),
        )
        counter.counts = Counter()
        with torch.no_grad(), counter:
            net(x, angles, mask, place)

    simulate(build, step, device=DEVICE)
    return counter.counts["forward"]


def main() -> None:
    """Print what `utils.planner.launches` holds."""
    print(f"transformers' Llama: {training()}")
    print(f"with peft on one matrix: {training(('q_proj',))}")
    print(f"with peft on two: {training(('q_proj', 'v_proj'))}")
    print(f"the same with dropout: {training(('q_proj', 'v_proj'), 0.05)}")
    print(f"a block that decodes one token: {decoding()}")


if __name__ == "__main__":
    main()
