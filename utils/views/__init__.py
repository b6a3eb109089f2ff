"""Every figure, table and widget of the course, in one style."""

from utils.checked import check_public
from utils.views.breakdown import Bar, draw_breakdown, predicted
from utils.views.budget_map import draw_budget_map
from utils.views.cluster_lanes import draw_cluster
from utils.views.compare import Comparison, compare, reconcile
from utils.views.curves import draw_losses, draw_memory_by_batch, draw_peaks, draw_throughput
from utils.views.decision_figures import draw_decision, draw_spot
from utils.views.explore import explore
from utils.views.failures import draw_days, draw_forgotten, draw_goodput
from utils.views.few_bits import draw_context_memory, draw_decoding, draw_error_by_bits
from utils.views.flight import draw_flight
from utils.views.formats import draw_bits, draw_formats
from utils.views.holders import draw_holders
from utils.views.lanes import Span, draw_lanes
from utils.views.link_costs import draw_link_costs
from utils.views.messages import draw_messages
from utils.views.orders import draw_orders
from utils.views.over_time import draw_over_time
from utils.views.plan_figures import draw_pareto, draw_stage_memory
from utils.views.progress import Mark, Progress, Stretch, draw_progress, progress_of
from utils.views.rank_map import draw_ranks
from utils.views.scaling_figures import draw_purchase, draw_runs
from utils.views.schedule import Panel, draw_schedule, draw_schedules
from utils.views.show import show
from utils.views.staircase import draw_staircase
from utils.views.studio import design, draw_design, studio
from utils.views.tensor_flow import Exchange, Held, draw_kept, draw_tensor_flow
from utils.views.timeline import draw_timeline
from utils.views.tradeoff import draw_tradeoff
from utils.views.validation_figures import draw_validation

__all__ = [
    "Bar", "Comparison", "Exchange", "Held", "Mark", "Panel", "Progress",
    "Span", "Stretch", "compare", "design", "draw_bits", "draw_breakdown", "draw_budget_map",
    "draw_cluster", "draw_context_memory", "draw_days", "draw_decision", "draw_decoding",
    "draw_design", "draw_error_by_bits", "draw_flight", "draw_forgotten", "draw_formats",
    "draw_goodput", "draw_holders", "draw_kept", "draw_lanes", "draw_link_costs", "draw_losses",
    "draw_memory_by_batch", "draw_messages", "draw_orders", "draw_over_time", "draw_pareto",
    "draw_peaks", "draw_progress", "draw_purchase", "draw_ranks", "draw_runs", "draw_schedule",
    "draw_schedules", "draw_spot", "draw_stage_memory", "draw_staircase",
    "draw_tensor_flow", "draw_throughput", "draw_timeline", "draw_tradeoff", "draw_validation",
    "explore", "predicted", "progress_of", "reconcile", "show", "studio",
]  # fmt: skip

check_public(globals())
