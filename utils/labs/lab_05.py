"""Checks of lesson and lab 05, "Trading compute for memory: gradient checkpointing"."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from utils.labs.hooks_05 import Noisy, calls_of_torch_s_own, kept_bytes, noisy_gradients
from utils.labs.verdict import Verdict, correct, not_yet
from utils.memory import measure
from utils.techniques import BlockCost, activation_peak, best_blocks, recompute_flops
from utils.units import format_bytes

KEPT_SHARE = 0.5  # a checkpoint by hand must stay below this share of what plain forward keeps
LOSS_SHARE = 0.3  # and a loss in eight chunks below this one


def last_block(answer: Any) -> Verdict:
    """Lesson 05: the last block is recomputed at the very moment when everything is alive."""
    if answer == "no":
        return correct("its backward comes first: it would be recomputed while all others are alive")
    if answer == "yes":
        nudge = "Backward begins with the last block. What is alive at that moment, with and without?"
        return not_yet("that block gives up its activations and takes them back at once", nudge=nudge)
    return not_yet('the answer is "yes" or "no"', got=repr(answer))


def tiny_layers(answer: Any) -> Verdict:
    """Lesson 05: eight pairs of Linear and ReLU, each layer checkpointed by itself."""
    if answer == 16:
        return correct("every layer's input; plain training keeps one tensor a pair")
    nudges = {8: "That is plain training: a ReLU's result is also the next layer's input."}
    nudge = nudges.get(answer, "Each checkpoint keeps its input. How many are there?")
    return not_yet("how many tensors stay", got=repr(answer), nudge=nudge)


def best_segment(answer: Any) -> Verdict:
    """Lesson 05: 36 blocks that keep 8 tensors inside and 1 at the edge, in segments."""
    if answer == 2:
        return correct("36/2 + 1 + 2 x 8 = 35 tensors; one block a segment keeps 44, three keep 38")
    if answer == 6:
        nudge = "The square root of 36 is right if a block keeps as much inside as at its edge."
        return not_yet("6 keeps 6 + 5 + 6 x 8 = 59 tensors", nudge=nudge)
    nudge = "Tensors alive: 36/s edges, s - 1 edges within the segment, 8 s inside. Try s = 1, 2, 3."
    return not_yet("the size of a segment", got=repr(answer), nudge=nudge)


def checkpointed(function: Callable[[nn.Module, Tensor], Tensor]) -> Verdict:
    """Exercise 1: a checkpoint by saved-tensor hooks, with the random state."""
    torch.manual_seed(3)
    plain, x = Noisy(), torch.randn(512, 64)
    with calls_of_torch_s_own(function) as calls:
        found, left = noisy_gradients(function, copy.deepcopy(plain), x)
    if calls:
        nudge = "saved_tensors_hooks(pack, unpack) around block(x) is where your own begins."
        return not_yet("it calls torch.utils.checkpoint, which you are to build", nudge=nudge)
    wanted, after = noisy_gradients(lambda block, x: block(x), plain, x)
    if not torch.equal(found[0], wanted[0]):
        nudge = "Forward runs as ever; only what is saved changes."
        return not_yet("the result is not the block's own", nudge=nudge)
    if any(gradient is None for gradient in found):
        return not_yet("a parameter has no gradient", nudge="Is forward run with gradients enabled?")
    if not _same(found, wanted):
        nudge = "Dropout drew another mask. Which state must be the same when the block runs again?"
        return not_yet("the gradients are not those of the plain block", nudge=nudge)
    if not torch.equal(after, left):
        nudge = "torch.random.fork_rng(devices=[]) puts back the state that was there before."
        return not_yet("backward moved the random state: the next dropout differs", nudge=nudge)
    whole, kept = (kept_bytes(f, plain, x) for f in (lambda block, x: block(x), function))
    if kept > KEPT_SHARE * whole:
        nudge = "What does your pack hook return? A tensor that it returns stays alive."
        limit = f"at most {format_bytes(KEPT_SHARE * whole)}"
        return not_yet("forward still keeps activations", expected=limit,
                       got=format_bytes(kept), nudge=nudge)  # fmt: skip
    return correct(score=f"{format_bytes(kept)} alive after forward, plain {format_bytes(whole)}")


def predicted_bytes(function: Callable[[int, int, int, int], int]) -> Verdict:
    """Exercise 2: the peak of activations of equal blocks, each k-th checkpointed."""
    for layers, every in [(12, 0), (12, 1), (12, 2), (11, 3), (12, 4)]:
        edge, inside = 100, 1700
        chosen = set(range(0, layers, every)) if every else set()
        right = activation_peak([BlockCost(edge, inside, 1)] * layers, chosen)
        found = function(layers, edge, inside, every)
        if found != right:
            note = f"{layers} blocks, {edge} bytes of input and {inside} inside each, every={every}"
            nudge = _bytes_nudge(found, right, edge, inside)
            return not_yet(note, expected=right, got=found, nudge=nudge)
    return correct("all inputs, the insides that were kept, and the one that is recomputed")


def _bytes_nudge(found: Any, right: int, edge: int, inside: int) -> str:
    if found is None:
        return "Your function returns nothing. Is there a `return`?"
    if found == right - inside:
        return "One block is being recomputed at the peak: its inside is alive, too."
    if found == right + inside:
        return "One inside too many: which block's backward is running, and was it counted already?"
    if found < right and (right - found) % edge == 0:
        return "Every block's input stays, also a checkpointed one's."
    return "Walk backward from the last block. What is alive while block i computes its gradients?"


def best_set(function: Callable[[list[BlockCost], int], Iterable[int]]) -> Verdict:
    """Exercise 3: the cheapest set of blocks under a budget, against the exact optimum."""
    worst = 1.0
    for costs, limit in _problems():
        found = set(function(list(costs), limit))
        if wrong := [index for index in found if index not in range(len(costs))]:
            return not_yet(f"{wrong[0]!r} is no block: there are {len(costs)}, from 0")
        peak = activation_peak(costs, found)
        if peak > limit:
            got = f"{peak:,} bytes with blocks {sorted(found)}"
            return not_yet("the peak is over the budget", expected=f"at most {limit:,} bytes",
                           got=got, nudge=_over_nudge(costs, found))  # fmt: skip
        least = recompute_flops(costs, best_blocks(costs, limit))
        spent = recompute_flops(costs, found)
        worst = max(worst, spent / least if least else 1.0 + bool(spent))
    score = f"{worst:.3f} times the optimum's operations (1.000 is the best)"
    if worst > 1.0:
        nudge = "Most bytes per operation first is a good guess. Does another set just reach the budget?"
        return not_yet("every budget is kept, but not at the least cost", expected="1.000",
                       got=score, nudge=nudge)  # fmt: skip
    return correct(f"the optimum in all {len(_problems())} problems", score=score)


def _over_nudge(costs: list[BlockCost], found: set[int]) -> str:
    if len(costs) - 1 in found:
        return "The last block gives nothing back: it is recomputed while all else is alive."
    return "Use `activation_peak(costs, chosen)`: sums of bytes saved forget what is recomputed."


def _problems() -> list[tuple[list[BlockCost], int]]:
    """Tables of blocks with budgets: a U-Net's, one that defeats greed, and drawn ones."""
    unet = [(8389, 33700, 2430), (2097, 14800, 1830), (1049, 7400, 1820), (6291, 20400, 4280)]
    greedy = [(0, 60, 55), (0, 50, 48), (0, 50, 48), (0, 10, 10)]
    draw = torch.Generator().manual_seed(5)
    drawn = [torch.randint(5, 100, (10, 3), generator=draw).tolist() for _ in range(4)]
    shares = [(unet, 0.6), (greedy, 0.42), *((rows, s) for rows in drawn for s in (0.72, 0.88))]
    problems = []
    for rows, share in shares:
        costs = [BlockCost(*row) for row in rows]
        least, most = activation_peak(costs, range(len(costs))), activation_peak(costs, ())
        problems.append((costs, max(least, int(share * most))))
    return problems


