"""The text around the lesson's own loop in `resnet50_amp.py`, which trains on a real card."""

from __future__ import annotations

TOP = """# pip install torch torchvision
# python resnet50_amp.py [batch] [epochs] [fake: images without a download]
import sys
import torch
import torch.nn.functional as F
from torchvision import datasets, models, transforms
"""
MAIN = """batch, epochs, fake = int((sys.argv[1:] or ["1024"])[0]), int((sys.argv[2:] or ["10"])[0]), "fake" in sys.argv
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(3 * [0.47], 3 * [0.25])])
train, test = (datasets.FakeData(2 * batch, (3, 32, 32), 10, to_tensor) if fake else
               datasets.CIFAR10("data", part, to_tensor, download=True) for part in (True, False))
model = models.resnet50(num_classes=10)
model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
optimizer = torch.optim.Adam(model.to(device).parameters(), lr=1e-3)
for epoch in range(epochs):
    order = torch.utils.data.DataLoader(train, batch, shuffle=True, drop_last=True)
    losses = train_amp(model.train(), optimizer, order, torch.bfloat16 if bf16 else torch.float16)
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in torch.utils.data.DataLoader(test, 250))
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, accuracy {right / len(test):.1%}", flush=True)
print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (allocated); simulated for batch 1024 on a V100: PEAK GiB")
"""
