"""For notebooks that are tested side by side."""

from __future__ import annotations

import functools
from typing import Any

import pytest

STARTS = 2


def pytest_configure(config: pytest.Config) -> None:
    """A kernel that dies before it answers is started once more.

    Its ports are chosen before it binds them, so that two kernels that start at once can meet.
    """
    if config.getoption("nbval_lax", False):
        from nbval import kernel

        kernel.start_new_kernel = retried(kernel.start_new_kernel)


def retried(start: Any) -> Any:
    """The same function, called again where it fails to start a kernel."""

    @functools.wraps(start)
    def starting(*args: Any, **settings: Any) -> Any:
        for _ in range(STARTS - 1):
            try:
                return start(*args, **settings)
            except RuntimeError as error:
                print(f"A kernel did not start ({error}); once more.")
        return start(*args, **settings)

    return starting
