"""Lines of a patient's script, as the page shows them."""

from __future__ import annotations

import inspect

from IPython.display import Code

from utils.checked import check_public
from utils.clinic import Patient


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


__all__ = ["script"]

check_public(globals())
