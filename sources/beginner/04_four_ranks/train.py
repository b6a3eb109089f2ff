"""Train a ResNet on all GPUs of a machine, or on CPUs, and save it. Before, after, and with AMP:

torchrun --nproc-per-node=1 train.py
torchrun --nproc-per-node=4 train.py
torchrun --nproc-per-node=4 train.py --amp

That keeps the batch of all ranks (strong scaling). 256 images of 224 x 224 on each (weak scaling): four
times the batch, so four times the rate, after a warm-up of five epochs (Goyal and others, arXiv 1706.02677):

torchrun --nproc-per-node=1 train.py --size 224
torchrun --nproc-per-node=4 train.py --size 224 --batch 1024 --rate 0.4 --warmup 5
torchrun --nproc-per-node=4 train.py --size 224 --batch 1024 --rate 0.4 --warmup 5 --amp --channels-last

On two machines, the same line on each, in a folder of its own (each downloads), and in a network that is closed to
others (the endpoint runs what it is sent):

torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=job1 --rdzv-endpoint=host0:29400 train.py
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets, models, transforms


def main(asked: argparse.Namespace) -> None:
    gpu, rank, ranks = torch.cuda.is_available(), dist.get_rank(), dist.get_world_size()
    assert asked.batch % ranks == 0, f"--batch {asked.batch} does not divide over {ranks} ranks"
    local = int(os.environ["LOCAL_RANK"])  # of this machine; `rank` counts those of all
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)  # dropout differs; DDP broadcasts the start
    if local > 0:
        dist.barrier()  # one rank of each machine downloads, and the others wait here
    train, test = (images(part, asked) for part in (True, False))
    if local == 0:
        dist.barrier()
    sampler = DistributedSampler(train)
    loader = DataLoader(
        train, asked.batch // ranks, sampler=sampler, num_workers=4 * gpu, pin_memory=gpu
    )
    mine = Subset(test, range(rank, len(test), ranks))  # no copies: none counts twice
    layout = torch.channels_last if asked.channels_last else torch.contiguous_format
    network = models.get_model(asked.network, num_classes=10).to(memory_format=layout).to(device)
    if asked.sync_bn:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.rate, momentum=0.9)
    low = torch.float16 if gpu and not torch.cuda.is_bf16_supported(False) else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=asked.amp and low is torch.float16)
    warm_steps = max(1, asked.warmup * len(loader))
    for epoch in range(asked.epochs):
        sampler.set_epoch(epoch)  # another order
        start, total = time.perf_counter(), torch.zeros((), device=device)
        for step, (x, y) in enumerate(loader, epoch * len(loader)):
            optimizer.param_groups[0]["lr"] = asked.rate * min(1.0, (step + 1) / warm_steps)
            optimizer.zero_grad()
            x = x.to(device, non_blocking=True, memory_format=layout)
            with torch.autocast(device.type, low, enabled=asked.amp):
                loss = F.cross_entropy(model(x), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        mean = total.item() / len(loader)  # waits for the GPU
        seconds = time.perf_counter() - start
        for buffer in network.buffers():
            dist.broadcast(buffer, src=0)  # one model on all ranks: that which is saved
        told = torch.cat([torch.tensor([mean], device=device), judged(network, mine, device)])
        dist.all_reduce(told)  # all ranks call it, and one prints
        if rank == 0:
            peak = torch.cuda.max_memory_allocated() if gpu else 0
            print(
                f"epoch {epoch}: loss of all ranks {told[0].item() / ranks:.3f}, {seconds:.1f} s of "
                f"training, peak {peak / 2**30:.2f} GiB, accuracy {told[1].item() / len(test):.1%}, "
                f"test loss {told[2].item() / len(test):.4f}",
                flush=True,
            )
            torch.save(network.state_dict(), "model.pt")
    if rank == 0:
        again = models.get_model(asked.network, num_classes=10).to(memory_format=layout).to(device)
        again.load_state_dict(torch.load("model.pt", map_location=device, weights_only=True))
        right, loss = (judged(again, test, device) / len(test)).tolist()
        print(
            f"model.pt, loaded by one process: accuracy {right:.1%}, test loss {loss:.4f}",
            flush=True,
        )
    dist.barrier()


def images(train: bool, asked: argparse.Namespace) -> datasets.VisionDataset:
    steps = [transforms.Resize(asked.size), transforms.ToTensor()]
    to_tensor = transforms.Compose([*steps, transforms.Normalize(3 * [0.47], 3 * [0.25])])
    if asked.fake:
        return datasets.FakeData(32 if train else 64, (3, 32, 32), 10, to_tensor)
    return datasets.CIFAR10("data", train, to_tensor, download=True)


@torch.no_grad()
def judged(model: nn.Module, share: Dataset, device: torch.device) -> torch.Tensor:
    model.eval()
    found = torch.zeros(2, device=device)  # right ones, and the sum of losses
    for x, y in DataLoader(share, 250):
        logits, y = model(x.to(device)), y.to(device)
        found += torch.stack(
            [(logits.argmax(1) == y).sum(), F.cross_entropy(logits, y, reduction="sum")]
        )
    model.train()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="images of all ranks in a step")
    parser.add_argument("--rate", type=float, default=0.1, help="for that batch")
    parser.add_argument("--warmup", type=int, default=0, help="epochs until the rate is reached")
    parser.add_argument("--size", type=int, default=32, help="images are resized to it")
    parser.add_argument("--amp", action="store_true", help="bf16, or fp16 where a GPU has no bf16")
    parser.add_argument("--channels-last", action="store_true", help="NHWC, as NVIDIA's AMP run")
    parser.add_argument("--sync-bn", action="store_true", help="for few images a GPU; GPUs only")
    parser.add_argument("--fake", action="store_true", help="images without a download")
    dist.init_process_group()
    try:
        main(parser.parse_args())
    finally:
        dist.destroy_process_group()
