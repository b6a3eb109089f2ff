import json
import os
import signal
import time

from meet import Ranks

ranks = Ranks()
first = 0
if os.path.exists("save.json"):
    with open("save.json") as file:
        first = json.load(file)["steps"]


def save(steps):
    if ranks.rank == 0:
        with open("draft.json", "w") as file:
            json.dump({"steps": steps}, file)
        os.replace("draft.json", "save.json")
    ranks.wait()


def leave(number, frame):
    save(step)
    raise SystemExit(75)


signal.signal(signal.SIGUSR1, leave)
for step in range(first, 12):
    time.sleep(0.25)  # forward, backward, optimizer
    ranks.wait()  # gradients
    if ranks.rank == 0:
        print("step", step, flush=True)
    if (step + 1) % 6 == 0:
        save(step + 1)
