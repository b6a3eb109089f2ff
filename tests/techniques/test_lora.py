"""Adapters against peft's, and merging them into the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from utils.models import Transformer, TransformerConfig
from utils.techniques import LoraLinear, NF4Linear, add_lora, merge_lora, quantize_linears

TINY = TransformerConfig(vocabulary=64, hidden=64, layers=2, heads=4, feedforward=128)
STEPS = 20


def losses(model: nn.Module, accumulation: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of each of 20 steps; its tokens are cut into `accumulation` parts, whose gradients add up."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    tokens = torch.randint(0, 64, (4, 17))
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_of(model, part, dtype) / accumulation for part in tokens.chunk(accumulation)]
        for loss in parts:
            loss.backward()
        optimizer.step()
        found.append(sum(part.detach() for part in parts))
    return torch.stack(found)


def loss_of(model: nn.Module, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-4)])
def test_twenty_steps_are_pefts(accumulation: int, dtype: torch.dtype, bar: float) -> None:
    """bf16: the frozen weights are kept in it, and adapters, kept in fp32, compute in it."""
    import peft

    torch.manual_seed(0)
    base = Transformer(TINY)
    ours = Transformer(TINY)
    ours.load_state_dict(base.state_dict())
    add_lora(ours.to(dtype), rank=4, alpha=12)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["query", "value"])
    theirs = peft.get_peft_model(base.to(dtype), config)
    for layer, other in zip(adapters(ours), peft_layers(theirs), strict=True):
        assert layer.base.weight.dtype is dtype
        assert layer.down.weight.dtype is other.lora_A["default"].weight.dtype is torch.float32
        layer.down.weight.data.copy_(other.lora_A["default"].weight)
        layer.up.weight.data.copy_(other.lora_B["default"].weight)
    found, wanted = (losses(model, accumulation, dtype) for model in (ours, theirs))
    assert wanted[-1] < wanted[0]
    torch.testing.assert_close(found, wanted, rtol=bar, atol=0)


def adapters(model: nn.Module) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def peft_layers(model: nn.Module) -> list[nn.Module]:
    import peft

    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]


def trained(packed: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(TINY)
    if packed:
        quantize_linears(model, compute_dtype=torch.float32)
    add_lora(model, rank=4)
    losses(model)
    return model.eval()


def test_merge_and_unmerge() -> None:
    model, tokens = trained(packed=False), torch.arange(16)[None]
    before, weights = model(tokens), [a.base.weight.clone() for a in adapters(model)]
    for layer in adapters(model):
        layer.merge()
    torch.testing.assert_close(model(tokens), before, rtol=1e-5, atol=1e-5)
    assert not torch.equal(adapters(model)[0].base.weight, weights[0])
    for layer in adapters(model):
        layer.unmerge()
    torch.testing.assert_close(model(tokens), before, rtol=1e-5, atol=1e-5)
    for layer, weight in zip(adapters(model), weights, strict=True):
        torch.testing.assert_close(layer.base.weight, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_merge_lora_leaves_plain_layers(packed: bool) -> None:
    model, tokens = trained(packed), torch.arange(16)[None]
    before = model(tokens)
    merge_lora(model)
    assert not adapters(model)
    torch.testing.assert_close(model(tokens), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no adapters to merge"):
        merge_lora(model)


def test_a_merged_layer_is_replaced_without_a_second_update() -> None:
    layer = LoraLinear(nn.Linear(8, 8), rank=2)
    nn.init.normal_(layer.up.weight)
    x = torch.randn(3, 8)
    wanted = layer(x)
    layer.merge()
    torch.testing.assert_close(layer.merged_linear()(x), wanted)


def test_what_cannot_be_merged_is_refused() -> None:
    layer = LoraLinear(nn.Linear(4, 4), rank=1)
    with pytest.raises(ValueError, match="not merged"):
        layer.unmerge()
    layer.merge()
    with pytest.raises(ValueError, match="merged already"):
        layer.merge()
    with pytest.raises(ValueError, match="merge_lora"):
        LoraLinear(NF4Linear(torch.randn(64, 64)), rank=1).merge()
