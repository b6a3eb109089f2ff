"""Modules under the names that they had: labs that somebody copied last year still import them.

`utils.labs.budget_17` was what is `utils.lessons.lesson_17.budget` now, and `utils.validation` what
is `evidence.validation`. One finder says where a module is today, and runs it for `python -m` too.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_OF_A_LESSON = re.compile(r"utils\.labs\.(?P<what>\w+)_(?P<number>\d\d)(?P<rest>(\.\w+)*)")
_LESSON = "utils.lessons.lesson_"
_RENAMED = {"lab": "checks", "ranks": "workers", "slurm": "job"}
_PLANNER = {  # modules of the planner by the folder that they lie in today
    "plan_search": "bounds choice compare space",
    "stage_bytes": "host peak_moments stage_memory states",
    "step_seconds": "adapter_time block_time collectives expert_time kernels pass_seconds step_end",
}
# Modules and packages; what lies in a package moved with it.
_OTHERS = {
    "evidence.record.bytes_llama": f"{_LESSON}08.records.bytes_llama",
    "evidence.record.gptq_layer": f"{_LESSON}08.records.gptq_layer",
    "utils.clinic.dead_runs": f"{_LESSON}16.dead_runs",
    "utils.clinic.host": f"{_LESSON}10.host",
    "utils.clinic.pages": f"{_LESSON}10.pages",
    "utils.clinic.snapshot": f"{_LESSON}10.snapshot",
    "utils.clusters": f"{_LESSON}17.clusters",
    "utils.data.library_text": f"{_LESSON}08.library_text",
    "utils.labs.cases_10": "utils.clinic.lab_patients",  # the capstone examines them too
    "utils.labs.clock": "utils.labs.minutes_in_words",
    "utils.labs.hand_ins": f"{_LESSON}99.hand_ins",
    "utils.labs.hooks": "utils.labs.checkpoint_probe",
    "utils.labs.results_page": f"{_LESSON}99.results_page",
    "utils.labs.sitting": f"{_LESSON}99.sitting",
    "utils.labs.wards_10": "utils.clinic.lab_ward",
    f"{_LESSON}16.calls": "utils.ranks.calls",
    f"{_LESSON}16.elastic": "utils.ranks.elastic",
    f"{_LESSON}16.elastic_job": "utils.ranks.elastic_job",
    f"{_LESSON}16.progress": f"{_LESSON}16a.progress",
    f"{_LESSON}16.records.per_step": f"{_LESSON}16a.records.per_step",
    f"{_LESSON}16.records.survive": f"{_LESSON}16a.records.survive",
    f"{_LESSON}16.records.survive_script": f"{_LESSON}16a.records.survive_script",
    f"{_LESSON}16.recovery": "utils.ranks.recovery",
    f"{_LESSON}16.watching": f"{_LESSON}16a.watching",
    "utils.memory.elsewhere": "utils.memory.keeps_elsewhere",
    "utils.memory.mistakes": "utils.memory.arguments",
    "utils.memory.peak": f"{_LESSON}07.peak",
    "utils.memory.saved": f"{_LESSON}13.saved",
    "utils.models.bytes_llama": f"{_LESSON}08.bytes_llama",
    "utils.models.gpt": f"{_LESSON}12.gpt",
    "utils.number_formats": f"{_LESSON}03.number_formats",
    "utils.parallel.kept": "utils.parallel.checkpoint_folder",
    "utils.parallel.parts": "utils.parallel.model_parts",
    "utils.parallel.programs": f"{_LESSON}13.own_schedule",
    "utils.parallel.shares": "utils.parallel.tensor_shares",
    "utils.parallel.tensor_layers": f"{_LESSON}12.tensor_layers",
    "utils.parallel.tensor_split": f"{_LESSON}12.tensor_split",
    "utils.parallel.timed": f"{_LESSON}13.timed",
    "utils.planner.account": f"{_LESSON}17.account",
    "utils.planner.decision": f"{_LESSON}17.decision",
    "utils.planner.failure_logs": f"{_LESSON}16.failure_logs",
    "utils.planner.inference": f"{_LESSON}08.inference",
    "utils.planner.moments": "utils.planner.stage_bytes.peak_moments",
    "utils.planner.offers": f"{_LESSON}17.offers",
    "utils.planner.parts": "utils.planner.step_seconds.pass_seconds",
    "utils.planner.placement": f"{_LESSON}14.placement",
    "utils.planner.review": f"{_LESSON}15.review",
    "utils.planner.saved": "utils.planner.saved_tensors",
    "utils.planner.scaling": f"{_LESSON}17.scaling",
    "utils.planner.scaling_fit": f"{_LESSON}17.scaling_fit",
    "utils.planner.setup": "utils.planner.plan_context",
    "utils.planner.tensor_traffic": f"{_LESSON}12.tensor_traffic",
    "utils.ranks.hosts": f"{_LESSON}11.hosts",
    "utils.ranks.lines": "utils.ranks.printed_lines",
    "utils.ranks.packing": "utils.ranks.pickling",
    "utils.ranks.sizes": "utils.ranks.tensor_sizes",
    "utils.ranks.slow_link": f"{_LESSON}11.slow_link",
    "utils.record": "evidence.record",
    "utils.record.cluster_runs": f"{_LESSON}17.cluster_runs",
    "utils.record.dead_runs": f"{_LESSON}16.records.dead_runs",
    "utils.record.per_step": f"{_LESSON}16a.records.per_step",
    "utils.record.survive": f"{_LESSON}16a.records.survive",
    "utils.simulation.mistakes": "utils.simulation.arguments",
    "utils.simulation.other_ways": "utils.simulation.left_out",
    "utils.simulation.packed": "utils.simulation.packed_sequences",
    "utils.simulation.places": "utils.simulation.source_lines",
    "utils.simulation.sentences": "utils.simulation.refusals",
    "utils.techniques.awq": f"{_LESSON}08.awq",
    "utils.techniques.block_choice": f"{_LESSON}05.block_choice",
    "utils.techniques.cpu_ranks": f"{_LESSON}07.cpu_ranks",
    "utils.techniques.data_parallel": f"{_LESSON}04.data_parallel",
    "utils.techniques.gptq": f"{_LESSON}08.gptq",
    "utils.techniques.int8": f"{_LESSON}08.int8",
    "utils.techniques.library": "utils.techniques.bitsandbytes_import",
    "utils.techniques.link": f"{_LESSON}07.link",
    "utils.techniques.megatron": f"{_LESSON}12.megatron",
    "utils.techniques.offload": f"{_LESSON}07.offload",
    "utils.techniques.offload_choice": f"{_LESSON}07.offload_choice",
    "utils.techniques.packed": f"{_LESSON}08.packed_linear",
    "utils.techniques.repeatable": f"{_LESSON}05.repeatable",
    "utils.techniques.room": "utils.techniques.offload_capacity",
    "utils.techniques.rounding": f"{_LESSON}08.rounding",
    "utils.techniques.sharding": f"{_LESSON}04.sharding",
    "utils.techniques.step_costs": f"{_LESSON}05.step_costs",
    "utils.techniques.streaming": f"{_LESSON}07.streaming",
    "utils.techniques.weight_only": f"{_LESSON}08.weight_only",
    "utils.techniques.safe_checkpoint": "utils.parallel",
    "utils.traffic.algorithms": f"{_LESSON}11.algorithms",
    "utils.traffic.wire": f"{_LESSON}11.wire",
    "utils.validation": "evidence.validation",
    "utils.views.budget_map": f"{_LESSON}06.budget_map",
    "utils.views.cluster_lanes": f"{_LESSON}17.cluster_lanes",
    "utils.views.curves": f"{_LESSON}02.curves",
    "utils.views.countdown": f"{_LESSON}99.countdown",
    "utils.views.decision_figures": f"{_LESSON}17.decision_figures",
    "utils.views.failures": f"{_LESSON}16.failures",
    "utils.views.few_bits": f"{_LESSON}08.figures",
    "utils.views.flight": f"{_LESSON}03.flight",
    "utils.views.formats": f"{_LESSON}03.format_figures",
    "utils.views.holders": f"{_LESSON}09.holders",
    "utils.views.link_costs": f"{_LESSON}11.link_costs",
    "utils.views.messages": f"{_LESSON}11.messages",
    "utils.views.orders": f"{_LESSON}14.orders",
    "utils.views.progress": f"{_LESSON}16a.progress",
    "utils.views.sayings": f"{_LESSON}99.sayings",
    "utils.views.scaling_figures": f"{_LESSON}17.scaling_figures",
    "utils.views.staircase": f"{_LESSON}09.staircase",
    "utils.views.studio": f"{_LESSON}15.studio",
    "utils.views.tensor_flow": f"{_LESSON}12.tensor_flow",
    "utils.views.tradeoff": f"{_LESSON}05.tradeoff",
    "utils.views.validation_figures": f"{_LESSON}07.validation_figures",
    "utils.watching": f"{_LESSON}16a.watching",
}
_OTHERS |= {
    f"utils.planner.{name}": f"utils.planner.{folder}.{name}"
    for folder, names in _PLANNER.items()
    for name in names.split()
}
# What a package of `utils` offered, by where it lies now. `utils` itself offered some of it too.
# "Case=PatientBytes": what was `Case` has another name today.
_NAMES = {
    f"{_LESSON}02.curves": "utils.views draw_losses draw_memory_by_batch draw_peaks",
    f"{_LESSON}03.flight": "utils.views draw_flight",
    f"{_LESSON}03.format_figures": "utils.views draw_bits draw_formats",
    f"{_LESSON}03.number_formats": "utils FORMATS NumberFormat",
    f"{_LESSON}04.data_parallel": "utils.techniques accumulated_backward",
    f"{_LESSON}04.sharding": "utils.techniques sharded_loader",
    f"{_LESSON}05.block_choice": "utils.techniques BlockCost activation_peak best_blocks block_costs recompute_flops",
    f"{_LESSON}05.repeatable": "utils.techniques NotRepeatableError check_repeatable recompute_explained",
    f"{_LESSON}05.step_costs": "utils.techniques StepCost step_cost",
    f"{_LESSON}05.tradeoff": "utils.views draw_tradeoff",
    f"{_LESSON}06.budget_map": "utils.views draw_budget_map",
    f"{_LESSON}07.link": "utils.techniques Link",
    f"{_LESSON}07.offload": "utils.techniques OffloadedOptimizer",
    f"{_LESSON}07.peak": "utils.memory allocated_peak",
    f"{_LESSON}07.streaming": "utils.techniques stream_blocks",
    f"{_LESSON}08.figures": "utils.views draw_context_memory draw_decoding draw_error_by_bits",
    f"{_LESSON}08.int8": "utils.techniques Int8Weight",
    f"{_LESSON}08.packed_linear": "utils.techniques PackedLinear pack_linears",
    f"{_LESSON}08.rounding": "utils.techniques output_error round_to_nearest second_moments",
    f"{_LESSON}08.weight_only": "utils.techniques Inputs inputs_of linears_of quantize_weights",
    f"{_LESSON}07.validation_figures": "utils.views draw_validation",
    f"{_LESSON}09.holders": "utils.views draw_holders",
    f"{_LESSON}09.staircase": "utils.views draw_staircase",
    f"{_LESSON}10.host": "utils.clinic HostRun run_loader",
    f"{_LESSON}10.pages": "utils.clinic VIEWS TraceError read_trace write_snapshot_page write_trace_page",
    f"{_LESSON}10.snapshot": "utils.clinic SnapshotError read_snapshot snapshot_of write_snapshot",
    f"{_LESSON}10.views": "utils.views Case=PatientBytes Segment draw_segments draw_ward",
    f"{_LESSON}11.hosts": "utils.ranks HostRun run_hosts",
    f"{_LESSON}11.link_costs": "utils.views draw_link_costs",
    f"{_LESSON}11.messages": "utils.views draw_messages",
    f"{_LESSON}11.wire": "utils Wire messages",
    f"{_LESSON}12.gpt": "utils.models GPTBlock",
    f"{_LESSON}12.tensor_flow": "utils.views Exchange Held draw_kept draw_tensor_flow",
    f"{_LESSON}12.tensor_layers": "utils.parallel SharedGradients Split vocabulary_cross_entropy",
    f"{_LESSON}12.tensor_split": "utils.parallel split_layers",
    f"{_LESSON}13.own_schedule": "utils.parallel OwnSchedule",
    f"{_LESSON}13.saved": "utils.memory SavedBytes saved_for_backward",
    f"{_LESSON}13.timed": "utils.parallel SleepingStage",
    f"{_LESSON}14.orders": "utils.views draw_orders",
    f"{_LESSON}14.placement": "utils.planner axis_sizes crossing_bytes layouts places",
    f"{_LESSON}15.review": "utils.planner Criterion Review review",
    f"{_LESSON}15.studio": "utils.views design draw_design studio",
    f"{_LESSON}16.failures": "utils.views draw_days draw_forgotten draw_goodput",
    f"{_LESSON}16a.progress": "utils.views Mark Progress Stretch draw_progress progress_of",
    f"{_LESSON}17.account": "utils.planner Account",
    f"{_LESSON}17.cluster_lanes": "utils.views draw_cluster",
    f"{_LESSON}17.clusters": f"{_LESSON}17.clusters Span=JobSpan",
    f"{_LESSON}17.decision": "utils.planner Option Ranked decide winners",
    f"{_LESSON}17.decision_figures": "utils.views draw_decision draw_spot",
    f"{_LESSON}17.scaling": "utils.planner CHINCHILLA REPLICATION ScalingLaw UNROUNDED",
    f"{_LESSON}17.scaling_figures": "utils.views draw_purchase draw_runs",
    f"{_LESSON}17.scaling_fit": "utils.planner fit_law leave_one_out",
    "utils.clinic.ward": "utils.clinic sick=examine_over_budget",
    "utils.memory.holdings": "utils.memory Held=ReachableStorage held=reachable_storages",
    "utils.parallel.checkpoint_folder": "utils.parallel named=list_checkpoints",
    "utils.parallel.context": "utils.parallel share_sequences=apply_cp",
    "utils.parallel.data": "utils.parallel own_batches=local_batches own_positions=local_positions own_rows=local_rows",
    "utils.parallel.pipeline": "utils.parallel cut=keep_chunk",
    "utils.parallel.shard": "utils.parallel reduce_late=reduce_on_last_micro_batch shard_states=apply_fsdp",
    "utils.parallel.tensor": "utils.parallel split_tensors=apply_tp",
    "utils.parallel.train": "utils.parallel clip=clip_grad_norm",
    "utils.planner.plan_search": "utils.planner Plans=SearchResult Space=SearchSpace",
    "utils.ranks.elastic": "utils.ranks Patience run_elastic",
    "utils.ranks.recovery": "utils.ranks ElasticRun Fault Recovery",
    "utils.techniques.numerics_recorder": "utils.techniques FlightRecorder=NumericsRecorder",
    "utils.techniques.precision": "utils.techniques computes=has_native_dtype low_precision=choose_autocast_dtype",
}
_HOME = {
    f"{package}.{earlier}": (home, name or earlier)
    for home, line in _NAMES.items()
    for package in (line.split()[0], "utils")
    for earlier, _, name in (word.partition("=") for word in line.split()[1:])
}


def today(name: str) -> str:
    """The name that a module of an earlier version has today; "" for one that is not known."""
    package, inner = name, ""
    while package.count("."):
        if package in _OTHERS:
            return _OTHERS[package] + inner
        package, _, last = package.rpartition(".")
        inner = f".{last}{inner}"
    if not (old := _OF_A_LESSON.fullmatch(name)):
        return ""
    what = _RENAMED.get(old["what"], old["what"])
    return f"{_LESSON}{old['number']}.{what}{old['rest']}"


class _Today(InspectLoader):
    """Hands out what is there today, a module or a name in one, in place of what was asked for."""

    def exec_module(self, module: ModuleType) -> None:
        asked = module.__name__
        # Python asks for `utils.views.draw_ward` as a module where the package lacks that name.
        home, name = _HOME.get(asked, (today(asked), ""))
        found: Any = importlib.import_module(home)
        sys.modules[asked] = getattr(found, name) if name else found

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs: the module of today, by its own name, so that its dots are right."""
        run = f"run_module({today(fullname)!r}, run_name='__main__', alter_sys=True)"
        return compile(f"from runpy import run_module; {run}", fullname, "exec")

    def get_source(self, fullname: str) -> str | None:
        return None


class Finder:
    """Finds modules by their earlier names."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec where the module, or what a package offered, has another home today."""
        if fullname in _HOME:
            return ModuleSpec(fullname, _Today())
        there = importlib.util.find_spec(name) if (name := today(fullname)) else None
        if there is None:
            return None
        is_package = there.submodule_search_locations is not None
        return ModuleSpec(fullname, _Today(), origin=there.origin, is_package=is_package)


def find_by_earlier_names() -> None:
    """From now on, imports of earlier names find the modules of today.

    Asked first: in a package of today, Python's own finder would make a second module of a file.
    """
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
