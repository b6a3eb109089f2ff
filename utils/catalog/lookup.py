"""Finding a row of a table by name, whatever the case and spacing it is written in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

Row = TypeVar("Row")


def plain(name: str) -> str:
    """A name without case, spaces and punctuation: "RTX 4090" is "rtx4090"."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def find(table: Mapping[str, Row], name: str, kind: str) -> Row:
    """The row of `table` called `name`; `kind` is the word for a row in the error's sentence.

    Raises:
        ValueError: no row has that name; the sentence gives the nearest names.
    """
    by_plain_name = {plain(key): key for key in table}
    wanted = plain(str(name))
    if wanted in by_plain_name:
        return table[by_plain_name[wanted]]
    raise ValueError(not_found(table, name, kind))


def not_found(names: Iterable[str], name: str, kind: str) -> str:
    """The sentence on a name that is none of `names`, with the nearest of them."""
    by_plain_name = {plain(key): key for key in names}
    wanted = plain(str(name))
    near = difflib.get_close_matches(wanted, by_plain_name, n=3, cutoff=0.4)
    near += [key for key in by_plain_name if wanted and key.startswith(wanted) and key not in near]
    nearest = [by_plain_name[key] for key in near] or sorted(by_plain_name.values())
    return f"No {kind} is called {name!r}. Nearest: {', '.join(nearest)}."
