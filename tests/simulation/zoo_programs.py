"""More programs: several models in one, sequences, diffusion, kernels, optimizers. ZOO has the others too."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from zoo_cases import ON, adamw, add, update
from zoo_cases import ZOO as ZOO

from utils.models.unet import UNet


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
    says="zoo_programs.py, line",
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
            else update(summed(m), o)
        ),
    )


def summed(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(64, 784, device=ON[0])).sum()


def _closure(model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = summed(model)
    loss.backward()
    return loss
