"""`python -m evidence.validation`: predicted and simulated beside published, and other tools."""

from __future__ import annotations

import argparse

from evidence.validation.comparison import summarize
from evidence.validation.peers import PeerError, compare_peers
from evidence.validation.report import SOURCES, print_summaries, print_worst, validate


def main() -> None:
    """Print the planner's table, the simulator's, and other tools on the rows of both."""
    parser = argparse.ArgumentParser(prog="python -m evidence.validation", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="simulate every row, in minutes")
    parser.add_argument(
        "--source", action="append", choices=SOURCES, help="this table alone, with its worst rows"
    )
    parser.add_argument("--rows", type=int, default=5, help="how many of them (default: 5)")
    asked = parser.parse_args()
    if asked.source:
        validate(tuple(asked.source))
        print_worst(tuple(asked.source), asked.rows)
        return
    _all(asked.all)


def _all(every: bool) -> None:
    # These load torch and transformers, which the planner's own tables do without.
    from evidence.validation import finetunes
    from evidence.validation.simulation_peers import cpu_peers
    from evidence.validation.simulation_report import LEFT_OUT, report, simulated_against_published

    validate()
    print()
    print_summaries(summarize(finetunes.comparisons(finetunes.CASES if every else finetunes.QUICK)))
    _print_peers("memory of one GPU", compare_peers())
    simulated = simulated_against_published(every=every)
    print(f"\n{report(simulated)}")
    if not every:
        print(LEFT_OUT)
    small = [row for row in simulated if row.source.startswith("CPU allocator")]
    _print_peers("memory of small steps", cpu_peers(small))


def _print_peers(title: str, rows: list[PeerError]) -> None:
    print(f"\n{title:<28}{'tool':<28}{'rows':>5}{'median':>8}{'bias':>8}")
    for row in rows:
        print(f"{row.source:<28}{row.tool:<28}{row.rows:>5}{row.median:>8.1%}{row.bias:>8.1%}")


if __name__ == "__main__":
    main()
