"""Every figure, table and widget of the course, in one style."""

from utils.checked import check_public
from utils.views.breakdown import Bar, draw_breakdown, predicted
from utils.views.comparisons import Comparison, compare, reconcile
from utils.views.explorer import explore
from utils.views.images import show
from utils.views.lanes import Span, draw_lanes
from utils.views.over_time import draw_over_time
from utils.views.plan_figures import draw_pareto, draw_stage_memory
from utils.views.rank_map import draw_ranks
from utils.views.schedule import Panel, draw_schedule, draw_schedules
from utils.views.timeline import draw_timeline

__all__ = [
    "Bar", "Comparison", "Panel", "Span", "compare", "draw_breakdown", "draw_lanes",
    "draw_over_time", "draw_pareto", "draw_ranks", "draw_schedule", "draw_schedules", "draw_stage_memory",
    "draw_timeline", "explore", "predicted", "reconcile", "show",
]  # fmt: skip

check_public(globals())
