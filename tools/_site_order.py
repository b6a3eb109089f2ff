"""A Sphinx extension: "next" leads from a lesson to its lab, and from the lab to the next lesson."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

START = "notebooks/00_start_here"


def way(pages: Iterable[str]) -> list[str]:
    """The pages of a course in the order in which they are learned: lessons, each with its lab."""
    found = set(pages)

    def steps() -> Iterator[str]:
        lessons = (page for page in found if page.startswith("notebooks/") and page.count("/") == 2)
        for lesson in sorted(lessons, key=lambda page: page.rpartition("/")[2]):
            yield lesson
            lab = lesson.replace("notebooks/", "labs/", 1)
            if lab in found:
                yield lab

    return [START, *steps()] if START in found else list(steps())


def neighbours(page: str, order: list[str]) -> tuple[str, str]:
    """(page before, page after); a solution stands where its lab does. Empty where there is none."""
    place = page.replace("solutions/", "labs/", 1)
    if place not in order:
        return "", ""
    index = order.index(place)
    before = order[index - 1] if index else ""
    after = order[index + 1] if index + 1 < len(order) else ""
    return (place, after) if place != page else (before, after)


def lead(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Put the neighbours of a page of the course into its arrows."""
    titles = app.env.titles
    order = way(titles)
    if page.replace("solutions/", "labs/", 1) not in order:
        return
    for arrow, other in zip(("prev", "next"), neighbours(page, order), strict=True):
        link = (
            {"link": context["pathto"](other), "title": titles[other].astext()} if other else None
        )
        context[arrow] = link


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("html-page-context", lead)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
