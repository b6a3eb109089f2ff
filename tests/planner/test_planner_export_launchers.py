"""The files of schedulers: accepted by their own tools, and harmless whatever a job is called."""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import replace

import pytest
from container_build import build_container, container_problem
from export_cases import CASES, TINY, tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from utils.catalog import model_shape
from utils.lessons.lesson_17.clusters import (
    ManifestError,
    MissingToolError,
    check_kubernetes,
    check_skypilot,
    check_train_job,
    kubectl_says,
    read_yaml,
)
from utils.lessons.lesson_17.stubs import try_script
from utils.parallel.saves import STOPPED
from utils.planner import Batch, Cluster, Lora, Plan, export
from utils.planner.exporters import slurm
from utils.planner.exporters.job import LONGEST_NAME, job_name

NAMES = [
    "job.slurm",
    "kubernetes.yaml",
    "trainjob.yaml",
    "ray_train.py",
    "skypilot.yaml",
    "Dockerfile",
    "requirements.txt",
]
HOSTILE = [
    "run'; touch stolen; '",
    '"; touch stolen; "',
    "$(touch stolen)",
    "`touch stolen`",
    "a\n#SBATCH --nodes=99\ntouch stolen",
    "a: [b, {c: d}]\n- e",
    "${SLURM_JOB_ID}",
    "../../etc",
    "--wrap=touch stolen",
    "x\x00y",
    "名前",
    "-",
    "",
    "A" * 300,
    "$(NODE_RANK)",
    "{name}",
    "%x-%j",
]
LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # RFC 1035, as Kubernetes' names of services
GPT = export(
    model_shape("megatron-175b"),
    Cluster(gpu="A100-80GB", nodes=128),
    Plan(dp=16, tp=8, pp=8, sequence_parallel=True, recompute="full"),
    Batch(sequences=1536, sequence_length=2048),
)


def named(name: str) -> dict[str, str]:
    cluster = Cluster(gpu="A100-80GB", nodes=2, gpus_per_node=2)
    plan = Plan(dp=4, micro_batch=2)
    return export(
        TINY, cluster, plan, Batch(sequences=16, sequence_length=16), name=name
    ).launchers.files


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_every_name_becomes_a_label(text):
    name = job_name(text)
    assert LABEL.fullmatch(name) and len(name) <= LONGEST_NAME, name
    assert job_name(name) == name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_changes_nothing_but_the_name(name):
    """Files of a hostile name are, letter by letter, those of its label."""
    assert named(name) == named(job_name(name))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_name_is_inert_in_all_files(name):
    model = replace(TINY, name=name or "x")
    found = export(
        model,
        Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=4),
        Plan(dp=4),
        Batch(sequences=16, sequence_length=16),
    )
    assert found.launchers.files == tiny_files(job_name(name or "x"))


def tiny_files(name: str) -> dict[str, str]:
    return export(
        TINY,
        Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=4),
        Plan(dp=4),
        Batch(sequences=16, sequence_length=16),
        name=name,
    ).launchers.files


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize("name", HOSTILE[:6])
def test_a_script_with_a_hostile_name_runs_nothing_else(name, tmp_path, monkeypatch):
    """Really run, by bash, with stand-ins for Slurm: four ranks, and no stolen file anywhere."""
    monkeypatch.chdir(tmp_path)
    found = try_script(named(name)["job.slurm"].replace("\n#", "\nls > listed\n#", 1))
    assert [row[0] for row in found.ranks] == ["0", "1", "2", "3"], found.said
    assert {row[1:3] for row in found.ranks} == {("4", "n1")}
    assert "stolen" not in found.said and not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_the_script_is_called_again_by_its_own_code_and_a_few_times_by_others():
    text = named("x")["job.slurm"]
    assert slurm.STOPPED == STOPPED
    assert try_script(text).requeued == []
    saved = try_script(text, codes=dict.fromkeys(range(4), 75), restarts=50)
    assert (saved.ended, saved.requeued) == ([75] * 4, ["4711"])
    failed = try_script(text, codes={2: 1}, restarts=50)
    assert failed.requeued == ["4711"], "starts that ended with a save are no failures"
    assert try_script(text, codes={2: 1}, starts=9).requeued == 3 * ["4711"]
    saving = text.replace(
        "\nsrun ", '\nmkdir -p "saves-4711/step-0000000${SLURM_RESTART_COUNT:-0}"\nsrun '
    )
    assert try_script(saving, codes={2: 1}, starts=9).requeued == 9 * ["4711"], "each got further"
    for children in (True, False):
        warned = try_script(text, signal_to="tasks", children=children)
        told = "no shell stands before a rank"
        assert (warned.ended, warned.requeued) == ([75] * 4, ["4711"]), told
    assert "SAVES=${SAVES:-saves-$SLURM_JOB_ID}" in text and text.count('"$SAVES"') == 2


