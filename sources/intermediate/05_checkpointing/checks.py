"""Checks of lesson and lab 05, "Trading compute for memory: gradient checkpointing"."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.checkpoint_probe import (
    LOSS,
    RESULT,
    Noisy,
    backward,
    calls_of_torch_s_own,
    fails_under_grad,
    kept_after_forward,
    kept_bytes,
    noisy_gradients,
    ran_without_gradients,
    runs_too_often,
    same_tensors,
    wrong_gradients,
)
from utils.labs.kinds import Kind, NotYet, WrongKind, function, keys, number, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.memory import measure
from utils.units import format_bytes

from .block_choice import BlockCost, activation_peak, best_blocks, recompute_flops

_FORGOTTEN = "Every block's input stays, also a checkpointed one's."
LOSS_SHARE = 0.3  # of the plain peak: below it a loss in eight chunks must stay
FEW_AND_MANY = (4, 16)  # chunks of two calls, of which the second has less alive,
CHUNKED_FURTHER = 0.8  # at most this share of the first's peak


last_block = Question(
    "Lesson 05: nine blocks and 256 words; the last block alone is checkpointed.",
    one_of("yes", "no"),
    right="no",
    wrong={
        "yes": "That block gives up its activations and takes them back at once: backward begins "
        "with it. What is alive at that moment, with and without?"
    },
    note="its backward comes first: what it gave up is back while all others are alive",
)

best_segment = Question(
    "Lesson 05: 36 blocks that keep 8 tensors inside and 1 at the edge, in segments.",
    number("a number of blocks"),
    right=2,
    wrong={
        6: "6 keeps 6 + 5 + 6 x 8 = 59 tensors. The square root of 36 is right if a block keeps "
        "nothing inside."
    },
    nudge="Tensors alive: 36/s edges, s - 1 edges within the segment, 8 s inside. Try s = 1, 2, 3.",
    note="36/2 + 1 + 2 x 8 = 35 tensors; one block a segment keeps 44, three keep 38",
    expected="the size of a segment",
)


@takes(function())
def checkpointed(answer: Callable[[nn.Module, Tensor], Tensor]) -> Verdict:
    """Exercise 1: a checkpoint by saved-tensor hooks, with the random state."""
    torch.manual_seed(3)
    plain, x = Noisy(), torch.randn(512, 64)
    block = copy.deepcopy(plain)
    with calls_of_torch_s_own() as calls:
        try:
            found, left = noisy_gradients(answer, block, x)
        except Exception:  # the list of what the second run saved is empty, and asked for a tensor
            if verdict := ran_without_gradients(block):
                return verdict
            raise
    if calls:
        nudge = "saved_tensors_hooks(pack, unpack) around block(x) is where your own begins."
        return not_yet("it calls torch.utils.checkpoint, which you are to build", nudge=nudge)
    return (
        wrong_gradients(found, left, block, plain, x)
        or runs_too_often(block)
        or fails_under_grad(answer, copy.deepcopy(plain), x)
        or kept_after_forward(answer, plain, x, len(block.runs))
    )


def _bytes_case(layers: int, every: int, edge: int = 100, inside: int = 1730) -> Case:
    chosen = range(0, layers, every) if every else ()
    right = activation_peak([BlockCost(edge, inside, 1)] * layers, chosen)
    missing = "One block is being recomputed at the peak: its inside is alive, too."
    if len(chosen) not in (0, layers) and layers - 1 in chosen:
        missing = "Here the last block is a checkpointed one: its inside joins all that were kept."
    twice = "One inside too many: which block's backward is running, and was it counted already?"
    wrong = dict.fromkeys((right - n * edge for n in range(1, layers + 1)), _FORGOTTEN)
    wrong |= {right - inside: missing, right + inside: twice}
    says = f"{layers} blocks, {edge} bytes of input and {inside} inside each, every={every}"
    return Case((layers, edge, inside, every), right, says, wrong=wrong)


predicted_bytes = Exercise(
    "Exercise 2: the peak of activations of equal blocks, each k-th checkpointed.",
    cases=[
        _bytes_case(12, 0),
        _bytes_case(12, 1),
        _bytes_case(12, 2),
        _bytes_case(11, 3),
        _bytes_case(12, 4),
        _bytes_case(13, 2),
        _bytes_case(9, 3, 64, 1000),
    ],
    returns=whole("a whole number of bytes"),
    nudge="Walk backward from the last block. What is alive while block i computes its gradients?",
    note="all inputs, the insides that were kept, and the one that is recomputed",
)


def _read_blocks(value: Any) -> set[int]:
    if not isinstance(value, (Set, Sequence)) or isinstance(value, (str, bytes)):
        raise WrongKind("")
    return {whole().read(index) for index in value}


@takes(function())
def best_set(answer: Callable[[list[BlockCost], int], Collection[int]]) -> Verdict:
    """Exercise 3: the cheapest set of blocks under a budget, against the exact optimum."""
    blocks, worst, lost = Kind("a set of block numbers", _read_blocks), 1.0, []
    for costs, limit in _problems():
        given = [replace(cost) for cost in costs]
        found = blocks.returned(answer(given, limit))
        if given != costs:
            nudge = "Costs are given, and the score is reckoned with them as they were."
            return not_yet("your function changed the costs", nudge=nudge)
        if wrong := [index for index in found if not 0 <= index < len(costs)]:
            return not_yet(f"{shown(wrong[0])} is no block: there are {len(costs)}, from 0")
        if (peak := activation_peak(costs, found)) > limit:
            got = f"{peak:,} bytes with blocks {sorted(found)}"
            return not_yet(
                "the peak is over the budget",
                expected=f"at most {limit:,} bytes",
                got=got,
                nudge=_over_nudge(costs, found),
            )
        least = recompute_flops(costs, best_blocks(costs, limit))
        spent = recompute_flops(costs, found)
        over = spent / least if least else 1.0 + bool(spent)
        worst, lost = max(worst, over), [*lost, (costs, limit)] if over > 1.0 else lost
    score = scored(worst, 1.0, "times the optimum's operations", "{:.3f}".format)
    if worst > 1.0:
        nudge = "Most bytes per operation first is a good guess. Does another set just reach the budget?"
        if all(activation_peak(each, best_blocks(each, limit)) == limit for each, limit in lost):
            nudge = (
                "The cheapest set reaches these budgets to the byte, and so it fits: `<=`, not `<`."
            )
        return not_yet(
            "every budget is kept, but not at the least cost",
            expected="1.000",
            got=score,
            nudge=nudge,
        )
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
    shares, problems = [(unet, 0.6), (greedy, 0.42)], []
    shares += [(rows, share) for rows in drawn for share in (0.72, 0.88)]
    for rows, share in shares:
        costs = [BlockCost(*row) for row in rows]
        least, most = activation_peak(costs, range(len(costs))), activation_peak(costs, ())
        problems.append((costs, max(least, int(share * most))))
    exact = [activation_peak(costs, best_blocks(costs, limit)) for costs, limit in problems]
    edges = [(costs, peak) for (costs, _), peak in zip(problems, exact, strict=True)]
    return problems + edges[2:4]  # budgets that the optimum reaches to the byte


@takes(function())
def chunked_loss(answer: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Verdict:
    """Exercise 4: cross-entropy in chunks, with ignored labels, at a lower peak."""
    torch.manual_seed(6)
    hidden, head = torch.randn(256, 32), torch.randn(2048, 32) / 6
    labels = torch.randint(0, 2048, (256,))
    labels[:100] = -100  # no label: these tokens do not count
    for chunks in (8, 7):  # 7 do not divide them
        if verdict := _wrong_loss(answer, hidden, head, labels, chunks):
            return verdict
    whole_peak, chunked = (_loss_peak(f, hidden, head, labels) for f in (_whole_loss, answer))
    if chunked > LOSS_SHARE * whole_peak:
        nudge = "Chunks alone keep all their logits for backward. Which technique drops them?"
        return not_yet(
            "the peak",
            expected=f"at most {format_bytes(LOSS_SHARE * whole_peak)}",
            got=format_bytes(chunked),
            nudge=nudge,
        )
    few, many = (_loss_peak(answer, hidden, head, labels, chunks) for chunks in FEW_AND_MANY)
    if many > CHUNKED_FURTHER * few:
        nudge = "`chunks` is the caller's: more of them, and fewer logits are alive at a time."
        return not_yet(
            "the peak does not follow `chunks`",
            nudge=nudge,
            expected=f"in {FEW_AND_MANY[1]} chunks less than in {FEW_AND_MANY[0]}",
            got=f"{format_bytes(many)} and {format_bytes(few)}",
        )
    par = _loss_peak(_chunked, hidden, head, labels)
    return correct(score=scored(chunked, par, "at the peak", format_bytes))


def _chunked(hidden: Tensor, head: Tensor, labels: Tensor, chunks: int) -> Tensor:
    """A sum for each chunk, computed again in backward: the score's par."""

    def summed(part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(part @ head.T, wanted, ignore_index=-100, reduction="sum")

    pairs = zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True)
    parts = [checkpoint(summed, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack([*map(torch.as_tensor, parts)]).sum() / (labels != -100).sum()


def _whole_loss(hidden: Tensor, head: Tensor, labels: Tensor, chunks: int = 1) -> Tensor:
    return F.cross_entropy(hidden @ head.T, labels, ignore_index=-100)


def _wrong_loss(
    answer: Callable[..., Any], hidden: Tensor, head: Tensor, labels: Tensor, chunks: int
) -> Verdict | None:
    wanted, found = (
        _loss_and_gradients(f, hidden, head, labels, chunks) for f in (_whole_loss, answer)
    )
    if not torch.allclose(found[0], wanted[0], rtol=1e-5):
        nudge = _loss_nudge(found[0], hidden, head, labels, chunks)
        return not_yet(
            f"the loss in {chunks} chunks",
            expected=f"{wanted[0]:.4f}",
            got=f"{found[0]:.4f}",
            nudge=nudge,
        )
    if not all(
        a is not None and b is not None and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(wanted, found, strict=True)
    ):
        return not_yet(
            "the gradients are not those of the whole loss", nudge="Is a chunk detached?"
        )
    return None


def _loss_and_gradients(
    answer: Callable[..., Any], hidden: Tensor, head: Tensor, labels: Tensor, chunks: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    hidden, head = (t.clone().requires_grad_() for t in (hidden, head))
    backward(loss := LOSS.returned(answer(hidden, head, labels, chunks)))
    return loss.detach().float(), hidden.grad, head.grad


def _loss_nudge(found: Tensor, hidden: Tensor, head: Tensor, labels: Tensor, chunks: int) -> str:
    each = F.cross_entropy(hidden @ head.T, labels, ignore_index=-100, reduction="none")
    total, size = each.sum(), len(labels) // chunks * chunks
    if torch.isnan(found):
        return "A chunk without any label has no mean. Add up sums, and divide once."
    if torch.allclose(found, total / len(labels), rtol=1e-4):
        return "That divides by all tokens. Those with label -100 do not count."
    if torch.allclose(found, total, rtol=1e-4):
        return "That is the sum. Divide by the number of labels that count."
    counts = [(part != -100).sum() for part in (labels, labels[:size])]
    if any(torch.allclose(found, each[:size].sum() / count, rtol=1e-4) for count in counts):
        left = len(labels) - size
        return f"{chunks} equal chunks hold {size} tokens of {len(labels)}. Where do the other {left} go?"
    return "Chunks hold different numbers of labels: a mean of means weighs them alike."


def _loss_peak(
    answer: Callable[..., Any], hidden: Tensor, head: Tensor, labels: Tensor, chunks: int = 8
) -> int:
    layer = nn.Linear(32, 2048, bias=False)
    layer.weight = nn.Parameter(head.clone())
    inputs = hidden.clone().requires_grad_()

    def step() -> None:
        layer.zero_grad()
        answer(inputs, layer.weight, labels, chunks).backward()

    return measure(step, model=layer, timed_steps=0).peak_bytes


@takes(
    keys(
        {"what differs": one_of("parameters", "gradients", "buffers"), "updates per step": number()}
    )
)
def diagnosis(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: what went wrong in the checkpointed network that evaluates badly."""
    look = "Compare the two bodies' parameters() and buffers(), tensor by tensor."
    count = "Look at num_batches_tracked after three steps, and divide."
    return (
        judge(
            answer["what differs"],
            "buffers",
            "which tensors differ",
            expected="one of the three",
            nudge=look,
        )
        or judge(
            answer["updates per step"], 2, "updates in each step", expected="a number", nudge=count
        )
        or correct("the running statistics see each batch twice, and training never uses them")
    )


@takes(function())
def cured_checkpoint(answer: Callable[[nn.Module, Tensor], Tensor]) -> Verdict:
    """Exercise 5: a checkpoint that leaves BatchNorm's statistics as plain training does."""
    torch.manual_seed(7)
    plain, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), torch.randn(64, 16)
    inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=0.3))
    nested = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), inner)
    return (
        _wrong_cure(answer, plain, x)
        or _wrong_cure(answer, nested, x, "where a norm lies deeper, with a momentum of 0.3: ")
        or _keeps_all(answer, plain, x)
    )


