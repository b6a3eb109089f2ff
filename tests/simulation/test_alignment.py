"""The search for what repeats, on streams made up of stretches, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.memory.events import Category, Phase
from utils.simulation.alignment import align, line
from utils.simulation.message_stream import Message, Misaligned, stream, timeline

MARK, DIED, BORN, EXISTING = range(4)
START = Message((MARK, Phase.BEFORE_FORWARD, ""))
CATEGORIES = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.GRADIENTS)


def born(size: int, layer: int | None = None, category: Category = Category.ACTIVATIONS) -> Message:
    """A block's birth, outside of any module or in a layer."""
    template, indices = ("", ()) if layer is None else ("blocks.{}.up", (layer,))
    return Message((BORN, category, Phase.FORWARD, template), (size, *indices))


def died(birth: Message) -> Message:
    return Message((DIED, *birth.label[1:]), birth.values)


@dataclass(frozen=True)
class Grammar:
    """Stretches of sizes: common ones, and per layer ones that run upwards or downwards.

    A layer's block lives to the end, is freed at once, or is freed in a later pass over all.
    """

    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]
    grows: int

    def stream(self, layers: int) -> list[Message]:
        messages = [START, born(1000 + self.grows * layers)]
        for number, (common, repeated, upwards) in enumerate(self.parts):
            category = CATEGORIES[number % len(CATEGORIES)]
            messages += [born(size, None, category) for size in common]
            for layer in range(layers) if upwards else reversed(range(layers)):
                for size in repeated:
                    birth = born(size, layer, category)
                    messages += [birth, died(birth)] if size % 3 == 0 else [birth]
            if number % 2:
                alive = [size for size in repeated if size % 3]
                for layer in range(layers):
                    messages += [died(born(size, layer, category)) for size in alive]
        return messages


sizes = st.lists(st.integers(1, 6), max_size=5).map(tuple)
grammars = st.builds(
    Grammar,
    st.lists(st.tuples(sizes, sizes, st.booleans()), min_size=1, max_size=4).map(tuple),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=200)
@given(grammars, st.integers(1, 3), st.integers(3, 5), st.integers(0, 9))
def test_what_repeats_is_found_and_continued(
    grammar: Grammar, first: int, repeats: int, wanted: int
) -> None:
    """Few sizes, so that stretches look alike, run into each other, and hold repetitions."""
    a, b, c = (grammar.stream(first + n) for n in (0, 1, repeats))
    pattern = align((a, b, c), repeats)
    assert [pattern.stream(n) for n in (0, 1, repeats)] == [a, b, c]
    assert pattern.stream(wanted) == grammar.stream(first + wanted)


@settings(deadline=None, max_examples=200)
@given(grammars, st.integers(1, 3), st.integers(3, 9))
def test_two_repetitions_tell_all_sizes(grammar: Grammar, first: int, wanted: int) -> None:
    """Two points make a line for an index: like stretches side by side may swap layers, or give
    a layer below zero, which is refused. No block is ever too many, too few, or of a wrong size.
    """
    a, b, c = (grammar.stream(first + n) for n in (0, 1, 2))
    pattern = align((a, b, c), 2)
    try:
        found = pattern.stream(wanted)
    except Misaligned:
        return
    sizes_found = [(m.label, m.values[:1]) for m in found]
    assert sizes_found == [(m.label, m.values[:1]) for m in grammar.stream(first + wanted)]


@settings(deadline=None)
@given(grammars, st.integers(1, 6))
def test_a_stream_makes_a_timeline_and_back(grammar: Grammar, layers: int) -> None:
    messages = grammar.stream(layers)
    made = timeline(messages)
    assert stream(made) == messages
    born_bytes = sum(m.values[0] for m in messages if m.label[0] == BORN)
    died_bytes = sum(m.values[0] for m in messages if m.label[0] == DIED)
    assert made.alive_bytes[-1] == born_bytes - died_bytes


