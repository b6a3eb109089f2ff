"""Programs whose memory is easily missed, counted by a library that is loaded before all others.

Run as a script, with the counter preloaded: prints one JSON line a program. The counter knows blocks
of `posix_memalign`, where PyTorch's CPU allocator takes its memory, and nothing of tensors.
"""

from __future__ import annotations

import copy
import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.memory import measure

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long now, peak;
enum { SLOTS = 1 << 20 };
static struct { void *at; long size; } blocks[SLOTS];
static long slot(void *at) { return ((unsigned long)at >> 6) % SLOTS; }
static void note(void *at, long size) {
  pthread_mutex_lock(&lock);
  long i = slot(at);
  while (blocks[i].at && blocks[i].at != at) i = (i + 1) % SLOTS;
  if (blocks[i].at) now -= blocks[i].size;
  blocks[i].at = at; blocks[i].size = size;
  now += size;
  if (now > peak) peak = now;
  pthread_mutex_unlock(&lock);
}
int posix_memalign(void **out, size_t alignment, size_t size) {
  *out = memalign(alignment, size);
  if (!*out) return 12;
  note(*out, size);
  return 0;
}
void free(void *at) {
  static void (*real)(void *);
  if (!real) real = dlsym(RTLD_NEXT, "free");
  if (at) {
    pthread_mutex_lock(&lock);
    long i = slot(at);
    while (blocks[i].at && blocks[i].at != at) i = (i + 1) % SLOTS;
    if (blocks[i].at) { now -= blocks[i].size; blocks[i].size = 0; }
    pthread_mutex_unlock(&lock);
  }
  real(at);
}
long counter_now(void) { return now; }
long counter_peak(void) { return peak; }
void counter_reset(void) { peak = now; }
"""

OddProgram = tuple[Any, Any, Callable[[], Any], dict[str, Any]]  # models, optimizers, step, kept


def mlp(width: int = 512) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 64))


def loss_of(model: nn.Module, rows: int = 512) -> torch.Tensor:
    return model(torch.randn(rows, 256)).square().mean()


def stepped(model: nn.Module, optimizer: Any, **how: Any) -> None:
    loss_of(model, **how).backward()
    optimizer.step()
    optimizer.zero_grad()


def gan() -> OddProgram:
    g, d = mlp(), nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizers = [torch.optim.Adam(m.parameters()) for m in (g, d)]

    def step() -> None:
        made = g(torch.randn(256, 256))
        (d(torch.randn(256, 64)).mean() - d(made.detach()).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        d(made).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return [g, d], optimizers, step, {}


def ema() -> OddProgram:
    model = mlp()
    average, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())

    def step() -> None:
        stepped(model, optimizer)
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    return model, optimizer, step, {"ema": average}


def teacher() -> OddProgram:
    student, master = mlp(128), mlp(1024).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), momentum=0.9, lr=0.1)

    def step() -> None:
        x = torch.randn(512, 256)
        F.mse_loss(student(x), master(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return student, optimizer, step, {"teacher": master}


def leak() -> OddProgram:
    model, seen = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss = loss_of(model)
        seen.append(loss)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, {}


def replicas() -> OddProgram:
    parts = [mlp(), mlp()]
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()])

    def step() -> None:
        for part in parts:
            loss_of(part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return parts[0], optimizer, step, {}


def masters() -> OddProgram:
    model = mlp().bfloat16()
    fine = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(fine)

    def step() -> None:
        model(torch.randn(512, 256, dtype=torch.bfloat16)).float().mean().backward()
        for high, low in zip(fine, model.parameters(), strict=True):
            high.grad, low.grad = low.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for high, low in zip(fine, model.parameters(), strict=True):
                low.copy_(high)

    return model, optimizer, step, {}


def accumulated() -> OddProgram:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(3):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return model, optimizer, step, {}


def replaced() -> OddProgram:
    """Weights that the step throws away and makes anew."""
    model = mlp()

    def step() -> None:
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.data = p - 0.1 * p.grad
                p.grad = None

    return model, None, step, {}


def lbfgs() -> OddProgram:
    model = mlp(64)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(64, 256)).square().mean()
        loss.backward()
        return loss

    return model, optimizer, lambda: optimizer.step(closure), {}


def replay() -> OddProgram:
    """A buffer of samples beside the model, filled in place."""
    model, buffer = mlp(), torch.zeros(8192, 256)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        buffer[:512] = torch.randn(512, 256)
        model(buffer[:512]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, {"buffer": [buffer]}


def sparse() -> OddProgram:
    model = nn.Embedding(4096, 64, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.arange(2048)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, {}


def inference() -> OddProgram:
    model = mlp(2048)

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(512, 256))

    return model, None, step, {}


PROGRAMS = (
    gan,
    ema,
    teacher,
    leak,
    replicas,
    masters,
    accumulated,
    replaced,
    lbfgs,
    replay,
    sparse,
    inference,
)


def tensors(found: Any) -> list[torch.Tensor]:
    """What was named, and what it holds."""
    if isinstance(found, torch.Tensor):
        return [found, *([found.grad] if found.is_leaf and found.grad is not None else [])]
    if isinstance(found, nn.Module):
        return [t for p in (*found.parameters(), *found.buffers()) for t in tensors(p)]
    if isinstance(found, torch.optim.Optimizer):
        stepped_ = [p for group in found.param_groups for p in group["params"]]
        return [t for p in stepped_ for t in tensors(p)] + tensors(list(found.state.values()))
    values = found.values() if isinstance(found, dict) else found or ()
    if isinstance(found, (dict, list, tuple)):
        return [t for value in values for t in tensors(value)]
    return []


def named_bytes(*found: Any) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for part in found
        for t in tensors(part)
        if t.layout is torch.strided
    }
    return sum(storages.values())


def main() -> None:
    """Count each program without the meter, then with it."""
    torch.set_num_threads(1)
    counter = ctypes.CDLL(sys.argv[1])
    for name in ("counter_now", "counter_peak"):
        getattr(counter, name).restype = ctypes.c_long
    for program in PROGRAMS:
        models, optimizers, step, keep = program()
        totals: list[int] = []

        def counting(
            step: Any = step, totals: Any = totals, all_named: Any = (models, optimizers, keep)
        ) -> None:
            named, before = named_bytes(*all_named), counter.counter_now()
            counter.counter_reset()
            step()
            totals.append(named + counter.counter_peak() - before)

        found = measure(
            counting,
            model=models,
            optimizer=optimizers,
            keep=keep or None,
            timed_steps=0,
            name=program.__name__,
        )
        row = {"name": found.name, "counted": totals[-1], "metered": found.peak_bytes}
        print(json.dumps({**row, "notes": found.notes[1:]}))


if __name__ == "__main__":
    main()
