"""Answers to the exercises of lab 17 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from utils.labs.mistakes import KnownAnswers

from . import repairs
from .budget import right_bill
from .offers import Offer, cheapest
from .scaling import ScalingLaw

known = KnownAnswers()
known.mistakes("steps_twice", three=(3, "after four steps"))
known.mistakes("training_share", out_of_the_blue=(0.6, "6 N D"))
Search = Callable[..., Any]
Change = tuple[str, str]


def changed(name: str, *changes: Change) -> Callable[[dict[str, str]], dict[str, str]]:
    """The solution, with these texts of "job.slurm" or "train.py" replaced."""

    def repaired_job(solution: dict[str, str]) -> dict[str, str]:
        text = solution[name]
        for old, new in changes:
            if old not in text:
                raise ValueError(f"The change changes nothing: {old!r} is not in {name}.")
            text = text.replace(old, new)
        return {**solution, name: text}

    return repaired_job


SHELL = "RANK=$((2 * SLURM_PROCID + i))"
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
SAVED = "if [ $code = 75 ]; then\n  scontrol requeue $SLURM_JOB_ID\n"
FAILED = """elif [ $code != 0 ]; then  # a rank failed: try again, 3 times after the same save
  echo "after $(cat save.json 2>/dev/null)" >> failures.txt
  if [ $(grep -cxF "$(tail -n 1 failures.txt)" failures.txt) -le 3 ]; then scontrol requeue $SLURM_JOB_ID; fi
