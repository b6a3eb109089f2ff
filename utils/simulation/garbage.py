"""Python's collector of cycles, which takes seconds of a large simulation to find next to nothing.

Each of its full passes looks at every object of the process: the imported libraries, the model. None
of these becomes garbage while a step runs. `gc.freeze` sets them aside; what the step itself makes
is collected as ever, so that tensors that only cycles hold die as they do in a real program.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def set_aside() -> Iterator[Callable[[], None]]:
    """Inside, the collector passes by what there was before; calling what it gives adds what is new.

    It holds for all threads of the process. Undone at the end, come what may; where something is
    frozen already, by a program or by a simulation in another thread, all stays as it is.
    """
    if gc.get_freeze_count():
        yield lambda: None
        return
    gc.freeze()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()
