"""Programs as people write them, at full size, from configurations alone: nothing is loaded.

Each has a `build` and a `step` as `simulate` takes them. `values` are its stand-ins where it reads
values, `says` the words of the sentence that it ends in where it cannot be simulated.
"""

from __future__ import annotations

import copy
import itertools
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
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from utils.models.unet import UNet


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

# --- programs with more than one model, or copies of one -----------------------------------------


def mlp(width: int = 4096) -> nn.Sequential:
    """A wide perceptron."""
    return nn.Sequential(
        nn.Linear(784, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
    )


def digits(model: Any, optimizer: Any) -> None:
    """The step of the first tutorial."""
    x, y = torch.randn(256, 784).to(ON[0]), torch.randint(10, (256,)).to(ON[0])
    loss = nn.CrossEntropyLoss()(model(x), y)
    update(loss, optimizer)
    print(f"loss: {loss.item():>7f}", end="\r")


add(
    "tutorial with .cuda() and .item()",
    lambda: adamw(mlp().cuda()),
    digits,
    values={"loss": 1.0},
    small=True,
)
add(
    "tutorial that reads a value",
    lambda: adamw(mlp().cuda()),
    digits,
    small=True,
    says="zoo_cases.py, line",
)


def with_ema() -> Any:
    model, optimizer = adamw(mlp().cuda())
    model.averaged = [copy.deepcopy(model)]
    return model, optimizer


def ema_step(model: Any, optimizer: Any) -> None:
    update(
        F.cross_entropy(
            model(torch.randn(64, 784, device=ON[0])),
            torch.zeros(64, dtype=torch.long, device=ON[0]),
        ),
        optimizer,
    )
    with torch.no_grad():
        for mine, theirs in zip(model.averaged[0].parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.01)


add("EMA by deepcopy", with_ema, ema_step, small=True)


def averaged() -> Any:
    model, optimizer = adamw(mlp().cuda())
    model.averaged = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))]
    return model, optimizer


def averaged_step(model: Any, optimizer: Any) -> None:
    update(model(torch.randn(64, 784, device=ON[0])).sum(), optimizer)
    model.averaged[0].update_parameters(model)


add("AveragedModel", averaged, averaged_step, values=True, small=True)


def distillation() -> Any:
    student, optimizer = adamw(mlp(1024).cuda())
    student.teacher = [mlp().cuda().eval().requires_grad_(False)]
    return student, optimizer


