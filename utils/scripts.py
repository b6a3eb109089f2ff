"""Scripts that a lesson leaves behind: its own functions in a file that runs without the course."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from utils.start import Here


def write_script(here: Here, name: str, *parts: str | Callable[..., object]) -> None:
    """Write a script into `build/lesson-NN/`, and print it.

    Args:
        here: What `setup` returned; its lesson names the folder.
        name: Of the file, such as "finetune.py".
        parts: In their order: text as it is, or a function, of which the source is taken.

    Raises:
        SyntaxError: the parts together are no Python.
        OSError: a function has no source (it was not defined in a cell or a file), or the folder
            cannot be written to.
    """
    source = "\n\n".join(
        part if isinstance(part, str) else inspect.getsource(part) for part in parts
    )
    compile(source, name, "exec")
    path = here.root / "build" / f"lesson-{here.lesson.partition('/')[2]}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    print(f"# written to {path.relative_to(here.root)}\n{source}")
