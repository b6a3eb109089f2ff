"""NF4 layers against bitsandbytes' own, and low-rank adapters against their definition."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.techniques import LoraLinear, NF4Linear, add_lora, quantize_linears

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bitsandbytes

TINY = TransformerConfig(vocabulary=64, hidden=128, layers=2, heads=4, feedforward=256)


def pair(double: bool, dtype: torch.dtype) -> tuple[NF4Linear, nn.Module]:
    """The same random weights, in our layer and in bitsandbytes'."""
    linear = nn.Linear(256, 192)
    theirs = bitsandbytes.nn.Linear4bit(
        256, 192, compute_dtype=dtype, compress_statistics=double, quant_type="nf4"
    )
    theirs.load_state_dict(linear.state_dict())
    options = {"double_quantization": double, "compute_dtype": dtype}
    return NF4Linear.from_linear(linear, **options), theirs.to("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
def test_nf4_is_bitsandbytes_to_the_bit(double: bool, dtype: torch.dtype) -> None:
    ours, theirs = pair(double, dtype)
    x = torch.randn(3, 256, dtype=dtype, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    out, wanted = ours(x), theirs(same)
    (out * out).sum().backward()
    (wanted * wanted).sum().backward()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(out, wanted)
    assert torch.equal(x.grad, same.grad)


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4 + 8 / 64 + 32 / 64 / 256)])
def test_bits_per_weight(double: bool, bits: float) -> None:
    layer = NF4Linear(torch.randn(512, 1024), double_quantization=double)
    table = 256 * 4 + 4 if double else 0  # double quantization's 256 values and its mean
    kept = [*layer.parameters(), *layer.buffers()]
    assert sum(t.nbytes for t in kept) == 512 * 1024 * bits / 8 + table


def test_the_scales_survive_a_change_of_dtype() -> None:
    layer = NF4Linear(torch.randn(64, 64), compute_dtype=torch.float32)
    before = layer.unpacked(torch.float32)
    assert torch.equal(layer.to(torch.bfloat16).unpacked(torch.float32), before)


def test_the_result_has_the_inputs_dtype() -> None:
    layer = NF4Linear(torch.randn(32, 64), torch.randn(32))
    assert layer(torch.randn(2, 64)).dtype is torch.float32
    with torch.autocast("cpu", torch.float16):
        assert layer(torch.randn(2, 64).half()).dtype is torch.float16


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        NF4Linear(torch.ones(4))
    with pytest.raises(ValueError, match=r"int64"):
        NF4Linear(torch.ones(4, 4, dtype=torch.int64))


def test_quantize_leaves_the_head() -> None:
    model = quantize_linears(Transformer(TINY))
    packed = [path for path, layer in model.named_modules() if isinstance(layer, NF4Linear)]
    assert len(packed) == 7 * TINY.layers
    assert isinstance(model.head, nn.Linear)
    with pytest.raises(ValueError, match="No linear layer"):
        quantize_linears(nn.LayerNorm(4))


def test_lora_starts_as_the_frozen_layer_and_learns_its_update() -> None:
    base = nn.Linear(16, 8)
    layer = LoraLinear(base, rank=2, alpha=6)
    x = torch.randn(5, 16)
    assert torch.equal(layer(x), base(x))
    nn.init.normal_(layer.up.weight)
    update = 3 * layer.up.weight @ layer.down.weight
    wanted = x @ (base.weight + update).T + base.bias
    torch.testing.assert_close(layer(x), wanted)


def test_add_lora_trains_the_adapters_only() -> None:
    model = add_lora(Transformer(TINY), rank=4)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == TINY.layers * 2 * 4 * (2 * TINY.hidden)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match=r"Their names: .*query"):
        add_lora(Transformer(TINY), targets=["nothing"])
    with pytest.raises(ValueError, match="rank is 0"):
        LoraLinear(nn.Linear(2, 2), rank=0)