def chunked_loss(function: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Verdict:
    """Exercise 4: cross-entropy in chunks, with ignored labels, at a lower peak."""
    torch.manual_seed(6)
    hidden, head = torch.randn(256, 32), torch.randn(2048, 32) / 6
    labels = torch.randint(0, 2048, (256,))
    labels[:100] = -100  # no label: these tokens do not count
    wanted, found = (_loss_and_gradients(f, hidden, head, labels) for f in (_whole_loss, function))
    if not isinstance(found, tuple):
        return not_yet("one loss is wanted: a tensor without dimensions that has gradients")
    if not torch.allclose(found[0], wanted[0], rtol=1e-5):
        return not_yet("the loss", expected=f"{wanted[0]:.4f}", got=f"{found[0]:.4f}",
                       nudge=_loss_nudge(found[0], hidden, head, labels))  # fmt: skip
    pairs = zip(wanted, found, strict=True)
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs):
        return not_yet("the gradients are not those of the whole loss", nudge="Is a chunk detached?")
    whole, chunked = (_loss_peak(f, hidden, head, labels) for f in (_whole_loss, function))
    if chunked > LOSS_SHARE * whole:
        nudge = "Chunks alone keep all their logits for backward. Which technique drops them?"
        return not_yet("the peak", expected=f"at most {format_bytes(LOSS_SHARE * whole)}",
                       got=format_bytes(chunked), nudge=nudge)  # fmt: skip
    return correct(score=f"peak {format_bytes(chunked)}, whole {format_bytes(whole)}")