def test_megatron_is_started_too():
    text = GPT.slurm
    assert "pretrain_gpt.py" in text and "CUDA_DEVICE_MAX_CONNECTIONS=1" in text
    found = try_script(text)
    assert len(found.ranks) == 4, found.said
    assert GPT.ray is None and GPT.notes["ray"][0].startswith("No ray_train.py")


def test_adapters_have_no_script_to_start():
    found = tiny(dp=4, lora=Lora())
    assert found.launchers.files == {} and found.slurm is None and found.skypilot is None
    assert all(
        found.notes[t][0].startswith("No file") for t in ("slurm", "kubernetes", "ray", "skypilot")
    )


def test_the_folder_holds_all_files(tmp_path):
    found = tiny(dp=4, micro_batch=2)
    paths = {path.relative_to(tmp_path).as_posix() for path in found.write(tmp_path)}
    assert set(NAMES) == set(found.launchers.files) <= paths
    for name in ("ray_train.py", "train.py"):
        ast.parse((tmp_path / name).read_text())
    assert (found.slurm, found.kubernetes, found.ray, found.skypilot) == tuple(
        found.launchers.files[name]
        for name in ("job.slurm", "kubernetes.yaml", "ray_train.py", "skypilot.yaml")
    )


@pytest.mark.parametrize("found", [*list(CASES.values())[:3], GPT], ids=["a", "b", "c", "GPT"])
def test_kubernetes_and_kubeflow_accept_their_files(found):
    pytest.importorskip(
        "kubernetes_validate", reason='no kubernetes-validate: pip install ".[clusters]"'
    )
    pytest.importorskip("kubeflow_trainer_api", reason='no kubeflow: pip install ".[clusters]"')
    files = found.launchers.files
    assert check_kubernetes(files["kubernetes.yaml"]) == ["PersistentVolumeClaim", "Service", "Job"]
    check_train_job(files["trainjob.yaml"])
    job = read_yaml(files["kubernetes.yaml"])[2]["spec"]
    trainer = read_yaml(files["trainjob.yaml"])[0]["spec"]["trainer"]
    nodes, per_node = found.cluster.nodes, found.cluster.gpus_per_node
    assert job["completions"] == job["parallelism"] == trainer["numNodes"] == nodes
    [container] = job["template"]["spec"]["containers"]
    assert (
        container["resources"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"] == per_node
    )
    assert container["command"][:3] == [
        "torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={per_node}",
    ]


BAD = [
    ("completionMode", "completion", "Job, spec: .*'completion' was unexpected"),
    ("kind: Service", "kind: Servce", "Kubernetes has no kind Servce in v1"),
    ("batch/v1", "batch/v7", "Kubernetes has no kind Job in batch/v7"),
    ("completions: 2", "completions: two", "spec.completions: 'two'"),
    ("kind: Service", "knd: Service", "a document has no kind"),
]


@pytest.mark.parametrize(("right", "wrong", "words"), BAD, ids=lambda text: text[:12])
def test_what_kubernetes_would_refuse_is_refused(right, wrong, words):
    pytest.importorskip(
        "kubernetes_validate", reason='no kubernetes-validate: pip install ".[clusters]"'
    )
    text = named("x")["kubernetes.yaml"]
    assert right in text, "the case changes something"
    with pytest.raises(ManifestError, match=words):
        check_kubernetes(text.replace(right, wrong, 1))


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("numNodes", "nodes", "a TrainJob has no field spec.trainer.nodes"),
        ("numNodes: 2", "numNodes: two", "valid integer"),
        ("runtimeRef", "runtime", "runtimeRef"),
        ("kind: TrainJob", "kind: TrainJub", "is a TrainJub, not a TrainJob"),
    ],
)
def test_what_kubeflow_would_refuse_is_refused(right, wrong, words):
    pytest.importorskip("kubeflow_trainer_api", reason='no kubeflow: pip install ".[clusters]"')
    with pytest.raises(ManifestError, match=words):
        check_train_job(named("x")["trainjob.yaml"].replace(right, wrong, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:\n\tb: 1", r"line 2, is indented by a tab\. YAML takes spaces alone"),
        ("a: [1", "is no YAML"),
        ("", "holds no mapping"),
        ("- 1\n- 2", "holds no mapping"),
    ],
)
def test_yaml_that_is_none_is_a_sentence(text, words):
    with pytest.raises(ManifestError, match=words):
        read_yaml(text)


