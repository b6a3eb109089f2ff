"""Train a ResNet on CIFAR-10 on all GPUs of a machine, or on CPUs.

torchrun --nproc-per-node=4 train.py [resnet18 or resnet50] [epochs] [fake: images without a download]
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets, models, transforms

BATCH, RATE = 256, 0.1  # of all ranks together: as many GPUs as you like, one rate


def main(network: str, epochs: int, fake: bool) -> None:
    gpu, rank, ranks = torch.cuda.is_available(), dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if rank > 0:
        dist.barrier()  # rank 0 downloads alone
    train, test = (images(part, fake) for part in (True, False))
    if rank == 0:
        dist.barrier()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH // ranks, sampler=sampler, num_workers=4 if gpu else 0)
    mine = Subset(test, range(rank, len(test), ranks))  # no copies: none counts twice
    model = DistributedDataParallel(models.get_model(network, num_classes=10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another order
        start = time.perf_counter()
        loss = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        told = torch.stack([loss.detach().float(), right(model.module, mine, device)])
        dist.all_reduce(told)  # all ranks call it, and one prints
        if rank == 0:
            seconds = time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated() if gpu else 0
            print(
                f"epoch {epoch}: loss of all ranks {told[0].item() / ranks:.3f}, accuracy "
                f"{told[1].item() / len(test):.1%}, {seconds:.1f} s, peak {peak / 2**30:.2f} GiB",
                flush=True,
            )
            torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()


def images(train: bool, fake: bool) -> datasets.VisionDataset:
    to_tensor = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(3 * [0.47], 3 * [0.25])]
    )
    if fake:
        return datasets.FakeData(128 if train else 16, (3, 32, 32), 10, to_tensor)
    return datasets.CIFAR10("data", train, to_tensor, download=True)


@torch.no_grad()
def right(model: torch.nn.Module, share: Dataset, device: torch.device) -> torch.Tensor:
    model.eval()
    found = [
        (model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in DataLoader(share, 250)
    ]
    model.train()
    return torch.stack(found).sum().float()


if __name__ == "__main__":
    dist.init_process_group()
    main((sys.argv[1:] or ["resnet50"])[0], int((sys.argv[2:] or ["10"])[0]), "fake" in sys.argv)
    dist.destroy_process_group()  # always, and last: what DDP held is gone by then
