"""The text around the lesson's own loop in `resnet50_amp.py`, which trains on a real card."""

from __future__ import annotations

TOP = """# pip install torch torchvision
# python resnet50_amp.py [batch] [epochs] [seed] [fp32, fp16 or bf16] [fake: images without a download]
import os
import pathlib
import sys
import time
import torch
import torch.nn.functional as F
from torchvision import datasets, models, transforms
"""
MAIN = """words, types = sys.argv[1:], {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
numbers, fake = [int(word) for word in words if word.isdigit()], "fake" in words
batch, epochs, seed = (numbers + [1024, 10, 0][len(numbers):])[:3]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
name = next((word for word in words if word in types), "bf16" if bf16 else "fp16")
dtype, path = types[name], pathlib.Path(f"resnet50_{name}_{batch}_{seed}{'_fake' * fake}.pt")

torch.manual_seed(seed)
torch.backends.cudnn.allow_tf32 = False  # else the convolutions of fp32 are TF32, from the A100 on
to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(3 * [0.47], 3 * [0.25])])


def load(train):  # every image into the host's memory, once: no loader slows a fast card
    data = (datasets.FakeData(2 * batch, (3, 32, 32), 10, to_tensor) if fake else
            datasets.CIFAR10("data", train, to_tensor, download=True))
    images, labels = zip(*data)
    return torch.stack(images), torch.tensor(labels)


(images, labels), test = load(True), load(False)
model = models.resnet50(num_classes=10)
model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
optimizer = torch.optim.Adam(model.to(device).parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
parts, first = {"model": model, "optimizer": optimizer, "scaler": scaler}, 0
if path.exists():  # an earlier run: go on after its last epoch
    saved = torch.load(path, map_location="cpu")
    first = saved["epochs"]
    for key, part in parts.items():
        part.load_state_dict(saved[key])

for epoch in range(first, epochs):
    shuffle = torch.Generator().manual_seed(1000 * seed + epoch)  # the same order after a restart, and in each type
    order = torch.randperm(len(labels), generator=shuffle).split(batch)
    start = time.perf_counter()
    batches = ((images[rows], labels[rows]) for rows in order if len(rows) == batch)
    losses = train_amp(model.train(), optimizer, scaler, batches, dtype)
    speed = len(losses) * batch / (time.perf_counter() - start)
    model.eval()
    with torch.no_grad(), torch.amp.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in zip(*(part.split(250) for part in test)))
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, accuracy {right / len(test[1]):.1%}, {speed:.0f} images/s, "
          f"scale {scaler.get_scale():,.0f}", flush=True)
    torch.save({"epochs": epoch + 1} | {key: part.state_dict() for key, part in parts.items()}, f"{path}.new")
    os.replace(f"{path}.new", path)  # in one move: a run that is killed while it saves keeps its last epoch
if device.type == "cuda" and first < epochs:  # a run with nothing left to train has no peak to tell
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (allocated), {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB (reserved)")
print(f"{name}; simulated for batch 1024 in fp16 on a T4: PEAK GiB (allocated)")
"""