def test_a_tab_inside_a_line_is_none_of_our_business():
    assert read_yaml("a: 'b\tc'\n") == [{"a": "b\tc"}]


@example("a\nb: c\n  'd' $(e)\n")
@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=40
    )
)
@settings(max_examples=40)
def test_yaml_says_texts_as_they_are(text):
    from utils.planner.exporters.yaml_text import yaml_text

    assert read_yaml(yaml_text({"a": text})) == [{"a": text}]


def test_a_missing_tool_is_told_from_a_wrong_file(monkeypatch, tmp_path):
    from utils.lessons.lesson_17.clusters import manifests

    monkeypatch.setattr(manifests.importlib.util, "find_spec", lambda name: None)
    for check in (check_kubernetes, check_train_job, check_skypilot):
        with pytest.raises(MissingToolError, match="is not installed, so the file is not checked"):
            check("a: 1")
    monkeypatch.setattr(manifests.shutil, "which", lambda name: None)
    assert kubectl_says(tmp_path / "x.yaml").startswith("There is no kubectl here")


@pytest.mark.large
@pytest.mark.slow
def test_skypilot_accepts_its_file(tmp_path):
    pytest.importorskip("sky", reason="SkyPilot is not installed (199 MB): pip install skypilot")
    cluster = Cluster(
        gpu="A100-80GB", nodes=2, pricing="spot", interruptions_per_1000_node_days=3.0
    )
    found = export(
        model_shape("llama-2-7b"),
        cluster,
        Plan(dp=16, zero_stage=3),
        Batch(sequences=16, sequence_length=4096),
        name=HOSTILE[4],
    )
    found.write(tmp_path)
    says = check_skypilot(tmp_path / "skypilot.yaml")
    assert says.startswith("a-sbatch-nodes-99-touch-stolen 2 {'A100-80GB': 8} True"), says
    assert "EAGER_NEXT_REGION" in says
    path = tmp_path / "skypilot.yaml"
    path.write_text(path.read_text().replace("num_nodes", "nodes"))
    with pytest.raises(ManifestError, match="SkyPilot refuses skypilot.yaml"):
        check_skypilot(path)


@pytest.mark.large
@pytest.mark.slow
def test_ray_runs_the_folder_and_replaces_a_worker(tmp_path):
    from utils.lessons.lesson_17.cluster_runs import tiny_job
    from utils.lessons.lesson_17.clusters import ray_problem, run_ray

    if ray_problem():
        pytest.skip(ray_problem())
    from export_cases import one_process, start_weights

    tiny_job().write(tmp_path)
    weights = start_weights(TINY, tmp_path)
    found = run_ray(
        tmp_path, "--steps", "12", "--every", "2", "--weights", str(weights), kill_after=2
    )
    assert found.killed_at_seconds is not None
    assert found.losses == pytest.approx(one_process(TINY, weights, steps=12), rel=1e-6)


@pytest.mark.large
@pytest.mark.slow
def test_the_container_is_built_from_its_dockerfile(tmp_path):
    """By buildah, on a base made of this system's shell and Python: NVIDIA's cannot be had everywhere."""
    if shutil.which("buildah") is None:
        pytest.skip("there is no buildah here: apt-get install buildah, as root")
    if container_problem():
        pytest.skip(container_problem())
    found = tiny(dp=4, micro_batch=2)
    folder = tmp_path / "job"
    found.write(folder)
    said = build_container(
        folder, run=["python3", "-c", "import os; print(sorted(os.listdir('.')))"]
    )
    assert "train.py" in said and "'utils'" in said, said


def test_the_dockerfile_pins_what_it_installs():
    files = named("x")
    pins = files["requirements.txt"].split()
    assert all(re.fullmatch(r"[a-z]+==[\d.]+", pin) for pin in pins), pins
    assert re.search(
        r"^ARG BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3$", files["Dockerfile"], re.M
    )
