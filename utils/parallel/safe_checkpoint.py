"""Checkpoints of `torch.distributed.checkpoint` that a kill at any moment leaves whole.

A save into the last checkpoint's folder destroys it when it is cut off. So a save goes into a new
folder. Each rank sums its files up while it writes them: what was meant, and not what the disk made of
it. Then it reads them back, rank 0 gives the folder its name, and only then do older ones go.
`utils.parallel.checkpoint_folder` says which. A checkpoint of `dcp` is made of pickles, which may call anything
when they are read; here they are read as plain data, and what is not plain is not saved.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from utils.parallel.checkpoint_folder import (
    DamagedError,
    begin,
    beyond,
    differing,
    list_checkpoints,
    problems,
    publish,
    read_list,
    remove,
    step_of,
    write_list,
)
from utils.parallel.plain_files import PlainLoads, PlainReader, PlainSaves, SummingWriter


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what to do."""


def save_safely(state: dict[str, Any], folder: Path, step: int, keep: int = 2) -> Path:
    """Save on all ranks into a folder below `folder`, and keep that many whole ones.

    What was just saved stays, whatever its step. Older ones are read before any goes: each rank
    reads a part of the files, which takes about as long as to write them.

    Args:
        state: what `dcp.save` takes: tensors, DTensors, objects with a `state_dict`; what is no
            tensor must be plain data, as `torch.load(weights_only=True)` reads it.
        folder: seen by all ranks.
        step: of the training.
        keep: how many whole checkpoints stay, this one included; two, so that one is left where
            the last goes bad on its disk.

    Raises:
        CheckpointError: on all ranks: the disk is full or does not take the files, or something is
            no plain data; what was there is untouched.
        ValueError: `keep` below one.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the checkpoint that is written must stay: 1.")
    unfinished, problem = _on_first(begin, folder, step)
    if problem:
        raise CheckpointError(_not_saved(step, problem))
    try:
        _write(state, unfinished)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if _rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(_not_saved(step, _cause(error))) from error
    found, problem = _on_first(lambda: (publish(unfinished), list_checkpoints(folder)))
    if problem:
        raise CheckpointError(_not_saved(step, problem))
    final, paths = found
    older = beyond(paths, keep, lambda path: path == final or not _problems(path))
    if _rank() == 0:
        try:
            remove(older)
        except OSError as error:
            said = f"{final.name} is saved, and an older one does not go: {error}. Remove it."
            warnings.warn(said, stacklevel=2)
    return final


def _write(state: dict[str, Any], unfinished: Path) -> None:
    """Write all files and their list, and read back what this rank wrote; what fails does on all ranks."""
    writer = SummingWriter(unfinished)
    with _alone_is_meant():
        save(state, storage_writer=writer, planner=PlainSaves())
    parts = _of_all(writer.sums)
    found = differing(unfinished, writer.sums)
    if _rank() == 0:
        files = {name: sums for part in parts for name, sums in part.items()}
        try:
            write_list(unfinished, files, len(parts))
        except (OSError, DamagedError) as error:
            found.append(_cause(error))
    if problems_of_all := [text for part in _of_all(found) for text in part]:
        raise CheckpointError(problems_of_all[0])


def load_newest(state: dict[str, Any], folder: Path, ranks: int | None = None) -> int:
    """Fill `state` in place from what was saved last and is whole, on any number of ranks; its step.

    Rank 0 warns where something was saved later that is damaged or cannot be read.

    Args:
        state: as for `save_safely`.
        folder: that it saved to.
        ranks: how many ranks must have saved it; None for any number.

    Raises:
        CheckpointError: on all ranks: none is whole, or it is of another model or of another
            number of ranks, or it lacks what a rank asks for.
    """
    paths, unlisted = _on_first(list_checkpoints, folder)
    skipped = [unlisted] if unlisted else []
    for path in paths or ():
        if found := _problems(path) or _unread(state, path, ranks):
            skipped.append(f"{path.name}: {found[0]}")
            continue
        if skipped and _rank() == 0:
            warnings.warn(f"Not whole: {'; '.join(skipped)}. {path.name} is loaded.", stacklevel=2)
        return step_of(path)
    damaged = f" ({'; '.join(skipped)})" if skipped else ""
    raise CheckpointError(
        f"{folder.name} holds no whole checkpoint{damaged}: "
        "start from the beginning, in another folder, or name the folder that the run saved to."
    )


def any_saved(folder: Path) -> bool:
    """Whether a folder holds checkpoints, whole or not, as rank 0 sees it."""
    paths, problem = _on_first(list_checkpoints, folder)
    if problem:
        raise CheckpointError(f"{folder} cannot be read: {problem}.")
    return bool(paths)


def _problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint's files, of which each rank reads a part; the same on all."""
    parts = _of_all(problems(path, _rank(), _ranks()))
    return list(dict.fromkeys(text for part in parts for text in part))


def _unread(state: dict[str, Any], path: Path, ranks: int | None) -> list[str]:
    """Load a checkpoint; what the disk did not give, which is no fault of the reader's."""
    listed, problem = _on_first(read_list, path)
    if problem:
        return [problem]
    if ranks not in (None, listed.ranks):
        raise CheckpointError(
            f"{path.name} was saved by {listed.ranks} ranks, and these are {ranks}: no rank's data "
            "and random state fit. Start as many ranks, or ask without ranks= for what they share."
        )
    reader = PlainReader(path, set(listed.files))
    try:
        with _alone_is_meant():
            load(state, storage_reader=reader, planner=PlainLoads())
        return []
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointException):  # and so on all ranks
            if unread := [text for text in _of_all(reader.unread) if text]:
                return unread
        raise CheckpointError(
            f"{path.name} does not fit what is to be loaded: {_cause(error)}. Build model and "
            "optimizer as the run that saved it did; parameters fit any number of ranks, what "
            f"each rank keeps for itself only as many as saved it ({listed.ranks})."
        ) from error


def _not_saved(step: int, cause: str) -> str:
    return (
        f"Step {step} was not saved: {cause}. The checkpoints that were there are untouched. Free "
        "some space, or save to another folder."
    )


def _cause(error: BaseException) -> str:
    """The first line of what lies at the bottom of an error of `dcp`."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    text = str(error).strip()
    if "inline_container" in text or "PytorchStreamWriter" in text:  # torch.save, of a short write
        return "a file could not be written to its end; the disk may be full"
    return text.splitlines()[0].rstrip(".") if text else repr(error)


def _on_first(action: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What rank 0 found alone, or why not; every rank hears of it, and none waits for ever."""
    box: list[Any] = [(None, "")]
    if _rank() == 0:
        try:
            box = [(action(*args), "")]
        except (OSError, DamagedError) as error:
            box = [(None, _cause(error))]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def _of_all(value: Any) -> Sequence[Any]:
    """What each rank has."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def _alone_is_meant() -> Iterator[None]:
    """PyTorch warns where there is no process group; one process is a world, too."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield
