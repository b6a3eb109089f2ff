"""Imported once by the process that children are forked from, so that they start in 0.1 s.

Never import this in the notebook's own process: it sets the process up as a parent of workers.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import warnings

from utils.ranks.orphans import adopt_orphans, end_all

# What a child leaves behind is inherited from it, and ended with this process at the latest. When its
# kernel has ended, this process ends as well; a child that imports this runs no such functions.
adopt_orphans()
atexit.register(end_all)
has_imported, watch = threading.Event(), None


def end_without(kernel: int) -> None:
    """The server hears of its kernel's end only once it has imported all: seconds, or many."""
    while not has_imported.wait(0.2):
        if os.getppid() != kernel:
            os.kill(os.getpid(), signal.SIGKILL)


if "COURSE_KERNEL" in os.environ and multiprocessing.parent_process() is None:
    kernel = int(os.environ.pop("COURSE_KERNEL"))
    watch = threading.Thread(target=end_without, args=(kernel,), daemon=True)
    watch.start()
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
# Interrupting the notebook must not end the server: Jupyter signals the whole process group.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Before torch is loaded, or OpenMP has read its own. A worker that takes every core slows the
# others, and threads do not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"
# Asking CUDA whether there is a GPU must not initialise it here: no child could use it then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Else the profiler writes its start lines into what a child prints.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import cloudpickle  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.nn.parallel  # noqa: E402

import utils.traffic  # noqa: E402, F401
from utils.ranks.gpus import CHOOSE_ON_IMPORT  # noqa: E402

has_gpus = torch.cuda.device_count() > 0
if not has_gpus:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns in every rank
    # With a CUDA toolkit and no GPU it says so, into what the first rank prints.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# On a CPU it warns of an optional kernel that nothing here uses; peft imports it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# The first optimizer imports torch._dynamo: 2 s in every child.
for name in ["torch._dynamo", *os.environ.pop("COURSE_PRELOAD", "").split()]:
    if has_gpus and name.partition(".")[0] in CHOOSE_ON_IMPORT:
        continue
    # Other versions of a library may lack the module; then ranks import what they use.
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

if watch:  # gone before the first fork
    has_imported.set()
    watch.join()
# Finding the backend reads what every installed package says of itself: 0.1 s in every rank.
torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend("gloo"))
# The collector writes into every object that it visits, and each child would get a copy of all
# those pages. Frozen objects are not visited.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # or libraries report what is frozen as leaked
