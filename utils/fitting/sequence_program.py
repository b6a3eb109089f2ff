"""The parts of a training program in which several cards share the tokens of one text.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each card has some tokens and all heads, but
while it attends all tokens and some heads. FSDP2 shares the states over all cards beside it. Copied into
`train.py` as those of `program` are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Exchange(torch.autograd.Function):
    """An all-to-all among the cards of a group: they divide dimension `cut`, and put `join` together.

    Its gradient takes the same way back.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cut: int, join: int, group: Any) -> torch.Tensor:
        ctx.back = join, cut, group
        parts = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=group)
        del parts  # else it is there beside the two of the next line
        return torch.cat(arrived.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Exchange.apply(gradients[0], *ctx.back), None, None, None


def share_heads(model: Any, cards: int) -> None:
    """Attend to whole texts whose tokens `cards` neighbouring ranks share: each has some heads, in place.

    `model` is one of transformers. Key-value heads that are fewer than the cards are copied.
    """
    from transformers import AttentionInterface

    is_whole = cards == dist.get_world_size()
    group = dist.group.WORLD if is_whole else dist.new_subgroups(cards)[0]

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, mask: Any = None,
        scaling: float | None = None, dropout: float = 0.0, **others: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        if mask is not None or others.get("sliding_window"):
            raise ValueError(
                "Heads are shared where each token sees all that come before it alone."
            )
        if (copies := cards // key.shape[1]) > 1:
            key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
        query, key, value = (Exchange.apply(part, 1, 2, group) for part in (query, key, value))
        result = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return Exchange.apply(result.transpose(1, 2), 1, 2, group), None

    AttentionInterface.register("ulysses", attend)
    model.set_attn_implementation("ulysses")


def share_tokens(model: Any, cards: int) -> None:
    """Have forward take whole texts and run this rank's part of their tokens, in place.

    A rank's loss is the sum over its own tokens, times `cards`, by the number of all. The mean over
    ranks is then the mean over all tokens, and so are the gradients, which FSDP2 averages over ranks.
    """
    forward, rank = model.forward, dist.get_rank() % cards

    def run_own(input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> Any:
        # Shifted before the cut: the last token of a part learns the first one of the next part.
        following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        own = {"input_ids": input_ids, "labels": labels, "position_ids": places}
        own["shift_labels"] = following
        found = forward(
            **{name: whole.chunk(cards, 1)[rank].contiguous() for name, whole in own.items()},
            num_items_in_batch=(following != -100).sum(),
            **others,
        )
        found.loss = found.loss * cards
        return found

    model.forward = run_own


def chunk_own_loss(model: Any) -> None:
    """`chunk_loss` of labels that are shifted, as `share_tokens` gives them, in place."""
    from transformers.modeling_outputs import CausalLMOutput

    def forward(
        input_ids: torch.Tensor, labels: torch.Tensor, shift_labels: torch.Tensor,
        num_items_in_batch: torch.Tensor, **others: Any,
    ) -> CausalLMOutput:  # fmt: skip
        hidden = model.base_model(input_ids=input_ids, use_cache=False, **others).last_hidden_state
        head = model.get_output_embeddings()
        total = nn.functional.linear_cross_entropy(
            hidden.flatten(0, 1),
            head.weight.to(hidden.dtype),
            shift_labels.flatten(),
            linear_bias=head.bias,
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return CausalLMOutput(loss=total / num_items_in_batch)  # pyright: ignore[reportArgumentType]

    model.forward = forward
