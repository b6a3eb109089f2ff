# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 99: Fourteen cases against the clock
#
# {{badges}}
#
# | difficulty | minutes | needs |
# |---|---|---|
# | 5 of 5 | 280 | the whole course; any laptop |
#
# Each case is an interview question with data: a log, a trace, a plan or a bill. You have twenty minutes and all
# tools of the course. `sitting.open(...)` shows the brief and starts the clock; press play below it, and a bar shows
# the time. It gives you the data of the case; `print(case.__doc__)` lists what they hold. `sitting.hand_in(...)` checks your
# answer, as often as you like. Time is shown and never graded: a late answer counts, and the page of results calls it
# late.
#
# The data come from a **seed**: 1, 2 or 3. Your class gets one seed, the exam another: write `seed` and `learner`
# below. What is right is computed from the data by the course's planner, simulator and meter. The
# [lesson](../../notebooks/advanced/99_capstone.ipynb) answers the same questions in prose. Work in a copy
# (`make my-labs`).
#
# A plan *fits with headroom* where its estimate says `fits` and not `tight`. `tight` means that the gaps between the
# allocator's blocks may fill the card.
#
# The sitting counts the answers that are accepted. Whoever examines you can give three points for a case:
#
# | points | for |
# |---|---|
# | 1 | an answer that is accepted |
# | 1 | at par: as good as what the course's own search finds |
# | 1 | you show the measurement that made you choose, and say what would change your mind |

# %% tags=["setup"]
here = setup("labs/advanced/99")

# %%
import itertools
import math
import re
from collections import Counter

from utils import Lora, Plan, cost, estimate, model_shape, search
from utils.lessons.lesson_99.sitting import Sitting
from utils.planner import SearchSpace, axis_bytes
from utils.planner.goodput import DAY, best_interval_seconds, working_share

sitting = Sitting(learner="", seed=1)

# %% [markdown]
# ## Beginner 1: take a peak apart
#
# *Name the components of training memory, and the technique for each.* Techniques: `"8-bit optimizer"`,
# `"checkpointing"`, `"step in backward"` (each gradient is used as soon as it is there), `"frozen and quantized base"`.

# %%
case = sitting.open("components")

# %%
# BEGIN SOLUTION
def components(log):
    (few, low), (many, high) = list(log.peak_gib.items())[-2:]  # both peaks lie in one phase
    each = (high - low) / (many - few)
    fixed = high - many * each
    print(f"{fixed:.2f} GiB stay, {each:.2f} GiB come with each sequence")
    return {
        "fixed GiB": fixed, "GiB per sequence": each,
        "largest batch": int((log.card_gib - log.context_gib - fixed) / each),
        "parameters": "frozen and quantized base", "gradients": "step in backward",
        "optimizer state": "8-bit optimizer", "activations": "checkpointing",
    }


answer = components(case)
# END SOLUTION
# STUB: answer = {
# STUB:     "fixed GiB": ..., "GiB per sequence": ..., "largest batch": ...,
# STUB:     "parameters": ..., "gradients": ..., "optimizer state": ..., "activations": ...,
# STUB: }

sitting.hand_in("components", answer)

# %% [markdown]
# <details><summary>Hint</summary>The peak of a small batch lies in another phase. Which rows grow evenly with the batch?</details>
#
# ## Beginner 2: twice the batch
#
# *A ResNet overflows its card as the batch grows: what does mixed precision change?* The last part is `"parameters"`,
# `"gradients"`, `"optimizer state"` or `"activations"`.

# %%
case = sitting.open("sixteen_gb")

# %%
# BEGIN SOLUTION
def sixteen_gb(case):
    def largest(peak):
        (few, low), (many, high) = list(peak.items())[-2:]
        each = (high - low) / (many - few)
        print(f"{each:.2f} MiB an image, {high - many * each:.0f} MiB whatever the batch")
        return math.floor(many + (case.budget_mib - high) / each)

    return {"fp32 batch": largest(case.fp32_mib), "amp batch": largest(case.amp_mib),
            "saved at batch 1 MiB": case.fp32_mib[1] - case.amp_mib[1], "what shrinks": "activations"}


answer = sixteen_gb(case)
# END SOLUTION
# STUB: answer = {"fp32 batch": ..., "amp batch": ..., "saved at batch 1 MiB": ..., "what shrinks": ...}

