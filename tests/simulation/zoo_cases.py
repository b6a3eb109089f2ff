"""Programs as people write them, at full size, from configurations alone: nothing is loaded.

Each has a `build` and a `step` as `simulate` takes them. `values` are its stand-ins where it reads
values, `says` the words of the sentence that it ends in where it cannot be simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from torch import nn


@dataclass(frozen=True)
class Program:
    """A program of the zoo."""

    build: Callable[[], Any]
    step: Callable[..., Any]
    values: Any = None
    says: str = ""
    world: int = 1
    rank: int = 0
    small: bool = False  # whether `make test` runs it


ZOO: dict[str, Program] = {}
ON = ["cuda"]  # where the programs put their tensors
DEVICE = "A100 80GB"


def add(name: str, build: Any, step: Any, **how: Any) -> None:
    """Put a program into the zoo."""
    ZOO[name] = Program(build, step, **how)


def adamw(model: nn.Module, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in training mode with AdamW over what it trains."""
    trained = [p for p in model.train().parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, **how)


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """The end of every step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# --- transformers: one step of each family -------------------------------------------------------


def hub(auto: Any, config: Any, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    """A transformers model from a configuration, on the device."""
    return adamw(auto.from_config(config).to(ON[0], dtype), **how)


def language(model: Any, optimizer: Any, batch: int = 1, length: int = 512, **more: Any) -> None:
    """One step of a causal language model."""
    tokens = torch.randint(1000, (batch, length), device=ON[0])
    update(model(input_ids=tokens, labels=tokens, use_cache=False, **more).loss, optimizer)


def padded(model: Any, optimizer: Any) -> None:
    """The same, with a mask as of a padded batch."""
    language(model, optimizer, 4, 256, attention_mask=short(4, 256))


def short(batch: int, length: int) -> torch.Tensor:
    """The mask of a batch whose sequences end before its end."""
    mask = torch.ones(batch, length, dtype=torch.long, device=ON[0])
    mask[:, length // 2 :] = 0
    return mask


CAUSAL = {
    "GPT-2": hf.GPT2Config(),
    "GPT-2 XL": hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "Llama 2 7B": hf.LlamaConfig(),
    "Mistral 7B": hf.MistralConfig(sliding_window=None),
    "Qwen2 7B": hf.Qwen2Config(),
    "Qwen3 8B": hf.Qwen3Config(),
    "Gemma 7B": hf.GemmaConfig(),
    "Gemma 2 9B": hf.Gemma2Config(),
    "Phi 1": hf.PhiConfig(),
    "Phi 3": hf.Phi3Config(),
    "OPT": hf.OPTConfig(),
    "BLOOM": hf.BloomConfig(),
    "GPT-NeoX": hf.GPTNeoXConfig(num_hidden_layers=12),
    "Falcon": hf.FalconConfig(num_hidden_layers=12),
    "StableLM": hf.StableLmConfig(),
    "OLMo": hf.OlmoConfig(),
}
for _name, _config in CAUSAL.items():
    add(_name, partial(hub, hf.AutoModelForCausalLM, _config), language)
add("Llama 2 7B, padded", partial(hub, hf.AutoModelForCausalLM, hf.LlamaConfig()), padded)


def understand(model: Any, optimizer: Any) -> None:
    """One step of a classifier of texts."""
    tokens = torch.randint(1000, (16, 128), device=ON[0])
    mask = short(16, 128)
    labels = torch.zeros(16, dtype=torch.long, device=ON[0])
    with torch.autocast(ON[0]):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    update(loss, optimizer)


for _name, _config in {
    "BERT": hf.BertConfig(),
    "RoBERTa": hf.RobertaConfig(),
    "DistilBERT": hf.DistilBertConfig(),
    "DeBERTa v3": hf.DebertaV2Config(),
    "ELECTRA": hf.ElectraConfig(),
    "ModernBERT": hf.ModernBertConfig(),
}.items():
    _whole = partial(hub, hf.AutoModelForSequenceClassification, _config, torch.float32)
    add(_name, _whole, understand, small=_name == "BERT", values="DeBERTa" in _name or None)


def translate(model: Any, optimizer: Any) -> None:
    """One step from text to text."""
    tokens = torch.randint(1000, (8, 256), device=ON[0])
    update(model(input_ids=tokens, labels=tokens).loss, optimizer)


for _name, _config in {
    "T5": hf.T5Config(decoder_start_token_id=0),
    "BART": hf.BartConfig(),
    "Marian": hf.MarianConfig(),
}.items():
    add(_name, partial(hub, hf.AutoModelForSeq2SeqLM, _config, torch.float32), translate)


def hear(model: Any, optimizer: Any) -> None:
    """One step of Whisper."""
    sound = torch.randn(4, 80, 3000, device=ON[0])
    labels = torch.randint(1000, (4, 128), device=ON[0])
    update(model(input_features=sound, labels=labels).loss, optimizer)


add("Whisper", lambda: adamw(hf.WhisperForConditionalGeneration(hf.WhisperConfig()).cuda()), hear)


def transcribe(model: Any, optimizer: Any) -> None:
    """One step of Wav2Vec2 with CTC."""
    labels = torch.randint(1, 30, (2, 40), device=ON[0])
    update(model(torch.randn(2, 16000, device=ON[0]), labels=labels).loss, optimizer)


def wav2vec(masked: bool) -> Any:
    prob = 0.05 if masked else 0.0
    return adamw(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(mask_time_prob=prob)).cuda())


add("Wav2Vec2 with CTC", partial(wav2vec, False), transcribe, values={"max": 0, "*": 1})


def see(model: Any, optimizer: Any, side: int = 224, batch: int = 16) -> None:
    """One step of an image classifier of transformers."""
    images = torch.randn(batch, 3, side, side, device=ON[0])
    update(model(images, labels=torch.zeros(batch, dtype=torch.long, device=ON[0])).loss, optimizer)


for _name, _config in {
    "ViT": hf.ViTConfig(),
    "Swin": hf.SwinConfig(),
    "ConvNeXt": hf.ConvNextConfig(),
    "DINOv2": hf.Dinov2Config(image_size=224),
}.items():
    add(_name, partial(hub, hf.AutoModelForImageClassification, _config, torch.float32), see)


def pair(model: Any, optimizer: Any) -> None:
    """One step of CLIP."""
    tokens, images = (
        torch.randint(1000, (16, 77), device=ON[0]),
        torch.randn(16, 3, 224, 224, device=ON[0]),
    )
    update(model(input_ids=tokens, pixel_values=images, return_loss=True).loss, optimizer)


add("CLIP", lambda: adamw(hf.CLIPModel(hf.CLIPConfig()).cuda()), pair)


def segment(model: Any, optimizer: Any) -> None:
    """One step of SegFormer."""
    images, masks = (
        torch.randn(2, 3, 512, 512, device=ON[0]),
        torch.zeros(2, 512, 512, dtype=torch.long, device=ON[0]),
    )
    update(model(images, labels=masks).loss, optimizer)


add(
    "SegFormer",
    lambda: adamw(hf.SegformerForSemanticSegmentation(hf.SegformerConfig()).cuda()),
    segment,
)

# --- peft ----------------------------------------------------------------------------------------

LINEAR = ["q_proj", "v_proj"]
SMALL_LLAMA = hf.LlamaConfig(num_hidden_layers=8)


def adapted(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A Llama with peft's adapters."""
    model = hf.LlamaForCausalLM(SMALL_LLAMA).to(ON[0], dtype)
    return adamw(peft.get_peft_model(model, config))


