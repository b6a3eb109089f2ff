"""A machine that lets nobody make network namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from utils.ranks import elastic
from utils.ranks.namespaces import NamespaceError


def refuse_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refused(*_: float) -> Iterator[tuple[str, str]]:
        raise NamespaceError("not today")
        yield "", ""

    monkeypatch.setattr(elastic, "linked_hosts", refused)
