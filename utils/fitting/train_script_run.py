"""What surrounds the training in `train.py`: ranks, data, the report of its memory, and the save.

Copied as text like `program`; the course itself runs it in tests alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def check_processes(expected: int, launch: str) -> None:
    """Stop where another number of processes runs than the recipe is for."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != expected:
        raise SystemExit(
            f"This recipe is for {expected} process(es), and {ranks} run. Start it with: {launch}"
        )


def joined(launch: str, cards: int) -> tuple[str, int, int]:
    """(device, rank, number of ranks) of this process; several are started by torchrun.

    FSDP2 needs a process group, also of one.
    """
    check_processes(cards, launch)
    rank, ranks = int(os.environ.get("RANK", "0")), cards
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(local)
    # What is offloaded is gathered for the save from host memory, by gloo.
    backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
    if ranks > 1:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device, rank, ranks


def tokens_of(path: str, source: str) -> list[int]:
    """The tokens of a file, one after another: plain text, or JSON lines.

    A line has "text", or "messages" as chats have them, which the model's own template joins. Each
    ends with the end token, and every token is learned, those of questions too.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    text = Path(path).read_text(encoding="utf-8")
    if not path.endswith(".jsonl"):
        return tokenizer(text)["input_ids"]
    found: list[int] = []
    # Not splitlines(): JSON may hold U+2028 and others at which that would cut a row in two.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "messages" in row:
                chat = tokenizer.apply_chat_template(row["messages"], tokenize=False)
                found += tokenizer(chat, add_special_tokens=False)["input_ids"]
            else:
                found += tokenizer(row["text"])["input_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f'{path}, line {number}: is no JSON with "text" or "messages" for this tokenizer ({error}).'
            ) from error
        if tokenizer.eos_token_id is not None and found[-1:] != [tokenizer.eos_token_id]:
            found.append(tokenizer.eos_token_id)
    return found


def steps_of(
    path: str,
    source: str,
    device: str,
    tokens: int,
    micro_batch: int,
    accumulation: int,
    epochs: int = 1,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[list[dict[str, Any]]]:
    """The micro-batches of each optimizer step: a file's tokens cut into rows of equal length.

    Each epoch takes the rows in another order, which is the same on all ranks and in each run.
    """
    numbers = tokens_of(path, source)
    a_step = ranks * accumulation * micro_batch
    rows = torch.tensor(numbers[: len(numbers) // tokens * tokens]).view(-1, tokens)
    if len(rows) < a_step:
        raise SystemExit(
            f"{path} has {len(numbers):,} tokens, and a step takes {a_step * tokens:,}: give a longer text."
        )
    for epoch in range(epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(rows) - a_step + 1, a_step):
            chosen = rows[order[start : start + a_step]]
            mine = chosen.view(ranks, accumulation, micro_batch, tokens)[rank].to(device)
            yield [{"input_ids": part, "labels": part.clone()} for part in mine]


def mean_of_ranks(loss: Any, ranks: int) -> float:
    """The mean of the ranks' losses."""
    if ranks > 1:
        dist.all_reduce(loss)
    return float(loss) / ranks


def report(
    losses: list[float],
    device: str,
    seconds: float,
    simulated_bytes: int,
    predicted_seconds: float | None,
    least_spare_bytes: int,
    rank: int = 0,
) -> None:
    """Each step's loss; for three steps also the measured peak and seconds.

    It ends the run after them where too little of the card is left.
    """
    if rank == 0:
        print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    if len(losses) > 3:
        return
    if not device.startswith("cuda"):
        if rank == 0 and len(losses) == 1:
            print("No GPU here: peaks are not measured.")
        return
    peak = torch.cuda.max_memory_allocated()
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    spare = free - (reserved - torch.cuda.memory_reserved())
    beside = f", {predicted_seconds:.2f} s predicted" if predicted_seconds else ""
    print(
        f"rank {rank}: peak {peak / 2**30:.2f} GiB measured, {simulated_bytes / 2**30:.2f} GiB simulated; "
        f"the allocator holds {reserved / 2**30:.2f} GiB; {seconds:.2f} s measured{beside}",
        flush=True,
    )
    if abs(peak / simulated_bytes - 1) > 0.05:
        print(
            "More than 5% apart. Nine in ten published peaks lay within 12% of their simulation; further "
            "off, look for other versions, or another attention kernel than simulated."
        )
    if len(losses) == 3 and spare < least_spare_bytes:
        raise SystemExit(
            f"{spare / 2**30:.2f} GiB of the card are left: the next fragment may end the run. Take a "
            "smaller batch, or another cure."
        )


def save(model: Any, source: str, weights: Any = None) -> None:
    """The trained weights (of adapters: them alone) and the tokenizer in the folder `trained`."""
    from transformers import AutoTokenizer

    model.save_pretrained("trained", state_dict=weights)
    AutoTokenizer.from_pretrained(source).save_pretrained("trained")


def save_sharded(model: Any, source: str, rank: int) -> None:
    """The same of a model whose weights all ranks hold together: each gathers, the first one saves."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        save(model, source, weights)


ALONE = (check_processes, tokens_of, steps_of, report, save)
SHARDED = (check_processes, joined, tokens_of, steps_of, mean_of_ranks, report, save, save_sharded)
