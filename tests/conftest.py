"""What holds for all tests of this folder."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """A shell has its background jobs ignore interrupts, and some tests here send themselves one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