def _whole_loss(hidden: Tensor, head: Tensor, labels: Tensor, chunks: int = 1) -> Tensor:
    return F.cross_entropy(hidden @ head.T, labels, ignore_index=-100)


def _loss_and_gradients(function: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> Any:
    hidden, head = (t.clone().requires_grad_() for t in (hidden, head))
    loss = function(hidden, head, labels, 8)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        return None
    loss.backward()
    return loss.detach(), hidden.grad, head.grad


def _loss_nudge(found: Tensor, hidden: Tensor, head: Tensor, labels: Tensor) -> str:
    sums = F.cross_entropy(hidden @ head.T, labels, ignore_index=-100, reduction="sum")
    if torch.isnan(found):
        return "A chunk without any label has no mean. Add up sums, and divide once."
    if torch.allclose(found, sums / len(labels), rtol=1e-4):
        return "That divides by all tokens. Those with label -100 do not count."
    if torch.allclose(found, sums, rtol=1e-4):
        return "That is the sum. Divide by the number of labels that count."
    return "Chunks hold different numbers of labels: a mean of means weighs them alike."


def _loss_peak(function: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> int:
    layer = nn.Linear(32, 2048, bias=False)
    layer.weight = nn.Parameter(head.clone())
    inputs = hidden.clone().requires_grad_()

    def step() -> None:
        layer.zero_grad()
        function(inputs, layer.weight, labels, 8).backward()

    return measure(step, model=layer, timed_steps=0).peak_bytes


def diagnosis(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: what went wrong in the checkpointed network that evaluates badly."""
    kind, updates = answer.values()
    if str(kind).strip().lower() != "buffers":
        nudge = "Compare the two bodies' parameters() and buffers(), tensor by tensor."
        return not_yet("which tensors differ", got=repr(kind), nudge=nudge)
    if updates != 2:
        nudge = "Look at num_batches_tracked after three steps, and divide."
        return not_yet("updates in each step", got=repr(updates), nudge=nudge)
    return correct("the running statistics see each batch twice, and training never uses them")


def cured_checkpoint(function: Callable[[nn.Module, Tensor], Tensor]) -> Verdict:
    """Exercise 5: a checkpoint that leaves BatchNorm's statistics as plain training does."""
    torch.manual_seed(7)
    plain, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), torch.randn(64, 16)
    block = copy.deepcopy(plain)
    wanted = _block_gradients(lambda block, x: block(x), plain, x)
    try:
        found = _block_gradients(function, block, x)
    except CheckpointError as error:
        nudge = "BatchNorm saves other tensors in eval mode. How else can its statistics be held?"
        return not_yet(f"recomputation saved other tensors: {str(error)[:60]}", nudge=nudge)
    if not _same(found, wanted):
        return not_yet("the gradients are not those of the plain block",
                       nudge="BatchNorm must normalize by the batch in recomputation, too.")  # fmt: skip
    if block[1].momentum != plain[1].momentum or not block[1].training:
        nudge = "Put back what the context changed, in `finally`."
        return not_yet("the block is left changed", nudge=nudge)
    if int(block[1].num_batches_tracked) != 3:
        got = f"{int(block[1].num_batches_tracked)} updates in 3 steps"
        return not_yet("the statistics count other batches", expected="3 updates in 3 steps", got=got,
                       nudge=_counter_nudge(block[1], plain[1]))  # fmt: skip
    if not _same([*block.buffers()], [*plain.buffers()]):
        nudge = "The counter is right. Do running_mean and running_var still move in recomputation?"
        return not_yet("the running statistics differ", nudge=nudge)
    alive = [kept_bytes(f, plain, x.repeat(8, 1)) for f in (lambda b, x: b(x), function)]
    if alive[1] >= alive[0]:
        nudge = "Keep the checkpoint, and give it a context_fn."
        return not_yet("nothing is recomputed any more", nudge=nudge)
    return correct("same gradients, same statistics, bit by bit")


def _counter_nudge(norm: Any, plain: Any) -> str:
    if torch.allclose(norm.running_mean, plain.running_mean, rtol=1e-3):
        return "The means agree, but a momentum of None would divide by this counter."
    return "context_fn returns two contexts: one for forward, one for recomputation. Use the second."


def _block_gradients(function: Any, block: nn.Module, x: Tensor) -> list[Any]:
    for _ in range(3):
        block.zero_grad()
        function(block, x).square().sum().backward()
    return [p.grad for p in block.parameters()]


def _same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
