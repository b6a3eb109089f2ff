"""The script of lesson 16a that keeps a journal and goes on from its checkpoint, for records and tests.

It takes: FOLDER STEPS TIMEOUT_SECONDS NAP_SECONDS STEPS_BETWEEN_CHECKPOINTS
"""

SCRIPT = """\
import datetime, json, os, sys, time
born = time.time()  # PyTorch is still to be loaded
import torch
import torch.distributed as dist

folder, steps, seconds, nap, every = sys.argv[1], *map(float, sys.argv[2:6])


def note(what, **more):
    where = {"host": int(os.environ["COURSE_HOST"]), "rank": int(os.environ["RANK"])}
    with open(os.environ["COURSE_JOURNAL"], "a") as journal:
        journal.write(json.dumps({"at": time.time(), "what": what, **where, **more}) + "\\n")


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))  # ranks may start late
steps_group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
rank, world, checkpoint = dist.get_rank(), dist.get_world_size(), f"{folder}/checkpoint.pt"
torch.manual_seed(0)
state = {"step": 0, "weight": torch.randn(16, 1)}
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)
note("start", world=world, step=state["step"], pid=os.getpid(), age_seconds=time.time() - born)
try:
    for step in range(state["step"], int(steps)):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))[rank::world]
        error = x @ state["weight"] - x.sum(1, keepdim=True)
        gradient = x.T @ error
        dist.all_reduce(gradient, group=steps_group)
        state["weight"] -= 0.1 / 24 * gradient
        time.sleep(nap)  # the rest of a step
        if (step + 1) % every == 0 and rank == 0:
            torch.save({"step": step + 1, "weight": state["weight"]}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        note("step", step=step)
except RuntimeError as error:
    note("saw", text=str(error))
    raise  # torchrun sees a failed rank, and starts all of them again
note("done", weight=state["weight"].flatten().tolist())
dist.destroy_process_group()
"""