sitting.hand_in("sixteen_gb", answer)

# %% [markdown]
# <details><summary>Hint</summary>At batch 1 the peak lies in the optimizer step. It is on no line with the others.</details>
#
# ## Beginner 3: a run that turns to NaN
#
# *Training with AMP turns to NaN: how do you debug it?* Causes: `"NaN in the data"`, `"loss overflows"`,
# `"learning rate"`, `"scale grows without end"`. Cures: `"drop the broken rows"`, `"loss in log space"`,
# `"learning rate / 200"`, `"smaller first scale"`, `"clip after unscale_"`. `case.treated(cure)` runs one.

# %%
case = sitting.open("nan_run")

# %%
# BEGIN SOLUTION
CURE_FOR = {"NaN in the data": "drop the broken rows", "loss overflows": "loss in log space",
            "learning rate": "learning rate / 200"}


def nan_run(case):
    def broken(record):
        return not math.isfinite(record.loss) or (record.first and record.first.kind in ("input", "output", "loss"))

    step = next(record.step for record in case.fp16 if broken(record))
    twin = any(broken(record) for record in case.fp32)
    kind = case.fp16[step].first.kind
    cause = "NaN in the data" if kind == "input" else "learning rate" if kind == "output" else "loss overflows"
    after = case.treated(CURE_FOR[cause])
    print(f"step {step}: {case.fp16[step].first}; cured, the last loss is {after[-1].loss:.2f}")
    return {"cause": cause, "step": step, "fp32 breaks too": twin, "cure": CURE_FOR[cause]}


answer = nan_run(case)
# END SOLUTION
# STUB: answer = {"cause": ..., "step": ..., "fp32 breaks too": ..., "cure": ...}

sitting.hand_in("nan_run", answer)

# %% [markdown]
# <details><summary>Hint</summary>Steps that a scaler skips while its scale comes down are its daily work. Look for the first step
# whose input, output or loss is not finite, and who made it.</details>
#
# ## Beginner 4: four ranks, and not four times as fast
#
# *Scaling is slow: how do you find out why?* Causes: `"data loading"`, `"one slow rank"`, `"all-reduce not hidden"`,
# `"too little work"`.

# %%
case = sitting.open("four_ranks")

# %%
# BEGIN SOLUTION
def four_ranks(case):
    def seconds(name):
        return {event["pid"]: event["dur"] / 1e6 for event in case.events if event["name"] == name}

    step = max(event["ts"] + event["dur"] for event in case.events) / 1e6
    loading, waiting, tail = map(seconds, ("loading", "waiting for a rank", "all-reduce, not hidden"))
    if loading:
        cause, rank, lost = "data loading", "all", max(loading.values())
    elif waiting:
        cause, (rank,), lost = "one slow rank", set(tail) - set(waiting), max(waiting.values())
    else:
        buckets = case.gradient_bytes / (25 * 2**20)  # backward hides all but the last
        cause, rank, lost = "all-reduce not hidden", "all", max(tail.values()) * (1 - 1 / buckets)
    now, after = case.one_process_seconds / step, case.one_process_seconds / (step - lost)
    print(f"{cause} costs {1e3 * lost:.0f} of {1e3 * step:.0f} ms: {now:.0%} becomes {after:.0%}")
    return {"efficiency": now, "cause": cause, "rank": rank, "efficiency without it": after}


answer = four_ranks(case)
# END SOLUTION
# STUB: answer = {"efficiency": ..., "cause": ..., "rank": ..., "efficiency without it": ...}

sitting.hand_in("four_ranks", answer)

# %% [markdown]
# <details><summary>Hint</summary>Each rank here does what one process did alone, so without loss a step takes as long. What comes on
# top?</details>
#
# ## Intermediate 1: seven billion on one card
#
# *How do you fine-tune 7B on 24 GB, and what does it take to train all of it?* Two plans, with
# `lora=Lora(rank=16, base=...)` (bases `"bf16"`, `"int8"`, `"nf4-dq"`) and with `framework="deepspeed"`.

# %%
case = sitting.open("seven_billion")

# %%
# BEGIN SOLUTION
def fastest(model, cluster, batch, plans):
    rows = []
    for plan in plans:
        try:
            row = estimate(model, cluster, plan, batch)
        except ValueError:  # it does not divide, or the host has no room
            continue
        if row.fits and not row.tight:
            rows.append(row)
    return min(rows, key=lambda row: row.step_seconds)
