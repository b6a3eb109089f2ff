"""Files for other schedulers, read by those schedulers' own code where it is installed.

A tool that is missing, and a file that is wrong, are told apart: `MissingToolError` against `ManifestError`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from utils.files import scratch

KUBERNETES = "1.33"  # the oldest with all fields of kubernetes.yaml
TRAIN_JOB = ("trainer.kubeflow.org/v1alpha1", "TrainJob")
EXTRA = 'install it with: .venv/bin/python -m pip install ".[clusters]"'
SKY_SECONDS = 120.0


class ManifestError(ValueError):
    """A file that its scheduler would refuse; the text says where and why."""


class MissingToolError(RuntimeError):
    """What would check the file is not here; the text says how to get it."""


def read_yaml(text: str, name: str = "this YAML") -> list[dict[str, Any]]:
    """The documents of a YAML text.

    Raises:
        ManifestError: it is no YAML, a line is indented by a tab, or a document is no mapping.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ManifestError(
                f"{name}, line {number}, is indented by a tab. YAML takes spaces alone: put two in "
                "its place, and tell your editor to do so."
            )
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ManifestError(f"{name} is no YAML: {said}") from error
    if not documents or not all(isinstance(found, dict) for found in documents):
        raise ManifestError(f"{name} holds no mapping of keys: is it the right file?")
    return documents


def check_kubernetes(text: str, name: str = "kubernetes.yaml") -> list[str]:
    """The kinds in a manifest, all of them built in, each with fields of that kind alone.

    Raises:
        ManifestError: a field is wrong, or Kubernetes has no such kind itself.
        MissingToolError: kubernetes-validate is not installed.
    """
    kubernetes_validate = _needs("kubernetes_validate", "kubernetes-validate")
    documents = read_yaml(text, name)
    for found in documents:
        kind = _kind(found, name)
        try:
            kubernetes_validate.validate(found, KUBERNETES, strict=True)
        except kubernetes_validate.SchemaNotFoundError as error:  # its own program only warns
            raise ManifestError(
                f"{name}: Kubernetes has no kind {kind[1]} in {kind[0]}. Check both words; what an "
                "operator adds, its own types must check."
            ) from error
        except kubernetes_validate.ValidationError as error:
            place = ".".join(map(str, error.path)) or "its top"
            raise ManifestError(f"{name}, {kind[1]}, {place}: {error.message}") from error
    return [found["kind"] for found in documents]


def check_train_job(text: str, name: str = "trainjob.yaml") -> None:
    """A TrainJob, read by Kubeflow's own types with no field that they do not know.

    Raises:
        ManifestError: a field is wrong, unknown or missing.
        MissingToolError: kubeflow is not installed.
    """
    models = _needs("kubeflow_trainer_api.models", "kubeflow")
    from pydantic import ValidationError

    [found] = read_yaml(text, name)
    if _kind(found, name) != TRAIN_JOB:
        raise ManifestError(f"{name} is a {_kind(found, name)[1]}, not a {TRAIN_JOB[1]}.")
    try:
        job = models.TrainerV1alpha1TrainJob.from_dict(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ManifestError(f"{name}, {place}: {first['msg']}.") from error
    # The types drop what they do not know: what is read back must be what was there.
    if lost := _lost(found, job.to_dict() if job else {}):
        raise ManifestError(f"{name}: a TrainJob has no field {lost[0]}.")


def _lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Fields of a document that are not in what was made of it."""
    if isinstance(given, dict) and isinstance(kept, dict):
        gone = [f"{place}{key}" for key in given if key not in kept]
        both = [_lost(given[key], kept[key], f"{place}{key}.") for key in given if key in kept]
        return [*gone, *chain.from_iterable(both)]
    if isinstance(given, list) and isinstance(kept, list):
        pairs = zip(given, kept, strict=True)
        return list(chain.from_iterable(_lost(a, b, place) for a, b in pairs))
    return []


def check_skypilot(path: Path | str) -> str:
    """What SkyPilot's own code makes of a task file: its name, nodes and resources.

    Raises:
        ManifestError: it refuses the file.
        MissingToolError: SkyPilot is not installed.
    """
    _is_installed("sky", "skypilot", "pip install skypilot, 199 MB")
    read_yaml(Path(path).read_text(encoding="utf-8"), Path(path).name)
    code = (
        "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); [one] = task.resources; "
        "print(task.name, task.num_nodes, one.accelerators, one.use_spot, one.job_recovery)"
    )
    with scratch("sky") as home:  # it writes into one
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(path).resolve())],
            capture_output=True,
            text=True,
            cwd=Path(path).resolve().parent,
            timeout=SKY_SECONDS,
            env=_environment(str(home)),
        )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        raise ManifestError(f"SkyPilot refuses {Path(path).name}: {said}")
    return done.stdout.strip().splitlines()[-1]


def kubectl_says(path: Path | str) -> str:
    """What an API server says of a manifest (`kubectl apply --dry-run=server`); nothing is made.

    Returns:
        Its answer; or, where kubectl is missing or reaches no server, a sentence that says so.

    Raises:
        ManifestError: the server refuses it.
    """
    if shutil.which("kubectl") is None:
        return "There is no kubectl here, so no API server saw the file."
    reached = _kubectl("version", "--request-timeout=3s")
    if reached.returncode:
        return "kubectl reaches no API server here, so none saw the file."
    done = _kubectl("apply", "--dry-run=server", "-f", str(path))
    if done.returncode:
        raise ManifestError(f"The API server refuses {Path(path).name}: {done.stderr.strip()}")
    return done.stdout.strip()


def _kubectl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=30)


def _environment(home: str) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": home,
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _kind(found: dict[str, Any], name: str) -> tuple[str, str]:
    missing = [key for key in ("apiVersion", "kind") if not isinstance(found.get(key), str)]
    if missing:
        raise ManifestError(f"{name}: a document has no {' and no '.join(missing)}.")
    return found["apiVersion"], found["kind"]


def _needs(module: str, package: str, how: str = EXTRA) -> ModuleType:
    """An optional package, by name: types must come out alike where it is not installed."""
    _is_installed(module, package, how)
    return importlib.import_module(module)


def _is_installed(module: str, package: str, how: str = EXTRA) -> None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingToolError(f"{package} is not installed, so the file is not checked: {how}")
