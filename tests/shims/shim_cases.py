"""For each function that a shim replaces, the shortest way by which its library comes to call it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from utils.shims.shim import MovedError, Shim
from utils.shims.torch_distributed import join_alone

_widths = itertools.count(1001)


@contextlib.contextmanager
def world(size: int) -> Iterator[None]:
    """A group of one real rank, or one rank among others that are not there."""
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        join_alone(0, size)
    try:
        with mock.patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}):
            yield
    finally:
        dist.destroy_process_group()


def _sharded_step() -> None:
    from torch.distributed.fsdp import fully_shard

    with world(2):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(2, 4)).sum().backward()


def _replicated() -> None:
    with world(1):
        nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


def _tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with world(2):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())(torch.ones(2, 4))


def _new_shape() -> None:
    """DTensor remembers the shapes that it has seen in this process."""
    from torch.distributed.tensor import DTensor, Shard

    with world(2):
        mesh = init_device_mesh("cpu", (2,))
        rows = DTensor.from_local(torch.ones(2, next(_widths)), mesh, [Shard(0)], run_check=False)
        _ = rows + rows


def _resharded() -> None:
    from torch.distributed.tensor import DTensor, Shard

    with world(2):
        mesh = init_device_mesh("cpu", (2,))
        rows = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
        rows.redistribute(mesh, [Shard(1)])


def _on_mesh(use: Callable[[Any], Any]) -> Callable[[], None]:
    def run() -> None:
        with world(4):
            use(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))

    return run


def _faked() -> None:
    with FakeTensorMode():
        torch.ones(2) + 1


def _faked_device() -> None:
    with FakeTensorMode():
        assert torch.ones(2).device.type == "cpu"


def _backward() -> None:
    torch.ones(2, requires_grad=True).sum().backward()


def _zero_steps() -> None:
    from utils.techniques.zero import zero_config, zero_engine

    with world(1):
        for stage in (2, 3):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            config = zero_config(stage, 40, world_size=1) | {"gradient_clipping": 1.0}
            engine = zero_engine(model, torch.optim.AdamW(model.parameters()), config)
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
                engine.step()


def _config_read() -> None:
    from utils.techniques.deepspeed_config import read_config

    read_config({"train_batch_size": 4}, 4)


def _eight_bit() -> None:
    from bitsandbytes.optim import AdamW8bit

    weight = nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.ones(64, 64)
    AdamW8bit([weight], min_8bit_size=1).step()


def _four_bit() -> None:
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, quant_type="nf4").to("cpu")
    layer(torch.ones(1, 64))


def _compiled() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def _llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=8, num_attention_heads=2, use_cache=False, **sizes)
    LlamaForCausalLM(config)(torch.zeros(1, 4, dtype=torch.int64))


def _server_started() -> None:
    from multiprocessing.forkserver import ForkServer

    server = ForkServer()
    server.set_forkserver_preload([])
    server.ensure_running()
    server._stop()


def _four_bit_llama() -> None:
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        how = BitsAndBytesConfig(load_in_4bit=True)
        LlamaForCausalLM.from_pretrained(folder, quantization_config=how)


EXERCISES: dict[str, Callable[[], Any]] = {
    "spawnv_passfds": _server_started,
    "Module._apply": lambda: nn.Linear(2, 2).double(),
    "UntypedStorage.resize_": _sharded_step,
    "DefaultAllGather.allocate": _sharded_step,
    "foreach_reduce_scatter_copy_in": _sharded_step,
    "FSDPParam._init_sharded_param": _sharded_step,
    "FSDPParam.to_sharded_dtensor": _sharded_step,
    "_no_grad_trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(4)),
    "ShardingPropagator._propagate_tensor_meta_non_cached": _new_shape,
    "ColwiseParallel._apply": _tensor_parallel,
    "FakeTensorMode.avoid_device_init": _faked,
    "autocast.__init__": lambda: torch.autocast("cpu"),
    "FakeTensor.device": _faked_device,
    "Tensor.__format__": lambda: f"{torch.ones(()):.1f}",
    "Tensor.__deepcopy__": lambda: copy.deepcopy(torch.ones(2)),
    "_engine_run_backward": _backward,
    "backward": _backward,
    "DeviceMesh.__init__": _on_mesh(lambda mesh: mesh),
    "DeviceMesh.mesh": _on_mesh(lambda mesh: mesh.mesh),
    "DeviceMesh.__getitem__": _on_mesh(lambda mesh: mesh["dp"]),
    "DeviceMesh._flatten": _on_mesh(lambda mesh: mesh._flatten()),
    "DeviceMesh._unflatten": _on_mesh(lambda mesh: mesh["dp"]._unflatten(0, (1, 2), ("a", "b"))),
    "DeviceMesh._concatenate": _on_mesh(lambda m: DeviceMesh._concatenate([m["dp"], m["tp"]])),
    "DeviceMesh._get_all_submeshes": _on_mesh(lambda mesh: mesh._get_all_submeshes("dp")),
    "shard_dim_alltoall": _resharded,
    "Reducer": _replicated,
    "Logger": _replicated,
    "_verify_params_across_processes": _replicated,
    "_broadcast_coalesced": _replicated,
    "DeepSpeedZeroOptimizer.has_overflow": _zero_steps,
    "DeepSpeedZeroOptimizer.__init__": _zero_steps,
    "is_invalid_grad_norm": _zero_steps,
    "assert_ints_same_as_other_ranks": _zero_steps,
    "get_rank": _config_read,
    "create_dynamic_map": _eight_bit,
    "Optimizer8bit.get_state_buffer": _eight_bit,
    "Params4bit.__new__": _four_bit,
    "Linear4bit.forward": _four_bit,
    "_callback_from_stance": _compiled,
    "find_packed_sequence_indices": _llama,
    "Bnb4BitHfQuantizer.validate_environment": _four_bit_llama,
    "Bnb4bitQuantize.convert": _four_bit_llama,
}


def uncalled(shims: list[Shim]) -> list[str]:
    """Run what leads to these functions, once, and say which of them were not called.

    Replacing such a one does nothing any more.
    """
    calls: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for shim in shims:
            stack.enter_context(mock.patch.object(*shim.owner(), _counted(shim, calls)))
        for exercise in dict.fromkeys(EXERCISES[shim.attribute] for shim in shims):
            exercise()
    return [str(shim.uncalled()) for shim in shims if not calls.get(shim.target)]


def _counted(shim: Shim, calls: dict[str, int]) -> Any:
    """What stands for a function, method, static method, property or class, and counts."""
    kept = inspect.getattr_static(*shim.owner())
    if isinstance(kept, property):
        return property(_counting(kept.fget, shim.target, calls))
    if isinstance(kept, staticmethod):
        return staticmethod(_counting(kept.__func__, shim.target, calls))
    return _counting(kept, shim.target, calls)


def _counting(call: Any, name: str, calls: dict[str, int]) -> Any:
    @functools.wraps(call, updated=())
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return call(*args, **kwargs)

    return counted


def said_when_renamed(shim: Shim) -> str:
    """What the shim says after its target was renamed in the library itself.

    Classes written in C cannot be changed, and others inherit what is taken away; there the row asks
    for another name.
    """
    owner, name = shim.owner()
    holders = [c for c in getattr(owner, "__mro__", [owner]) if name in vars(c)] or [owner]
    kept = inspect.getattr_static(owner, name)
    with contextlib.suppress(TypeError, AttributeError):
        delattr(holders[0], name)
        try:
            if not hasattr(owner, name):
                return _complaint(shim)
        finally:
            setattr(holders[0], name, kept)
    renamed = dataclasses.replace(shim, target=shim.target + "_before")
    return _complaint(renamed).replace("_before", "")


def _complaint(shim: Shim) -> str:
    try:
        shim.get()
    except MovedError as error:
        return str(error)
    return "it found the name all the same"


def seen(file: str) -> tuple[list[str], list[str], dict[str, str]]:
    """In a process of its own: names that are gone, functions not called, and the canary's words."""
    if file.endswith("deepspeed"):
        from utils.techniques.deepspeed import load_deepspeed

        load_deepspeed()
    shims = importlib.import_module(file).SHIMS
    missing = [said for said in map(_complaint_or_none, shims) if said]
    quiet = [] if missing else uncalled([shim for shim in shims if shim.patched])
    return missing, quiet, {shim.target: said_when_renamed(shim) for shim in shims}


def _complaint_or_none(shim: Shim) -> str:
    said = _complaint(shim)
    return "" if said.startswith("it found") else said
