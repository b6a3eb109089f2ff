"""The course's stack of a fine-tuning step beside peft and bitsandbytes: losses and memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from utils.memory import Category, measure
from utils.models.finetune import ALL_LINEAR, METHODS, build_finetune, finetune_step
from utils.models.pretrained import load_base
from utils.techniques import LoraLinear, adam_state_bytes, optimizer_bytes
from utils.techniques.lora import add_lora
from utils.techniques.quantization import quantize_linears

pytestmark = pytest.mark.deepspeed  # peft imports it where it is installed

TINY = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


def losses(model: nn.Module, steps: int = 6) -> Tensor:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, 128, (2, 32))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("quantization", [None, "nf4", "nf4-dq"])
def test_the_same_losses_as_peft_on_bitsandbytes(tmp_path, quantization: str | None) -> None:
    import peft

    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(tmp_path)
    ours = load_base(tmp_path, dtype=torch.float32)
    if quantization:
        quantize_linears(
            ours, double_quantization=quantization == "nf4-dq", compute_dtype=torch.float32
        )
    add_lora(ours, rank=8, alpha=16, targets=("q_proj", "v_proj"))
    base = load_base(tmp_path, quantization=quantization, dtype=torch.float32)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    with warnings.catch_warnings():  # peft asks transformers by a name that it has replaced
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        theirs = peft.get_peft_model(base, config)
    mine = [m for m in ours.modules() if isinstance(m, LoraLinear)]
    other = [m for m in theirs.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    for a, b in zip(mine, other, strict=True):
        a.down.weight.data.copy_(b.lora_A["default"].weight)
    # In eval mode bitsandbytes has a kernel for CPUs that rounds to bf16.
    found, wanted = losses(ours.train()), losses(theirs.train())
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-6, atol=0)
    # Then Adam turns the rounding of matmuls in another order into whole steps of tiny gradients.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


ADAPTERS = [name for name, method in METHODS.items() if not method.whole]


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_method_runs_and_trains_its_adapters_alone(method: str) -> None:
    model, optimizer = build_finetune(TINY, method)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * TINY.num_hidden_layers
    assert all(".down." in name or ".up." in name for name in trained)
    before = copy.deepcopy([p for p in model.parameters() if p.requires_grad])
    finetune_step(model, optimizer, 2, 16)
    finetune_step(model, optimizer, 2, 16)
    after = [p for p in model.parameters() if p.requires_grad]
    assert not any(map(torch.equal, before, after))


def test_checkpointing_keeps_fewer_activations() -> None:
    kept = {}
    for method in ("QLoRA", "QLoRA + checkpointing"):
        model, optimizer = build_finetune(TINY, method)
        run = measure(
            lambda m=model, o=optimizer: finetune_step(m, o, 2, 64),
            model=model,
            optimizer=optimizer,
            timed_steps=0,
        )
        start = next(s.start_ns for s in run.timeline.spans if s.name == "backward")
        kept[method] = run.timeline.at(start)[Category.ACTIVATIONS]
    assert kept["QLoRA + checkpointing"] < kept["QLoRA"] / 2


def test_a_full_fine_tune_has_sixteen_bytes_of_states_a_parameter() -> None:
    model, optimizer = build_finetune(TINY, "full fine-tune")
    run = measure(
        lambda: finetune_step(model, optimizer, 2, 16),
        model=model,
        optimizer=optimizer,
        timed_steps=0,
    )
    count = sum(p.numel() for p in model.parameters())
    states = [Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE]
    series = run.timeline.series()
    most = sum(int(series[category].max()) for category in states)
    assert 16 * count <= most <= 16 * count + 4096
    dtypes = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    assert dtypes == {torch.float32}


def test_eight_bits_shrink_the_moments() -> None:
    held = {}
    for method in ("QLoRA", "QLoRA + 8-bit AdamW"):
        model, optimizer = build_finetune(TINY, method)
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        assert min(sizes) < 4096, "small tensors keep fp32 moments"
        finetune_step(model, optimizer, 2, 16)
        bits = METHODS[method].moment_bits
        assert optimizer_bytes(optimizer) == adam_state_bytes(sizes, bits)
        held[method] = type(optimizer).__name__
    assert held == {"QLoRA": "AdamW", "QLoRA + 8-bit AdamW": "AdamW8bit"}


def test_an_unknown_method() -> None:
    with pytest.raises(ValueError, match="'DoRA' is none of"):
        build_finetune(TINY, "DoRA")


def test_rank_and_targets_of_the_adapters() -> None:
    model, optimizer = build_finetune(TINY, "LoRA", rank=4, targets=ALL_LINEAR)
    adapted = [part for part in model.modules() if isinstance(part, LoraLinear)]
    assert len(adapted) == 7 * TINY.num_hidden_layers
    assert {part.down.weight.shape[0] for part in adapted} == {4}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * len(adapted)


def test_peft_turns_what_is_not_packed_into_fp32() -> None:
    """What lesson 06 breaks its run with: of a packed model embeddings, head and norms."""
    peft = pytest.importorskip("peft")
    model = LlamaForCausalLM(TINY).to(torch.bfloat16)
    model.is_loaded_in_4bit = True
    prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert {p.dtype for p in prepared.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in prepared.parameters())