"""
# By Slurm's own count, of all starts.
RESTARTED = """elif [ $code != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  scontrol requeue $SLURM_JOB_ID
"""
PATIENT = "--kill-on-bad-exit=0 --wait=60"
TRAP = '  trap "kill -USR1 ${ranks[*]}" USR1  # it may come to this shell alone: hand it on\n'
AGAIN = (
    " [ $ended -le 128 ] || { wait $rank; ended=$?; }  # the signal ended the wait, not the rank"
)
EACH = f"""  for rank in "${{ranks[@]}}"; do
    wait $rank; ended=$?;{AGAIN}
    [ $ended = 0 ] || code=$ended
  done
  exit ${{code:-0}}
"""
known.mistakes(
    "repaired_job",
    handed_out=(
        lambda solution: {name: repairs.broken(name) for name in solution},
        "first command",
    ),
    options_after_a_command=(
        changed("job.slurm", ("#SBATCH --signal", "export LC_ALL=C\n#SBATCH --signal")),
        "first command",
    ),
    no_requeue=(changed("job.slurm", (" --requeue", "")), "--requeue"),
    no_signal=(changed("job.slurm", ("#SBATCH --signal=USR1@120\n", "")), "--signal=USR1@120"),
    the_output_is_opened_anew=(changed("job.slurm", ("--open-mode=append ", "")), "--open-mode"),
    a_task_for_each_rank=(
        changed("job.slurm", ("--ntasks-per-node=1", "--ntasks-per-node=2")),
        "One task a node stays",
    ),
    one_rank_a_node=(
        changed("job.slurm", ("for i in 0 1;", "for i in 0;")),
        "each shell two ranks",
    ),
    the_numbers_overlap=(
        changed("job.slurm", ("2 * SLURM_PROCID", "SLURM_PROCID")),
        "Four ranks need four numbers",
    ),
    numbers_of_the_script=(
        changed("job.slurm", (SHELL, "RANK='$((2 * SLURM_PROCID))'")),
        "Four ranks need four numbers",
    ),
    the_lesson_s_size=(
        changed("job.slurm", ("WORLD_SIZE=$((2 * SLURM_NTASKS))", "WORLD_SIZE=$SLURM_NTASKS")),
        "a task is not a rank",
    ),
    localhost=(
        changed("job.slurm", (ADDRESS, "export MASTER_ADDR=localhost")),
        "its own localhost",
    ),
    each_its_own_name=(
        changed("job.slurm", (SHELL, f"MASTER_ADDR=$(hostname) {SHELL}")),
        "same node",
    ),
    rank_0_elsewhere=(
        changed("job.slurm", ("2 * SLURM_PROCID + i", "(2 * SLURM_PROCID + i + 2) % 4")),
        "on which rank 0 listens",
    ),
    wait_forgets=(changed("job.slurm", (EACH, "  wait\n")), "forgets how processes ended"),
    only_the_last_one_counts=(
        changed("job.slurm", (EACH, '  for rank in "${ranks[@]}"; do wait $rank; done\n')),
        "whichever failed",
    ),
    a_code_of_its_own=(
        changed("job.slurm", ("code=$ended", "code=1")),
        "own code on",
    ),
    the_pipe_hides_it=(changed("job.slurm", ("set -o pipefail\n", "")), "after a pipe"),
    the_code_is_lost=(
        changed("job.slurm", ("' | tee -a losses.txt\n", "'\necho done\n")),
        "replaces $?",
    ),
    no_requeue_at_75=(
        changed("job.slurm", (SAVED, "if [ $code = 75 ]; then\n  true\n")),
        "wait to be started again",
    ),
    for_ever=(
        changed("job.slurm", (SAVED + FAILED, SAVED.replace("= 75", "!= 0"))),
        "for ever",
    ),
    limited_in_all_cases=(
        changed("job.slurm", (SAVED + FAILED, RESTARTED.removeprefix("el"))),
        "Limit those alone",
    ),
    limited_by_slurm_s_own_count=(
        changed("job.slurm", (FAILED, RESTARTED)),
        "those after a save",
    ),
    a_lost_node_is_a_failure=(changed("job.slurm", (FAILED, "")), "Slurm requeues no more"),
    the_first_75_ends_the_others=(
        changed("job.slurm", (PATIENT, "--kill-on-bad-exit=1")),
        "itself with 143",
    ),
    the_lesson_s_other_flag_alone=(
        changed("job.slurm", (PATIENT, "-K --wait=60")),
        "after 0 s",
    ),
    no_patience=(changed("job.slurm", ("--wait=60", "--wait 5")), "after 5 s"),
    always=(
        changed("job.slurm", (SAVED + FAILED, SAVED.replace("[ $code = 75 ]", "true"))),
        "exit code of srun first",
    ),
    the_shell_dies=(changed("job.slurm", (TRAP, "")), "Without a `trap` it dies"),
    the_shell_stops_waiting=(changed("job.slurm", (AGAIN, "")), "wait for that rank once more"),
    the_shell_keeps_it=(changed("job.slurm", (TRAP, '  trap "" USR1\n')), "hands it on"),
    to_the_script_alone=(changed("job.slurm", ("--signal=USR1", "--signal=B:USR1")), "hand it on"),
    no_interpreter=(changed("job.slurm", ("#!/bin/bash\n", "")), "#!/bin/bash"),
    warned_too_late=(changed("job.slurm", ("USR1@120", "USR1@1")), "A save takes longer"),
)
known.mistakes(
    "repaired_job",
    timeout_seconds=6.0,
    no_handler=(
        changed(
            "train.py",
            ("signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))\n", ""),
        ),
        "kills the rank",
    ),
    in_the_handler=(
        changed(
            "train.py",
            (
                "lambda number, frame: asked.append(number)",
                "lambda number, frame: (save(step), exit(75))",
            ),
        ),
        "ranks.any",
    ),
    each_for_itself=(
        changed(
            "train.py",
            (
                "ends = ranks.any(bool(asked))  # waits for the gradients, too",
                "ranks.wait()\n    ends = bool(asked)",
            ),
        ),
        "ranks.any",
    ),
    another_code=(changed("train.py", ("SystemExit(75)", "SystemExit(1)")), "code 75"),
    one_step_too_few=(
        changed(
            "train.py",
            (
                "    if ends or (step + 1) % 6 == 0:\n        save(step + 1)",
                "    if ends or (step + 1) % 6 == 0:\n        save(step)",
            ),
        ),
        "step + 1",
    ),
    no_save=(changed("train.py", ("if ends or (step + 1)", "if (step + 1)")), "step + 1"),
    no_python=(changed("train.py", ("import json", "import json,")), "cannot read it"),
)
HANDED_ON: tuple[Change, ...] = (
    ("--signal=USR1", "--signal=B:USR1"),
    ("set -o pipefail\nsrun", "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\nsrun"),
    (
        "' | tee -a losses.txt\ncode=$?",
        "' &\nwait $!; code=$?\n[ $code = 138 ] && { wait $!; code=$?; }",
    ),
)
COUNTED = """elif [ $code != 0 ]; then
  echo failed >> failures.txt
  [ $(wc -l < failures.txt) -lt 3 ] && scontrol requeue $SLURM_JOB_ID
"""
known.rights(
    "repaired_job",
    slow=True,  # where a Slurm is installed; elsewhere stand-ins take a second
    short_options=changed(
        "job.slurm", ("--nodes=2", "-N 2"), ("--time=5\n", "--time=5\n\n# meet\n")
    ),
    other_names=changed(
        "job.slurm",
        ("2 * SLURM_PROCID", "2 * SLURM_NODEID"),
        ("python -u", "exec python3 -u"),
        (ADDRESS, "export MASTER_ADDR=$(hostname)"),
    ),
    numbers_written_out=changed(
        "job.slurm",
        ("$((2 * SLURM_NTASKS))", "4"),
        ("set -o pipefail\n", ""),
        ("code=$?\nif", "code=${PIPESTATUS[0]}\nif"),
    ),
    no_pipe=changed("job.slurm", (" | tee -a losses.txt", "")),
    slurm_sees_the_dead_node=changed("job.slurm", (FAILED, ""), ("--wait=60", "-W 600")),
    it_waits_without_end=changed("job.slurm", (FAILED, RESTARTED), (f" {PATIENT}", "")),
    by_the_script=changed("job.slurm", *HANDED_ON),
    counted_in_a_file=changed("job.slurm", (FAILED, COUNTED)),
)


def brute(market_change: Callable[..., dict[str, Any]] | None = None, **kept: Any) -> Search:
    """A search like the solution's, with one thing done wrongly."""

    def search(
        law: ScalingLaw, loss: float, days: float, offers: list[Offer], served: float
    ) -> Any:
        asked = {"law": law, "loss": loss, "days": days, "offers": offers, "served_tokens": served}
        asked |= kept | (market_change(asked) if market_change else {})
        found = cheapest(**asked)
        if found is None:
            return None
        return {"offer": found.offer.name, "nodes": found.nodes, "parameters": found.parameters}

    return search


def none_is_none(change: Callable[[dict[str, Any], Any], Any]) -> Search:
    """The right answer, changed where there is one."""

    def search(*asked: Any) -> Any:
        found = brute()(*asked)
        return found and change(found, asked)

    return search


def without_the_last_node(asked: dict[str, Any]) -> dict[str, Any]:
    return {"offers": [replace(o, most_nodes=max(1, o.most_nodes - 1)) for o in asked["offers"]]}


def twenty(found: dict[str, Any], asked: Any) -> dict[str, Any]:
    """Twenty tokens a parameter."""
    law, low, high = asked[0], asked[0].least_parameters(asked[1]) * 1.001, 1e13
    for _ in range(100):
        middle = math.sqrt(low * high)
        few = law.tokens_for(asked[1], middle) < 20 * middle
        low, high = (low, middle) if few else (middle, high)
    return found | {"parameters": low}


@known.mistake("cheapest_run", "strike out what is late")
def a_way_where_there_is_none(law: ScalingLaw, loss: float, days: float, *rest: Any) -> Any:
    if days == 1:
        loss, days = max(loss, law.e + 0.3), 400
    return brute()(law, loss, days, *rest)


known.mistakes(
    "cheapest_run",
    last_node_left_out=(brute(without_the_last_node), "range end at most_nodes, or one before"),
    ignores_the_deadline=(brute(days=math.inf), "strike out what is late"),
    ignores_serving=(brute(served_tokens=0.0), "best for training alone"),
    cheapest_hour=(
        brute(
            lambda asked: (
                {"offers": sorted(asked["offers"], key=lambda o: o.usd_per_gpu_hour)[:1]}
                if asked["days"] > 30
                else {}
            )
        ),
        "cheapest hour is not the cheapest FLOP",
    ),
    one_node=(none_is_none(lambda found, _: found | {"nodes": 1}), "strike out what is late"),
    double_size=(
        none_is_none(lambda found, asked: found | {"parameters": 2 * found["parameters"]}),
        "Which size costs least",
    ),
    too_small=(none_is_none(lambda found, asked: found | {"parameters": 1e6}), "least_parameters"),
    too_many_nodes=(none_is_none(lambda found, asked: found | {"nodes": 99}), "1 to most_nodes"),
    most_nodes=(
        none_is_none(lambda found, asked: found | {"nodes": asked[3][0].most_nodes}),
        "lose speed",
    ),
    too_small_a_memory=(
        none_is_none(lambda found, asked: found | {"nodes": 1} if asked[2] == 1460 else found),
        "16 bytes a parameter",
    ),
    never=(lambda *asked: None, "Try other sizes"),
    a_tuple=(none_is_none(lambda found, asked: tuple(found.values())), "a dict with the keys"),
    twenty=(none_is_none(twenty), "rule of thumb"),
    not_finite=(
        none_is_none(lambda found, _: found | {"parameters": math.nan}),
        "no finite number",
    ),
)
known.right("cheapest_run", "par $")(brute())
DAYS, USD = right_bill("A100"), right_bill("H100")


def review(**parts: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The solution, with entries of its parts replaced."""

    def reviewed(solution: dict[str, Any]) -> dict[str, Any]:
        made = {k: solution[k] | v if isinstance(v, dict) else v for k, v in parts.items()}
        return solution | made

    return reviewed


known.mistakes(
    "matrix_reviewed",
    line_1_right=(review(lines={"1": "right"}), "Which passes"),
    line_2_right=(review(lines={"2": "right"}), "print twice as much"),
    line_5_right=(review(lines={"5": "right"}), "When was that"),
    line_6_right=(review(lines={"6": "right"}), "what the profiler counted"),
    line_8_right=(review(lines={"8": "right"}), "when Adam takes a step"),
    line_9_right=(review(lines={"9": "right"}), "bytes has a GiB"),
    line_9_memory=(review(lines={"9": "memory"}), "and not that"),
    line_11_units=(review(lines={"11": "units"}), "it holds"),
    forward_alone=(review(days={"A100": DAYS[0] / 3}), "forward pass alone"),
    always_up=(review(days={"A100": DAYS[0] * 0.95}), "95% of the time"),
    mfu_of_another=(review(days={"A100": DAYS[0] * 0.75}), "3/4 of that MFU"),
    with_sparsity=(review(days={"A100": DAYS[0] / 2}), "with sparsity"),
    slides_price=(review(usd={"H100": USD[1] / 2.95 * 12}), "slide's price"),
    days_for_hours=(review(usd={"A100": DAYS[1] / 24}), "24 hours"),
    a100=(review(winner="A100"), "who is out"),
    no_kind=(review(lines={"1": "typo"}), "a kind of mistake"),
    not_finite=(review(days={"A100": math.nan}), "no finite number"),
)
