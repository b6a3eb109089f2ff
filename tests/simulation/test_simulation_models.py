"""Models of transformers, peft and torchvision, simulated as they are and run for real."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import nn

from evidence.validation.simulation_cpu import BATCH, LENGTH, both, state_maxima
from utils.memory import Category
from utils.simulation import simulate
from utils.techniques import add_lora, quantize_linears

# peft asks transformers by a name that it has begun to retire.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.usefixtures("one_thread", "counting"),
]

TOTAL = 0.01
VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 352}
CONFIGS = {
    "Llama": transformers.LlamaConfig(**SIZES, **GROUPED),
    "Mistral": transformers.MistralConfig(**SIZES, **GROUPED),
    "Qwen2": transformers.Qwen2Config(**SIZES, **GROUPED),
    "GPT-2": transformers.GPT2Config(**SIZES),
}


def build(name: str, change: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A causal language model, changed, with AdamW over what is trained."""
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="sdpa"
    ).train()
    model = change(model) if change else model
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def step(model: nn.Module, optimizer: Any) -> None:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def checkpointed(model: nn.Module) -> nn.Module:
    model.activation_checkpointing_enable()
    return model


def adapted(model: nn.Module) -> nn.Module:
    """peft's LoRA on the attention projections."""
    is_gpt2 = model.config.model_type == "gpt2"
    targets = ["c_attn"] if is_gpt2 else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=8, target_modules=targets, fan_in_fan_out=is_gpt2)
    return peft.get_peft_model(model, config)


def quantized(model: nn.Module) -> nn.Module:
    quantize_linears(model.to(torch.bfloat16))
    return add_lora(model, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize("change", [None, bf16, checkpointed, adapted])
@pytest.mark.parametrize("name", CONFIGS)
def test_language_models(name: str, change: Any) -> None:
    simulated, real = both(functools.partial(build, name, change), step)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=TOTAL)
    assert state_maxima(simulated) == state_maxima(real)


def test_a_quantized_language_model() -> None:
    simulated, real = both(functools.partial(build, "Llama", quantized), step)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=TOTAL)
    assert state_maxima(simulated) == state_maxima(real)


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v3_small", pytest.param("vit_b_16", marks=pytest.mark.slow)]
)
def test_torchvision(name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = getattr(torchvision.models, name)(num_classes=10)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def classify(model: nn.Module, optimizer: Any) -> None:
        images, labels = torch.randn(2, 3, 224, 224), torch.randint(10, (2,))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    simulated, real = both(make, classify)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=TOTAL)
    assert state_maxima(simulated) == state_maxima(real)


def test_seven_billion_parameters_fit_a_card_only_when_quantized() -> None:
    config = transformers.LlamaConfig(max_position_embeddings=2048)  # its defaults are Llama 2 7B

    def make(quantize: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        if quantize:
            quantize_linears(model)
        add_lora(model, targets=("q_proj", "v_proj"))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def train(model: nn.Module, optimizer: Any) -> None:
        tokens = torch.randint(32_000, (1, 512))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = {q: simulate(lambda q=q: make(q), train, device="RTX 4090") for q in (False, True)}
    sizes = {q: state_maxima(m)[Category.PARAMETERS] for q, m in found.items()}
    assert sizes[False] == pytest.approx(2 * 6_738_415_616, rel=0.01)
    assert sizes[True] < 0.31 * sizes[False]
    assert found[True].notes[0].startswith("Fits")