def _wrong_cure(
    answer: Callable[..., Any], plain: nn.Sequential, x: Tensor, where: str = ""
) -> Verdict | None:
    """The verdict on gradients and statistics after three steps of a block; `where` it is."""
    block = copy.deepcopy(plain)
    wanted = _block_gradients(lambda block, x: block(x), plain, x)
    try:
        found = _block_gradients(answer, block, x)
    except NotYet as ending:
        if not isinstance(ending.__cause__, CheckpointError):
            raise
        nudge = "BatchNorm saves other tensors in eval mode. How else can its statistics be held?"
        return not_yet(
            f"recomputation saved other tensors: {str(ending.__cause__)[:60]}", nudge=nudge
        )
    if not same_tensors(found, wanted):
        return not_yet(
            f"{where}the gradients are not those of the plain block",
            nudge="BatchNorm must normalize by the batch in recomputation, too.",
        )
    return _wrong_statistics(block, plain, where)


def _norms(block: nn.Module) -> list[nn.BatchNorm1d]:
    return [part for part in block.modules() if isinstance(part, nn.BatchNorm1d)]


def _wrong_statistics(block: nn.Module, plain: nn.Module, where: str) -> Verdict | None:
    for norm, right in zip(_norms(block), _norms(plain), strict=True):
        if norm.momentum != right.momentum or not norm.training:
            nudge = "Put back what the context changed, in `finally`: what was there, not a number of your own."
            got = f"momentum {norm.momentum}, training {norm.training}"
            return not_yet(
                f"{where}the block is left changed",
                nudge=nudge,
                got=got,
                expected=f"momentum {right.momentum}, training True",
            )
    for norm, right in zip(_norms(block), _norms(plain), strict=True):
        if int(norm.num_batches_tracked or 0) != 3:
            got = f"{int(norm.num_batches_tracked or 0)} updates in 3 steps"
            nudge = (
                "block.children() ends at the first level; block.modules() goes all the way down."
            )
            return not_yet(
                f"{where}the statistics count other batches",
                expected="3 updates in 3 steps",
                got=got,
                nudge=nudge if where else _counter_nudge(norm, right),
            )
    if not same_tensors([*block.buffers()], [*plain.buffers()]):
        nudge = "The counter is right. Do running_mean and running_var still move in recomputation?"
        return not_yet(f"{where}the running statistics differ", nudge=nudge)
    return None


def _keeps_all(answer: Callable[..., Any], plain: nn.Module, x: Tensor) -> Verdict:
    alive = [kept_bytes(f, plain, x.repeat(8, 1)) for f in (lambda b, x: b(x), answer)]
    if alive[1] >= alive[0]:
        nudge = "Keep the checkpoint, and give it a context_fn."
        return not_yet("nothing is recomputed any more", nudge=nudge)
    return correct("same gradients, same statistics, bit by bit")


def _counter_nudge(norm: Any, plain: Any) -> str:
    if torch.allclose(norm.running_mean, plain.running_mean, rtol=1e-3):
        return "The means agree, but a momentum of None would divide by this counter."
    return (
        "context_fn returns two contexts: one for forward, one for recomputation. Use the second."
    )


def _block_gradients(answer: Callable[..., Any], block: nn.Module, x: Tensor) -> list[Any]:
    for _ in range(3):
        block.zero_grad()
        backward(RESULT.returned(answer(block, x)).square().sum())
    return [p.grad for p in block.parameters()]