@settings(deadline=None)
@given(grammars, st.data())
def test_one_more_block_at_one_depth_is_refused(grammar: Grammar, data: st.DataObject) -> None:
    streams = [grammar.stream(depth) for depth in (2, 3, 5)]
    odd = data.draw(st.integers(0, 2))
    streams[odd].insert(data.draw(st.integers(1, len(streams[odd]))), born(7))
    with pytest.raises(Misaligned, match="they part at"):
        align((streams[0], streams[1], streams[2]), 3)


@settings(deadline=None)
@given(grammars, st.data())
def test_one_other_size_at_one_depth_is_refused(grammar: Grammar, data: st.DataObject) -> None:
    streams = [grammar.stream(depth) for depth in (2, 3, 5)]
    odd = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(1, len(streams[odd]) - 1))
    label, values = streams[odd][at]
    streams[odd][at] = Message(label, (values[0] + 7, *values[1:]))
    with pytest.raises(Misaligned, match="they part at"):
        align((streams[0], streams[1], streams[2]), 3)


def test_an_index_must_advance_evenly() -> None:
    def layers(*indices: int) -> list[Message]:
        return [START, *(born(8, index) for index in indices)]

    align((layers(0), layers(0, 1), layers(0, 1, 2, 3)), 3)
    with pytest.raises(Misaligned, match=r"birth of 8 B of activations of module 'blocks.1.up'"):
        align((layers(0), layers(0, 1), layers(0, 1, 2, 7)), 3)


def test_a_size_that_shrinks_below_nothing_is_refused() -> None:
    pattern = align(([START, born(30)], [START, born(20)], [START, born(10)]), 2)
    with pytest.raises(Misaligned, match="below zero"):
        pattern.stream(4)


def test_a_death_before_birth_is_refused() -> None:
    with pytest.raises(Misaligned, match="before its birth"):
        timeline([START, died(born(8))])


def test_a_line_needs_the_same_messages() -> None:
    def double(sizes_bytes: list[int]) -> int:
        return 2 * sizes_bytes[-1]

    assert line([[START, born(1)], [START, born(2)]], double) == [START, born(4)]
    with pytest.raises(Misaligned, match="different number of blocks"):
        line([[START], [START, born(2)]], double)
    with pytest.raises(Misaligned, match="part at the birth of"):
        line([[START, born(1)], [START, born(2, 0)]], double)


def test_frees_of_autocasts_cache_are_put_in_order() -> None:
    births = [born(size, size, Category.CAST_WEIGHTS) for size in (1, 2, 3)]
    ordered = [START, *births, *map(died, births)]
    shuffled = timeline([START, *births, *(died(births[i]) for i in (2, 0, 1))])
    assert stream(shuffled) == ordered


def test_what_hangs_on_autocasts_cache_is_put_in_order_with_it() -> None:
    """mamba's view of a cast weight lives as long as the cache, and ends somewhere among its copies."""
    copies = [born(size, size, Category.CAST_WEIGHTS) for size in (1, 3)]
    births = [copies[0], born(2, 2, Category.TEMPORARIES), copies[1]]
    shuffled = timeline([START, *births, *(died(births[i]) for i in (2, 1, 0))])
    assert stream(shuffled) == [START, *births, *map(died, births)]
    others = [born(size, size) for size in (1, 2)]
    as_they_are = [START, *others, *map(died, reversed(others))]
    assert stream(timeline(as_they_are)) == as_they_are, "without copies nothing is moved"


def test_like_blocks_are_told_apart_where_that_is_asked() -> None:
    first, second, third = (born(8) for _ in range(3))
    messages = [START, first, second, third]
    ends = [died(first)._replace(values=(8, younger)) for younger in (1, 1, 0)]
    made = timeline([*messages, *ends], told_apart=True)
    born_then_died = sorted((a.born_ns, a.died_ns) for a in made.allocations)
    assert born_then_died == [(1, 5), (2, 4), (3, 6)]
    assert stream(made, told_apart=True) == [*messages, *ends]
    assert stream(made) == [*messages, *map(died, (first, second, third))]
    with pytest.raises(Misaligned, match="before its birth"):
        timeline([START, first, died(first)._replace(values=(8, 1))], told_apart=True)