def distill(student: Any, optimizer: Any) -> None:
    x = torch.randn(256, 784, device=ON[0])
    with torch.no_grad():
        wanted = student.teacher[0](x).softmax(-1)
    update(F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean"), optimizer)


add("distillation", distillation, distill, small=True)


class Generator(nn.Sequential):
    """DCGAN's generator."""

    def __init__(self, width: int = 64) -> None:
        sizes = [100, 8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = []
        for index, (a, b) in enumerate(itertools.pairwise(sizes)):
            layers += [
                nn.ConvTranspose2d(a, b, 4, 2 if index else 1, 1 if index else 0, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(True),
            ]
        super().__init__(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width: int = 64) -> nn.Sequential:
    """DCGAN's discriminator."""
    sizes, layers = [3, width, 2 * width, 4 * width, 8 * width], []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def gan() -> Any:
    models = {"generator": Generator().cuda(), "discriminator": discriminator().cuda()}
    return models, [torch.optim.Adam(m.parameters(), betas=(0.5, 0.999)) for m in models.values()]


def gan_step(models: Any, optimizers: Any) -> None:
    g, d = models.values()
    real, noise = (
        torch.randn(128, 3, 64, 64, device=ON[0]),
        torch.randn(128, 100, 1, 1, device=ON[0]),
    )
    loss = nn.BCEWithLogitsLoss()
    made = g(noise)
    update(
        loss(d(real), torch.ones(128, device=ON[0]))
        + loss(d(made.detach()), torch.zeros(128, device=ON[0])),
        optimizers[1],
    )
    update(loss(d(made), torch.ones(128, device=ON[0])), optimizers[0])


add("GAN", gan, gan_step, small=True)


def penalty_step(models: Any, optimizers: Any) -> None:
    """WGAN's gradient penalty: a graph of a graph."""
    _, d = models.values()
    x = torch.randn(32, 3, 64, 64, device=ON[0], requires_grad=True)
    (slope,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
    update(((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean(), optimizers[1])


add("GAN with gradient penalty", gan, penalty_step)

# --- sequences, diffusion, kernels ---------------------------------------------------------------


class Tagger(nn.Module):
    """A recurrent network over words."""

    def __init__(self, kind: Any, **how: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(10_000, 512), kind(512, 512, 2, batch_first=True, **how)
        self.head = nn.Linear(1024 if how.get("bidirectional") else 512, 10_000)

    def forward(self, tokens: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        x = self.embed(tokens)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=True)
            return self.head(self.rnn(x)[0].data)
        return self.head(self.rnn(x)[0])


def words(model: Any, optimizer: Any, packed: bool = False) -> None:
    tokens = torch.randint(10_000, (64, 128), device=ON[0])
    lengths = torch.full((64,), 128) if packed else None
    update(model(tokens, lengths).logsumexp(-1).mean(), optimizer)


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    add(
        _kind.__name__,
        lambda kind=_kind: adamw(Tagger(kind, dropout=0.1).cuda()),
        words,
        small=_kind is nn.LSTM,
    )
add("LSTM, both ways", lambda: adamw(Tagger(nn.LSTM, bidirectional=True).cuda()), words)
add(
    "LSTM, packed",
    lambda: adamw(Tagger(nn.LSTM).cuda()),
    partial(words, packed=True),
)


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.1, batch_first=True)
    return adamw(nn.TransformerEncoder(layer, 12).cuda())


def encode(
    model: Any, optimizer: Any, masked: bool = False, length: int = 512, width: int = 1024
) -> None:
    mask = torch.zeros(8, length, dtype=torch.bool, device=ON[0]) if masked else None
    update(
        model(torch.randn(8, length, width, device=ON[0]), src_key_padding_mask=mask).sum(),
        optimizer,
    )


add("TransformerEncoder", encoder, encode, small=True)
add("TransformerEncoder, padded", encoder, partial(encode, masked=True))
add(
    "nn.Transformer",
    lambda: adamw(nn.Transformer(512, 8, batch_first=True).cuda()),
    lambda m, o: update(
        m(torch.randn(8, 128, 512, device=ON[0]), torch.randn(8, 128, 512, device=ON[0])).sum(), o
    ),
)


def denoise(model: Any, optimizer: Any) -> None:
    x = torch.randn(16, 3, 32, 32, device=ON[0])
    with torch.autocast(ON[0], dtype=torch.bfloat16):
        loss = F.mse_loss(model(x, torch.randint(1000, (16,), device=ON[0])), x)
    update(loss, optimizer)


add("diffusion U-Net", lambda: adamw(UNet().cuda()), denoise)


def checkpointed(model: Any, optimizer: Any) -> None:
    x = torch.randn(64, 784, device=ON[0], requires_grad=True)
    update(checkpoint(model, x, use_reentrant=False).sum(), optimizer)


add("checkpoint", lambda: adamw(mlp().cuda()), checkpointed, small=True)
add(
    "checkpoint, reentrant",
    lambda: adamw(mlp().cuda()),
    lambda m, o: update(
        checkpoint(
            m, torch.randn(64, 784, device=ON[0], requires_grad=True), use_reentrant=True
        ).sum(),
        o,
    ),
)


def offloading(model: Any, optimizer: Any) -> None:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(torch.randn(256, 784, device=ON[0])).sum()
    update(loss, optimizer)


add("save_on_cpu", lambda: adamw(mlp().cuda()), offloading, small=True)


def compiled() -> Any:
    model, optimizer = adamw(mlp().cuda())
    return torch.compile(model), optimizer


add(
    "torch.compile",
    compiled,
    lambda m, o: update(m(torch.randn(64, 784, device=ON[0])).sum(), o),
    small=True,
)


def mapped(model: Any, optimizer: Any) -> None:
    """Gradients of each sample, as in torch.func's tutorial."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x.unsqueeze(0),)).sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        weights, torch.randn(8, 784, device=ON[0])
    )
    for name, p in model.named_parameters():
        p.grad = grads[name].mean(0)
    optimizer.step()


add(
    "gradients of each sample by vmap",
    lambda: (mlp(512).cuda(), None),
    lambda m, o: mapped(m, torch.optim.SGD(m.parameters())),
)


def flexible(model: Any, optimizer: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = model(torch.randn(2, 8, 256, 64, device=ON[0]))
    update(flex_attention(q, q, q).sum(), optimizer)


add("flex_attention", lambda: adamw(nn.Linear(64, 64).cuda()), flexible, says="flex_attention")


def sparse() -> Any:
    model = nn.Embedding(100_000, 256, sparse=True).cuda()
    return model, torch.optim.SparseAdam(list(model.parameters()))


add(
    "sparse gradients",
    sparse,
    lambda m, o: update(m(torch.randint(100_000, (64,), device=ON[0])).sum(), o),
)
for _name in (
    "Adafactor",
    "LBFGS",
    "RMSprop",
    "NAdam",
    "Adagrad",
    "ASGD",
    "Rprop",
    "RAdam",
    "Adamax",
):
    add(
        f"torch.optim.{_name}",
        lambda n=_name: (m := mlp(1024).cuda(), getattr(torch.optim, n)(m.parameters())),
        lambda m, o: (
            o.step(lambda: _closure(m, o))
            if isinstance(o, torch.optim.LBFGS)
            else update(_loss(m), o)
        ),
    )


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(64, 784, device=ON[0])).sum()


def _closure(model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = _loss(model)
    loss.backward()
    return loss


# --- libraries that shard, page and quantize -----------------------------------------------------


def qlora() -> Any:
    """Linear4bit by hand, as transformers places it, under peft's adapters."""
    import bitsandbytes as bnb

    model = hf.LlamaForCausalLM(SMALL_LLAMA).to(torch.bfloat16)
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            old = getattr(block.self_attn, name)
            new = bnb.nn.Linear4bit(
                old.in_features,
                old.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            setattr(block.self_attn, name, new.to(torch.bfloat16))
    model = peft.prepare_model_for_kbit_training(model.to("cuda"))
    return adamw(peft.get_peft_model(model, peft.LoraConfig(target_modules=LINEAR)))


add("QLoRA with Linear4bit", qlora, language, small=True)


def paged() -> Any:
    from bitsandbytes.optim import PagedAdamW8bit

    model = mlp().cuda()
    return model, PagedAdamW8bit(model.parameters())


add("paged optimizer", paged, lambda m, o: update(_loss(m), o), small=True)


def sharded(rank: int = 0) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (8,))
    model = mlp().cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return adamw(fully_shard(model, mesh=mesh))


add("FSDP2 on a mesh of cuda", sharded, lambda m, o: update(_loss(m), o), world=8)


def sharded_in_place() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return adamw(FullyShardedDataParallel(mlp().cuda(), device_id=0))


add("FSDP1", sharded_in_place, lambda m, o: update(_loss(m), o), world=8, says="fully_shard")
add(
    "DistributedDataParallel",
    lambda: adamw(nn.parallel.DistributedDataParallel(mlp().cuda(), device_ids=[0])),
    lambda m, o: update(_loss(m), o),
    world=8,
)


def prepared() -> Any:
    from accelerate import Accelerator

    with_accelerate = Accelerator(mixed_precision="bf16")
    model, optimizer = with_accelerate.prepare(*adamw(mlp()))
    model.accelerator = [with_accelerate]
    return model, optimizer


def accelerated(model: Any, optimizer: Any) -> None:
    model.accelerator[0].backward(_loss(model))
    optimizer.step()
    optimizer.zero_grad()


add("accelerate", prepared, accelerated)


def staged(model: Any, optimizer: Any, rank: int, static: bool = True, grads: bool = True) -> None:
    """One of four pipeline stages; static inputs and outputs are what a simulation needs."""
    import torch.distributed.pipelining as pp

    micro, where = torch.randn(2, 64, requires_grad=grads), torch.device("cpu")
    known = {"input_args": (micro,), "output_args": (micro.detach().requires_grad_(grads),)}
    stage = pp.PipelineStage(model, rank, 4, where, **known if static else {})
    schedule = pp.Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    inputs = (torch.randn(8, 64),) if rank == 0 else ()
    schedule.step(*inputs, target=torch.randn(8, 64) if rank == 3 else None)
    optimizer.step()
    optimizer.zero_grad()


for _rank in range(4):
    add(
        f"torch.distributed.pipelining, stage {_rank}",
        lambda: adamw(nn.Linear(64, 64)),
        partial(staged, rank=_rank),
        world=4,
        rank=_rank,
    )
add(
    "pipelining, shapes left open",
    lambda: adamw(nn.Linear(64, 64)),
    partial(staged, rank=1, static=False),
    world=4,
    rank=1,
    says="input_args",
)
add(
    "pipelining, no gradients expected",
    lambda: adamw(nn.Linear(64, 64)),
    partial(staged, rank=1, grads=False),
    world=4,
    rank=1,
    says="requires_grad_",
)
