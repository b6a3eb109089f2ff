"""The best plan of all: every one of a space is looked at, and most are ruled out by a bound."""

from utils.planner.plan_search.every_plan import SearchResult, SearchSpace, candidates, search

__all__ = ["SearchResult", "SearchSpace", "candidates", "search"]
