"""What `from utils import ...` offers, and where it lies: the one list, read by `__init__.py` too."""

from evidence.record import recorded_table as recorded_table
from utils.catalog import device as device, model_shape as model_shape
from utils.data import cifar10 as cifar10, text_batches as text_batches, text_tokens as text_tokens
from utils.files import scratch as scratch, scratch_folder as scratch_folder
from utils.fitting import fit as fit, fit_model as fit_model
from utils.labs import check as check
from utils.labs.scoreboard import score as score, scoreboard as scoreboard
from utils.memory import OverBudgetError as OverBudgetError, budget as budget, measure as measure
from utils.models import (
    Transformer as Transformer,
    TransformerConfig as TransformerConfig,
    UNet as UNet,
    llama_config as llama_config,
    load_base as load_base,
    resnet as resnet,
    small_resnet as small_resnet,
)
from utils.planner import (
    Batch as Batch,
    Cluster as Cluster,
    Lora as Lora,
    Plan as Plan,
    compare_plans as compare_plans,
    cost as cost,
    estimate as estimate,
    explain as explain,
    export as export,
    goodput as goodput,
    one_change_that_fits as one_change_that_fits,
    search as search,
    why_it_does_not_fit as why_it_does_not_fit,
)
from utils.ranks import (
    RankError as RankError,
    prepare_ranks as prepare_ranks,
    run_ranks as run_ranks,
    run_torchrun as run_torchrun,
)
from utils.simulation import simulate as simulate, sweep as sweep
from utils.start import setup as setup
from utils.techniques import (
    NumericsRecorder as NumericsRecorder,
    MixedStep as MixedStep,
    checkpoint_blocks as checkpoint_blocks,
    has_native_dtype as has_native_dtype,
    choose_autocast_dtype as choose_autocast_dtype,
    tf32 as tf32,
)
from utils.traffic import traffic as traffic
from utils.traffic.cost import fit_alpha_beta as fit_alpha_beta
from utils.units import (
    GB as GB,
    GIB as GIB,
    MIB as MIB,
    Evidence as Evidence,
    format_bytes as format_bytes,
    format_seconds as format_seconds,
)
from utils.views import (
    Span as Span,
    compare as compare,
    draw_breakdown as draw_breakdown,
    draw_lanes as draw_lanes,
    draw_over_time as draw_over_time,
    draw_pareto as draw_pareto,
    draw_ranks as draw_ranks,
    draw_schedule as draw_schedule,
    draw_schedules as draw_schedules,
    draw_stage_memory as draw_stage_memory,
    draw_timeline as draw_timeline,
    explore as explore,
    predicted as predicted,
    reconcile as reconcile,
    show as show,
)