# END SOLUTION
# STUB: # Compare plans with estimate(case.model, case.cluster, plan, case.batch).


# %%
# BEGIN SOLUTION
def seven_billion(case):
    shapes = [{"micro_batch": b, "recompute": r, "loss": loss} for b, r, loss in
              itertools.product((1, 2, 4, 8, 16), ("none", "full"), ("whole", "chunked"))]
    adapters = [Plan(lora=Lora(rank=16, base=base), **s) for s in shapes for base in ("bf16", "int8", "nf4-dq")]
    full = [Plan(framework="deepspeed", zero_stage=stage, offload=what, **s)
            for s in shapes for stage, what in ((2, "optimizer"), (3, "parameters"))]
    rows = [fastest(case.model, case.cluster, case.batch, plans) for plans in (adapters, full)]
    for row in rows:
        print(f"{row.peak.needed_bytes / 2**30:.1f} GiB, {row.step_seconds:.1f} s a step")
    return {"adapters": rows[0].plan, "full": rows[1].plan}


answer = seven_billion(case)
# END SOLUTION
# STUB: answer = {"adapters": ..., "full": ...}

sitting.hand_in("seven_billion", answer)

# %% [markdown]
# <details><summary>Hint 1</summary>Which is faster on a full card: four bits and a larger micro-batch, or eight bits and less arithmetic
# to make room?</details>
# <details><summary>Hint 2</summary>With the optimizer on the host, from which stage of ZeRO on do gradients leave, too (lesson 07)? Weights
# that stay need no link in every pass.</details>
#
# ## Intermediate 2: ZeRO or FSDP
#
# *ZeRO-3 or FSDP, for which case?* `axis_bytes(job.model, plan, job.batch)` counts what a rank sends.

# %%
case = sitting.open("zero_or_fsdp")

# %%
# BEGIN SOLUTION
def zero_or_fsdp(case):
    answer = {}
    for name, job in case.jobs.items():
        library, rows = "deepspeed" if "NVMe" in job.needs else "fsdp", []
        for stage, micro, kept in itertools.product((0, 1, 2, 3), (1, 2, 4, 8), ("none", "full")):
            plan = Plan(dp=job.cluster.gpus, zero_stage=stage, micro_batch=micro, recompute=kept, framework=library)
            try:
                row = estimate(job.model, job.cluster, plan, job.batch)
            except ValueError:  # the batch does not divide
                continue
            if row.fits and not row.tight:
                rows.append((sum(axis_bytes(job.model, plan, job.batch)[0].values()), row.step_seconds, stage, plan))
        sent, _, stage, answer[name] = min(rows, key=lambda row: row[:2])
        print(f"job {name}: {library}, stage {stage}, {sent / 1e9:.1f} GB a step")
    return answer


answer = zero_or_fsdp(case)
# END SOLUTION
# STUB: answer = {"A": ..., "B": ...}

sitting.hand_in("zero_or_fsdp", answer)

# %% [markdown]
# <details><summary>Hint</summary>Stage 1 sends no more than an all-reduce of the gradients. From stage 2 on, a smaller micro-batch sends more.</details>
#
# ## Intermediate 3: out of memory, in which order?
#
# *A job runs out of memory: what do you do, in which order?* `case.after(step, step)` predicts a way out.

# %%
case = sitting.open("order_of_cures")

# %%
# BEGIN SOLUTION
def order_of_cures(case):
    cures = [{"micro_batch": 4}, {"micro_batch": 2}, {"micro_batch": 1}, {"loss": "chunked"},
             {"recompute": "full"}, {"offload": "optimizer"}]
    least, best = math.inf, ()
    for count in (1, 2, 3):
        for steps in itertools.combinations(cures, count):
            end = case.after(*steps)
            names = {name for step in steps for name in step}
            if len(names) == count and end.fits and not end.tight and end.step_seconds < 0.999 * least:
                least, best = end.step_seconds, steps
    steps = sorted(best, key=lambda step: case.after(step).step_seconds)
    for step in steps:
        print(f"{step}: alone {case.after(step).step_seconds:.2f} s a step")
    before = case.after()
    held = before.peak.bytes_by_category
    return {"largest category": str(max(held, key=held.get)), "missing GiB": before.missing_bytes / 2**30, "steps": steps}