for _name, _config in {
    "LoRA": peft.LoraConfig(target_modules=LINEAR, lora_dropout=0.1, task_type="CAUSAL_LM"),
    "DoRA": peft.LoraConfig(target_modules=LINEAR, use_dora=True),
    "rsLoRA": peft.LoraConfig(target_modules=LINEAR, use_rslora=True),
    "PiSSA": peft.LoraConfig(target_modules=LINEAR, init_lora_weights="pissa"),
    "OLoRA": peft.LoraConfig(target_modules=LINEAR, init_lora_weights="olora"),
    "LoHa": peft.LoHaConfig(target_modules=LINEAR),
    "LoKr": peft.LoKrConfig(target_modules=LINEAR),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=LINEAR, total_step=10),
    "IA3": peft.IA3Config(target_modules=[*LINEAR, "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": peft.VeraConfig(target_modules=LINEAR),
    "BOFT": peft.BOFTConfig(target_modules=LINEAR, boft_block_size=4),
    "OFT": peft.OFTConfig(target_modules=LINEAR, oft_block_size=32, use_cayley_neumann=False),
    "LN tuning": peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20),
    "FourierFT": peft.FourierFTConfig(target_modules=LINEAR, n_frequency=1000),
}.items():
    add(
        f"peft {_name}",
        partial(adapted, _config),
        language,
        values=True,
        small=_name == "LN tuning",
    )

# --- torchvision ---------------------------------------------------------------------------------


def vision(make: Any, **how: Any) -> Any:
    """A model of torchvision on the device, with momentum."""
    model = make(**how).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def classify(model: Any, optimizer: Any, side: int = 224, batch: int = 32) -> None:
    """A step with mixed precision as the tutorials have it."""
    images = torch.randn(batch, 3, side, side).to("cuda", non_blocking=True)
    labels = torch.randint(1000, (batch,)).to("cuda", non_blocking=True)
    scaler = torch.amp.GradScaler("cuda")
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(ON[0], dtype=torch.float16):
        out = model(images)
        out = out if isinstance(out, torch.Tensor) else out[0]
        loss = F.cross_entropy(out, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


for _name in (
    "resnet50",
    "resnet152",
    "vgg16",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "mobilenet_v3_large",
    "regnet_y_8gf",
    "convnext_tiny",
    "swin_t",
    "vit_b_16",
    "maxvit_t",
    "shufflenet_v2_x1_0",
    "googlenet",
):
    _build = partial(vision, getattr(torchvision.models, _name))
    add(f"torchvision {_name}", _build, classify, small=_name == "resnet50")


def per_pixel(model: Any, optimizer: Any) -> None:
    """A step of semantic segmentation."""
    out = model(torch.randn(2, 3, 256, 256, device=ON[0]))["out"]
    update(
        F.cross_entropy(out, torch.zeros(2, 256, 256, dtype=torch.long, device=ON[0])), optimizer
    )


for _name in ("deeplabv3_resnet50", "fcn_resnet50"):
    _build = partial(vision, getattr(torchvision.models.segmentation, _name), weights_backbone=None)
    add(f"torchvision {_name}", _build, per_pixel)


def detect(model: Any, optimizer: Any) -> None:
    """A step of a detector with two objects in each image."""
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [20.0, 30.0, 90.0, 120.0]]).cuda()
    target = {"boxes": boxes, "labels": torch.ones(2, dtype=torch.int64).cuda()}
    images = [torch.randn(3, 320, 320).cuda() for _ in range(2)]
    update(sum(model(images, [target, dict(target)]).values()), optimizer)


for _name in (
    "fasterrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "fcos_resnet50_fpn",
):
    _build = partial(vision, getattr(torchvision.models.detection, _name), weights_backbone=None)
    add(
        f"torchvision {_name}",
        _build,
        detect,
        values={"index": 0, "*": 1},
        small=_name.startswith("faster"),
    )
