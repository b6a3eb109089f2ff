"""The zoo's programs on small models, which also run for real on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
import zoo_cases as zoo
import zoo_programs as programs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SMALL: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {}
SIZES = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
BLOCK = {**SIZES, "intermediate_size": 256}
CAUSAL = hf.AutoModelForCausalLM
TEXTS = hf.AutoModelForSequenceClassification


def model_of(auto: Any, config: Any) -> Any:
    """A small model of transformers, without the random choices of dropout."""
    return zoo.adamw(auto.from_config(config))


def language(model: Any, optimizer: Any) -> None:
    zoo.language(model, optimizer, 2, 64)


def padded(model: Any, optimizer: Any) -> None:
    zoo.language(model, optimizer, 2, 64, attention_mask=zoo.short(2, 64))


LLAMA = hf.LlamaConfig(**BLOCK)
for _name, _config in {
    "GPT-2": hf.GPT2Config(vocab_size=1000, n_embd=128, n_layer=2, n_head=4),
    "Llama": LLAMA,
    "Qwen2": hf.Qwen2Config(**BLOCK, num_key_value_heads=2),
    "Mistral": hf.MistralConfig(**BLOCK, num_key_value_heads=2),
    "GPT-NeoX": hf.GPTNeoXConfig(**BLOCK),
    "Gemma": hf.GemmaConfig(**BLOCK, head_dim=32, num_key_value_heads=4),
    "OLMo": hf.OlmoConfig(**BLOCK),
    "Phi": hf.PhiConfig(**BLOCK),
}.items():
    SMALL[_name] = (partial(model_of, CAUSAL, _config), language)
SMALL["Llama, padded"] = (partial(model_of, CAUSAL, LLAMA), padded)
for _name, _config in {
    "BERT": hf.BertConfig(**BLOCK),
    "ELECTRA": hf.ElectraConfig(**BLOCK),
    "ModernBERT": hf.ModernBertConfig(**BLOCK, pad_token_id=0, cls_token_id=1, sep_token_id=2),
}.items():
    SMALL[_name] = (partial(model_of, TEXTS, _config), zoo.understand)
SMALL["T5"] = (
    partial(
        model_of,
        hf.AutoModelForSeq2SeqLM,
        hf.T5Config(
            decoder_start_token_id=0,
            vocab_size=1000,
            d_model=64,
            d_ff=128,
            num_layers=2,
            num_heads=4,
        ),
    ),
    zoo.translate,
)
_sees = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "image_size": 64,
}
SMALL["ViT"] = (
    partial(model_of, hf.AutoModelForImageClassification, hf.ViTConfig(**_sees)),
    partial(zoo.see, side=64, batch=4),
)


def adapted(config: Any) -> Any:
    return zoo.adamw(peft.get_peft_model(hf.LlamaForCausalLM(LLAMA), copy.deepcopy(config)))


for _name, _config in {
    "LoRA": peft.LoraConfig(target_modules=zoo.LINEAR),
    "IA3": peft.IA3Config(target_modules=zoo.LINEAR, feedforward_modules=[]),
    "LN tuning": peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
}.items():
    SMALL[f"peft {_name}"] = (partial(adapted, _config), language)


def pictures(model: Any, optimizer: Any) -> None:
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    zoo.update(F.cross_entropy(model(images), labels), optimizer)


for _name in (
    "resnet18",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "shufflenet_v2_x0_5",
    "convnext_tiny",
    "swin_t",
):
    SMALL[_name] = (
        lambda n=_name: zoo.adamw(getattr(torchvision.models, n)(num_classes=10)),
        pictures,
    )


def with_ema() -> Any:
    model, optimizer = zoo.adamw(programs.mlp(512))
    model.averaged = [copy.deepcopy(model)]
    return model, optimizer


def averaged() -> Any:
    model, optimizer = zoo.adamw(programs.mlp(512))
    model.averaged = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))]
    return model, optimizer


def distillation() -> Any:
    student, optimizer = zoo.adamw(programs.mlp(128))
    student.teacher = [programs.mlp(512).eval().requires_grad_(False)]
    return student, optimizer


def gan() -> Any:
    models = {"generator": programs.Generator(16), "discriminator": programs.discriminator(16)}
    return models, [torch.optim.Adam(m.parameters()) for m in models.values()]


SMALL["EMA"] = (with_ema, programs.ema_step)
SMALL["distillation"] = (distillation, programs.distill)
SMALL["GAN"] = (gan, programs.gan_step)
SMALL["gradient penalty"] = (gan, programs.penalty_step)


def encoder(dropout: float) -> Any:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=dropout, batch_first=True)
    return zoo.adamw(nn.TransformerEncoder(layer, 2))


for _dropout in (0.0, 0.1):
    SMALL[f"TransformerEncoder, dropout {_dropout}"] = (
        partial(encoder, _dropout),
        partial(programs.encode, length=64, width=128),
    )
SMALL["TransformerEncoder, padded"] = (
    partial(encoder, 0.0),
    partial(programs.encode, masked=True, length=64, width=128),
)
SMALL["checkpoint"] = (lambda: zoo.adamw(programs.mlp(256)), programs.checkpointed)
SMALL["gradients of each sample"] = (
    lambda: (programs.mlp(64), None),
    lambda m, o: programs.mapped(m, torch.optim.SGD(m.parameters())),
)
for _name in ("RMSprop", "NAdam", "Adagrad", "Rprop", "RAdam", "Adamax"):
    SMALL[f"torch.optim.{_name}"] = (
        lambda n=_name: (m := programs.mlp(256), getattr(torch.optim, n)(m.parameters())),
        lambda m, o: zoo.update(programs.summed(m), o),
    )
SMALL["GRU"] = (lambda: zoo.adamw(programs.Tagger(nn.GRU)), lambda m, o: programs.words(m, o))
SMALL["LSTM"] = (lambda: zoo.adamw(programs.Tagger(nn.LSTM)), lambda m, o: programs.words(m, o))