answer = order_of_cures(case)
# END SOLUTION
# STUB: answer = {"largest category": ..., "missing GiB": ..., "steps": [...]}

sitting.hand_in("order_of_cures", answer)

# %% [markdown]
# <details><summary>Hint</summary>`case.after(step)` says what a step alone leaves missing (`.missing_bytes`) and costs
# (`.step_seconds`). A single step may not be enough: compare pairs. A step without which it still fits is
# needless.</details>
#
# ## Intermediate 4: a job without its code
#
# *A job died of memory, and all you have is its record: what was it?* Causes and categories are those of
# [lab 10](../../labs/intermediate/10_oom_clinic.ipynb). What to do first: `"drop what is kept"`, `"no_grad around what does not train"`,
# `"long-lived tensors first"`, `"a part of the rows at a time"`, `"step in backward"`, `"a kernel that keeps no scores"`.

# %%
case = sitting.open("unknown_job")

# %%
# BEGIN SOLUTION
def unknown_job(record):
    alive = record.alive_mib
    grows = (alive[-1] - alive[0]) / (len(alive) - 1)
    largest = max(record.held_mib, key=record.held_mib.get)
    if record.peak_mib <= record.budget_mib:  # alive would fit: the gaps do not
        cause, largest, first = "fragmentation", "reserved, not alive", "long-lived tensors first"
    elif grows > 1:
        cause, first = "forgotten reference", "drop what is kept"
    else:
        cause, first = "missing no_grad", "no_grad around what does not train"
    print(f"{largest}; {grows:.1f} MiB more after each step; {record.trained:.0%} of the parameters train")
    return {"cause": cause, "category": largest, "grows MiB a step": grows,
            "beyond alive MiB": record.allocator_mib - record.peak_mib, "first": first}


answer = unknown_job(case)
# END SOLUTION
# STUB: answer = {"cause": ..., "category": ..., "grows MiB a step": ..., "beyond alive MiB": ..., "first": ...}

sitting.hand_in("unknown_job", answer)

# %% [markdown]
# <details><summary>Hint</summary>Three questions: does it grow between steps, would what is alive fit, and does everything train that has
# activations?</details>
#
# ## Advanced 1: eight nodes, three times as fast
#
# *Eight nodes are only three times as fast as one: why?* For each layer a node, `"all"` or `"none"`; the order of cures;
# `case.step_seconds("network", "code")` is a step with these layers mended.

# %%
case = sitting.open("eight_nodes")

