"""Lines of a patient's script, as the page shows them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from IPython.display import Code

from utils.checked import check_public
from utils.clinic import Patient

# The same in every script, and without a say in what fills the memory.
_LEFT_OUT = (
    "generator = ",
    "losses = []",
    "losses.append(0.0)",
    "losses[-1] += loss.item()",
    "optimizer.zero_grad()",
    "return losses",
)


def script(patient: Patient, start: str, end: str) -> Code:
    """Lines of a patient's script, from one text up to another.

    Raises:
        ValueError: a text does not stand in the script.
    """
    module = inspect.getmodule(patient.train)
    text = inspect.getsource(module) if module else ""
    if start not in text or end not in text.partition(start)[2]:
        raise ValueError(f"{start!r} up to {end!r} does not stand in the script of {patient.name}.")
    return Code(start + text.partition(start)[2].partition(end)[0], language="python")


def loops(patients: Iterable[Patient]) -> Code:
    """Each patient's complaint, its optimizer, and its loop without the lines that all of them have."""
    numbered = enumerate(patients, 1)  # a patient's name would tell its cause
    return Code("\n\n".join(_loop(*each) for each in numbered), language="python")


def _loop(number: int, patient: Patient) -> str:
    optimizer = inspect.getsource(patient.build).rpartition("return model, ")[2].strip()
    body = inspect.getsource(patient.train).split('"""')[2].strip("\n").splitlines()
    lines = [line for line in body if not line.strip().startswith(_LEFT_OUT)]
    head = f'# patient {number}: "{patient.complaint}"\n    # optimizer = {optimizer}'
    return "\n".join([head, *lines])


__all__ = ["loops", "script"]

check_public(globals())
