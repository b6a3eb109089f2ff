"""Answers to the exercises of lab 10 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from utils.clinic import Patient
from utils.labs.mistakes import KnownAnswers

known = KnownAnswers()
known.mistakes(
    "letters",
    grows_on_purpose=({"patient 3": "c"}, "own error says a"),
    a_leak_in_eval=({"patient 5": "c"}, "Which two grow"),
    all_d=(dict.fromkeys(("patient 1", "patient 3", "patient 6"), "d"), "two grow"),
    no_letter=({"patient 7": "e"}, 'patient 7: "a", "b", "c" or "d" is wanted'),
)
known.rights("letters", capitals={"patient 3": " A", "patient 1": "C"})
known.mistakes("which_sum", a_number=(2, "total_loss"))
known.rights("which_sum", capitals=" Total_Size")


def edit(*changes: str) -> dict[str, Callable[[Patient], Patient]]:
    """A cure that replaces each odd text by the next one."""
    pairs = dict(zip(changes[::2], changes[1::2], strict=True))
    return {"cure": lambda patient: patient.edited(pairs)}


def richer(patient: Patient) -> Patient:
    return dataclasses.replace(patient.edited({"lr=1e-3": "lr=0.001"}), limit_bytes=10**12)


known.mistakes(
    "patient_1",
    logits=({"cause": "large logits"}, "Examine it"),
    kept_graph=({"cause": "kept graph"}, "who holds the frame"),
    a_leak=({"cause": "a leak"}, '"kept graph"'),
    parameters=({"category": "parameters"}, "Which category"),
    bits=({"category": "bits"}, "a category of bytes"),
    line_20=({"line": 20}, "Which line makes"),
    line_0=({"line": 0}, "1 to"),
    no_line=({"line": float("nan")}, "a line number"),
    no_patient=({"cure": lambda patient: None}, "is to return a patient"),
    as_it_came=({"cure": lambda patient: patient}, "came back as it went in"),
    no_function=({"cure": 3}, "a function"),
    richer=({"cure": richer}, "the budget was changed"),
    garbage_collected=(
        edit(
            "            continue\n", "            import gc; gc.collect()\n            continue\n"
        ),
        "This list can be reached",
    ),
    loss_alone=(
        edit(
            "            skipped.append(error)\n            continue\n",
            "            skipped.append(error)\n            loss = None\n            continue\n",
        ),
        "An exception holds its traceback",
    ),
    fewer_steps=(edit("STEPS = 10", "STEPS = 4"), "still to be skipped"),
    no_backward=(edit("        loss.backward()\n", ""), "no longer trains"),
)
known.mistakes(
    "patient_1",
    says_less=(
        edit("skipped.append(error)", "skipped.append('broken')"),
        "What the run reports is part of it",
    ),
)
known.mistakes(
    "patient_2",
    half_the_rows=(edit("ROWS, WIDTH = 2304", "ROWS, WIDTH = 1152"), "it is another loss"),
    chunks_without_recomputation=(
        edit(
            "F.cross_entropy(scores, torch.arange(len(texts)))",
            "sum(F.cross_entropy(s, t, reduction='sum') for s, t in zip(scores.split(128), "
            "torch.arange(len(texts)).split(128))) / len(texts)",
        ),
        "How many rows of them",
    ),
    no_backward=(edit("        loss.backward()\n", ""), "no longer trains"),
)
known.mistakes(
    "patient_3",
    cache_emptied=(
        edit(
            "        losses.append(loss.item())\n",
            "        losses.append(loss.item())\n        # empty_cache() on a GPU\n",
        ),
        "wholly free",
    ),
    another_mean=(
        edit("            weight.add_(kept, alpha=1 / STEPS)", "            weight.copy_(kept)"),
        "each with the same weight",
    ),
    no_backward=(edit("        loss.backward()\n", ""), "no longer trains"),
)
COPY = "weight.detach().clone()"
AVERAGED = "weight.add_(kept, alpha=1 / STEPS)"
known.mistakes(
    "patient_3",
    half_of_each=(edit(COPY, "weight.detach().half()"), "Fewer bits for each copy round it"),
    in_numpy=(
        edit(
            *(COPY, "weight.detach().numpy().copy()"),
            *(AVERAGED, "weight.add_(torch.from_numpy(kept), alpha=1 / STEPS)"),
        ),
        "no meter of PyTorch's counts them",
    ),
)
known.rights("patient_3", copies_on_the_host=edit(COPY, 'weight.detach().to("cpu", copy=True)'))
known.mistakes(
    "patient_4",
    one_by_one_states=(edit("lr=1e-3, fused=True", "lr=1e-3, foreach=False"), "The states stay"),
    maximizes=(
        edit("lr=1e-3, fused=True", "lr=1e-3, fused=True, maximize=False"),
        "Which of the four",
    ),
    sgd=(
        edit(
            "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
            "torch.optim.SGD(model.parameters(), lr=1e-3)",
        ),
        "SGD has no moments",
    ),
    no_backward=(edit("        loss.backward()\n", ""), "no longer trains"),
)
known.mistakes(
    "patient_5",
    eval_mode=(
        edit(
            '        wanted = model["teacher"](tokens).softmax(-1)',
            '        model.eval()\n        wanted = model["teacher"](tokens).softmax(-1)',
        ),
        "Autograd does not look at it",
    ),
    even_teacher=(
        edit(
            'wanted = model["teacher"](tokens).softmax(-1)',
            "wanted = torch.full((8, 64, 256), 1 / 256)",
        ),
        "learn from the same teacher",
    ),
    no_backward=(edit("        loss.backward()\n", ""), "no longer trains"),
)
known.rights(
    "patient_5",
    frozen_teacher=edit(
        '    model["teacher"].eval()\n', '    model["teacher"].eval().requires_grad_(False)\n'
    ),
)


def gradients_of(loss: str) -> dict[str, Callable[[Patient], Patient]]:
    """A backward for each small batch, of this."""
    total = "            total = total + loss"
    return edit(
        f"{total} / PARTS",
        f"            {loss}.backward()\n{total}.detach() / PARTS",
        "        total.backward()\n",
        "",
    )


known.mistakes(
    "patient_6",
    no_mean=(
        edit("            total = total + loss / PARTS", "            total = total + loss"),
        "each small batch counts one eighth",
    ),
    graph_retained=(
        edit("total.backward()", "total.backward(retain_graph=True)"),
        "retain_graph keeps",
    ),
    no_backward=(edit("        total.backward()\n", ""), "no longer trains"),
    own_backward=(gradients_of("loss"), "AdamW hides how large gradients are"),
    no_such_text=(edit("no such text", ""), "stands 0 times"),
)
known.mistakes(
    "patient_7",
    shorter_context=(
        edit("CONTEXT, WIDTH, HEADS = 1024", "CONTEXT, WIDTH, HEADS = 256"),
        "another problem",
    ),
    not_causal=(
        edit(
            "        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)\n",
            "",
            "scores.softmax(-1) @ value",
            "F.scaled_dot_product_attention(query, key, value, is_causal=True)",
        ),
        "looks both ways",
    ),
    no_backward=(edit("        loss.backward()\n", ""), "no longer trains"),
)
known.mistakes(
    "patient_6",
    slow=True,
    a_hundred_fold=(gradients_of("(100 * loss / PARTS)"), "AdamW hides how large gradients are"),
)