# %%
# BEGIN SOLUTION
def eight_nodes(case):
    clocks = [int(mhz.replace(",", "")) for mhz in re.findall(r"([\d,]+) MHz", case.look("hardware"))]
    rates = {int(n): float(r) for n, r in re.findall(r"(\d): ([\d.]+)", case.look("network").partition("Gb/s:")[2])}
    waits = {int(n): int(ms) for n, ms in re.findall(r"(\d): (\d+)", case.look("code"))}
    gradients, calls, each = (float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d(?= MiB| all-)", case.look("collectives")))
    late = [node for node, ms in waits.items() if ms]
    found = {
        "hardware": clocks.index(min(clocks)) if min(clocks) < 0.9 * max(clocks) else "none",
        "network": "all" if "Socket" in case.look("network") else
                   min(rates, key=rates.get) if min(rates.values()) < 0.9 * max(rates.values()) else "none",
        "collectives": "all" if calls * each > 1.5 * gradients else "none",
        "code": "none" if not late else late[0] if len(late) == 1 else "all",
    }
    left, order = [layer for layer, place in found.items() if place != "none"], []
    while left:
        order.append(min(left, key=lambda layer: case.step_seconds(*order, layer)))
        left.remove(order[-1])
        print(f"after {', '.join(order)}: {case.times_one_node(*order):.2f} times one node")
    return found | {"order": order, "times one node": case.times_one_node(),
                    "times one node, mended": case.times_one_node(*order)}


answer = eight_nodes(case)
# END SOLUTION
# STUB: answer = {
# STUB:     "hardware": ..., "network": ..., "collectives": ..., "code": ..., "order": [...],
# STUB:     "times one node": ..., "times one node, mended": ...,
# STUB: }

sitting.hand_in("eight_nodes", answer)

# %% [markdown]
# <details><summary>Hint</summary>What one fault hides saves nothing until that fault is gone. Measure after each cure.</details>
#
# ## Advanced 2: one billion that does not fit
#
# *1B over 8 nodes of 8 is said not to fit an A100: is it so, and how do you lay it out?*

# %%
case = sitting.open("one_billion")

# %%
# BEGIN SOLUTION
def one_billion(case):
    most = 0
    while (row := case.on_one_card(most + 1)).fits and not row.tight:
        most += 1
    held = case.on_one_card(2 * most).peak.bytes_by_category
    choices = itertools.product((0, 1, 2, 3), (None, 8), (1, 2, 4, 8), ("whole", "chunked"))
    best = fastest(case.model, case.cluster, case.batch,
                   [Plan(dp=64, zero_stage=z, shard_ranks=group, micro_batch=b, loss=loss, framework="fsdp")
                    for z, group, b, loss in choices])
    print(f"{most} sequences fit one card; 64 take {best.step_seconds:.2f} s a step")
    return {"states GB": 16 * model_shape(case.model).parameter_count / 1e9, "sequences at once": most,
            "what overflows": str(max(held, key=held.get)), "plan": best.plan}


answer = one_billion(case)
# END SOLUTION
# STUB: answer = {"states GB": ..., "sequences at once": ..., "what overflows": ..., "plan": ...}

sitting.hand_in("one_billion", answer)

# %% [markdown]
# <details><summary>Hint</summary>Write down the states first. What must the batch be, for the rest to fill a card?</details>
#
# ## Advanced 3: lay it out on 64 GPUs
#
# *175B on 64 GPUs: lay it out.* Seeds 2 and 3 bring 130B and 100B. `search` finds plans, `cost` gives days and dollars.

# %%
case = sitting.open("lay_out")

# %%
# BEGIN SOLUTION
def lay_out(case):
    best = search(case.model, case.cluster, case.batch).fastest
    bill = cost(best, case.tokens)
    print(f"{best.peak.needed_bytes / 2**30:.1f} GiB on the fullest GPU, {best.step_seconds:.0f} s a step")
    return {"plan": best.plan, "days": bill.days_interval, "usd": bill.usd}


answer = lay_out(case)
# END SOLUTION
# STUB: answer = {"plan": ..., "days": (..., ...), "usd": ...}

sitting.hand_in("lay_out", answer)

# %% [markdown]
# <details><summary>Hint</summary>18 bytes a parameter over TP x PP, without ZeRO: what is left for DP? Then what is free (sequence parallelism), then
# what the memory that is left allows.</details>
#
# ## Advanced 4: half of the cards
#
# *32 GPUs and a model that does not fit: what do you choose, and what is the main worry?* Worries:
# `"communication across nodes"`, `"the pipeline's bubble"`, `"the optimizer's arithmetic"`, `"reading the data"`.

# %%
case = sitting.open("half_the_cards")

# %%
# BEGIN SOLUTION
def half_the_cards(case):
    best = search(case.model, case.cluster, case.batch, space=SearchSpace(offload=("none", "optimizer"))).fastest
    zero_3 = Plan(dp=32, zero_stage=3, recompute="full", offload="optimizer")
    times = [estimate(case.model, case.on_ethernet, plan, case.batch).step_seconds
             / estimate(case.model, case.cluster, plan, case.batch).step_seconds for plan in (best.plan, zero_3)]
    print(f"{best.step_seconds:.0f} s a step; on Ethernet {times[0]:.1f} and {times[1]:.0f} times as long")
    return {"plan": best.plan, "times on Ethernet": times[0], "ZeRO-3 on Ethernet": times[1],
            "main worry": "communication across nodes"}


answer = half_the_cards(case)
# END SOLUTION
# STUB: answer = {"plan": ..., "times on Ethernet": ..., "ZeRO-3 on Ethernet": ..., "main worry": ...}

sitting.hand_in("half_the_cards", answer)

# %% [markdown]
# <details><summary>Hint</summary>The states do not fit the cards, however they are split. The host has memory.</details>
#
# ## Advanced 5: a run that survives
#
# *70B on 256 GPUs, and nodes fail: how often do you save, and what do you do when it happens?*

# %%
case = sitting.open("survive")

# %%
# BEGIN SOLUTION
def survive(log):
    first = []
    for line in log.lines:
        if not first or line.seconds - first[-1].seconds > 600:
            first.append(line)
    n, mean = len(first), log.days * DAY / len(first)
    work = best_interval_seconds(log.checkpoint_seconds, mean)
    share = working_share(work, log.checkpoint_seconds, log.restart_seconds, mean)
    print(f"{n} failures, one in {mean / 3600:.0f} h; work {work / 60:.0f} min, save, and {share:.1%} of the time is work")
    per_failure = 1000 / log.node_days
    return {
        "failures": n, "per 1,000 node-days": [(n + z * n**0.5) * per_failure for z in (-1.645, 1.645)],
        "node to repair": Counter(line.node for line in first).most_common(1)[0][0],
        "minutes between checkpoints": work / 60, "share of work": share,
        "order": ["stop every rank", "take the node out", "put the spare in",
                  "load the newest checkpoint that verifies", "compare the loss with the log"],
    }


answer = survive(case)
# END SOLUTION
# STUB: answer = {
# STUB:     "failures": ..., "per 1,000 node-days": (..., ...), "node to repair": ...,
# STUB:     "minutes between checkpoints": ..., "share of work": ..., "order": [...],
# STUB: }

sitting.hand_in("survive", answer)

# %% [markdown]
# <details><summary>Hint</summary>Most lines are echoes. Counts scatter by their square root. Young and Daly give the interval.</details>
#
# ## Advanced 6: A100 or A10
#
# *13B: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data parallelism and checkpointing?*

# %%
case = sitting.open("two_offers")

# %%
# BEGIN SOLUTION
def two_offers(case):
    matrix = {}
    for offer in ("A100", "A10 plain", "A10 sharded"):
        matrix[offer] = {"nodes": 0, "usd": 0}
        for nodes in (1, 2, 4, 8, 16, 32):
            found = case.estimate(offer, nodes)
            bill = cost(found, case.tokens)
            if found.fits and not found.tight and bill.days_interval[1] <= case.days:
                matrix[offer] = {"nodes": nodes, "usd": bill.usd}
                break
        print(f"{offer:<12} MFU {found.mfu:.0%}, fits: {found.fits}, {matrix[offer]['nodes']} nodes, ${matrix[offer]['usd']:,.0f}")
    able = {offer: row["usd"] for offer, row in matrix.items() if row["nodes"]}
    return matrix | {"choice": min(able, key=able.get) if able else "none of them"}


answer = two_offers(case)
# END SOLUTION
# STUB: answer = {
# STUB:     "A100": {"nodes": ..., "usd": ...}, "A10 plain": {"nodes": ..., "usd": ...},
# STUB:     "A10 sharded": {"nodes": ..., "usd": ...}, "choice": ...,
# STUB: }

sitting.hand_in("two_offers", answer)

# %% [markdown]
# <details><summary>Hint</summary>Does an offer's plan fit at all, on any number of nodes? And what becomes of its MFU on its
# links?</details>
#
# ## Results
#
# One page to show, in `my_labs/capstone.html`: skills by tier, bytes saved and sent, dollars, each with its evidence, and
# the scoreboard of your lessons. It needs nothing beside it, and prints.

# %%
print(sitting)
print("written:", sitting.page().name)

# %% [markdown]
# ## Another seed
#
# `Sitting(seed=2)` has other data for every case, and other answers.

# %%
# BEGIN SOLUTION
import contextlib
import io

answers = [components, sixteen_gb, nan_run, four_ranks, seven_billion, zero_or_fsdp, order_of_cures, unknown_job,
           eight_nodes, one_billion, lay_out, half_the_cards, survive, two_offers]
for seed in (2, 3):
    other = Sitting(seed=seed)
    for function in answers:
        with contextlib.redirect_stdout(io.StringIO()):
            report = other.solve(function.__name__, function)
        print(f"seed {seed}  {function.__name__:<16}{report.status}; {report.verdict.note}")
        assert report.is_correct, f"{function.__name__} does not solve seed {seed}: {report}"
# END SOLUTION
# STUB: # sitting = Sitting(learner="", seed=2)

# %% [markdown]
# Here is the [solution](../../solutions/advanced/99_capstone.ipynb) of this lab, with its outputs.
