"""The plans of lab 09's third exercise: which fit, what they send, and what a wrong rule would choose."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Card = tuple[int, int, int, int, int]  # parameters, ranks, bytes, texts of a step, bytes of a text
Plan = tuple[int, int]  # stage and micro-batch
PER_PARAMETER = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}  # bytes whole, and shared by ranks
ROUNDS: dict[int, Callable[[int], int]] = {
    0: lambda g: 2,
    1: lambda g: 3,
    2: lambda g: 2 * g + 1,
    3: lambda g: 3 * g,
}  # of a step of g micro-batches

CARDS: tuple[Card, ...] = (
    (1_300_000_000, 8, 24_000_000_000, 8, 1_500_000_000),
    (1_300_000_000, 8, 8_000_000_000, 8, 1_000_000_000),
    (1_300_000_000, 8, 8_150_000_000, 8, 1_000_000_000),  # ZeRO-1 and one text, to the last byte
    (1_300_000_000, 8, 6_600_000_000, 8, 1_000_000_000),  # ZeRO-3 and four
    (1_300_000_000, 64, 4_000_000_000, 4, 900_000_000),
    (1_000_000_000, 1, 15_000_000_000, 4, 100_000_000),
    (1_000_000_000, 2, 21_000_000_000, 12, 1_000_000_000),
    (1_000_000_000, 8, 17_000_000_000, 4, 1_000_000_000),  # DDP and one text, to the last byte
    # On these the rules of MISTAKES choose otherwise.
    (2_000_000_000, 8, 11_700_000_000, 20, 1_000_000_000),  # ZeRO-2 and four, or ZeRO-3 and five
    (1_300_000_000, 8, 7_900_000_000, 6, 1_500_000_000),
    (2_000_000_000, 2, 32_000_000_000, 12, 1_000_000_000),
    (1_000_000_000, 8, 5_800_000_000, 8, 1_000_000_000),
    (1_300_000_000, 64, 2_400_000_000, 20, 200_000_000),
    (1_000_000_000, 64, 3_100_000_000, 4, 200_000_000),
)


@dataclass(frozen=True)
class Rule:
    """How plans are judged; the right way unless told otherwise.

    Args:
        rounds: Rounds sent in a step of g micro-batches, by stage.
        per_parameter: Bytes that are whole on each rank and that ranks share, by stage.
        at_once: Texts whose activations are alive, of a micro-batch and the texts of the step.
        fits: Whether bytes fit a card's.
        share: Divides shared bytes by the ranks.
    """

    rounds: Mapping[int, Callable[[int], int]] = field(default_factory=dict)
    per_parameter: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    at_once: Callable[[int, int], int] = lambda micro, texts: micro
    fits: Callable[[float, float], bool] = operator.le
    share: Callable[[int, int], float] = operator.truediv

    def plans(self, card: Card) -> dict[Plan, int]:
        """Rounds of all plans that fit."""
        count, ranks, card_bytes, texts, each = card
        rounds, states = ROUNDS | dict(self.rounds), PER_PARAMETER | dict(self.per_parameter)
        return {
            (stage, micro): rounds[stage](texts // micro)
            for stage, (whole, shared) in states.items()
            for micro in range(1, texts + 1)
            if texts % micro == 0
            and self.fits(
                count * (whole + self.share(shared, ranks)) + self.at_once(micro, texts) * each,
                card_bytes,
            )
        }

    def explains(self, found: Sequence[Plan | None]) -> bool:
        """Whether all choices, one a card, are what this rule finds cheapest."""
        for choice, card in zip(found, CARDS, strict=True):
            plans = self.plans(card)
            least = min(plans.values(), default=None)
            if (plans.get(choice) if choice else None) != least:
                return False
        return True


_DDP = "With no_sync DDP sends once a step, however many micro-batches there are."
_ZERO_1 = (
    "ZeRO-1 keeps whole gradients, so it sends once a step, however many micro-batches there are."
)
_IN_EACH = (
    "Count again what ZeRO-2 and ZeRO-3 send in every micro-batch, and what once a step. Who has room "
    "for the others' gradients, and who keeps parameters?"
)
_SHARED = "ZeRO-{} shares other states than that: which of weights, gradients and optimizer state does it divide?"
_WHOLE = (
    "ZeRO-{} keeps something whole: which of weights, gradients and optimizer state is not divided?"
)
_ALIVE = "Activations are alive for the texts of one micro-batch: no more, and no fewer."
MISTAKES: tuple[tuple[str, Rule], ...] = (
    ("The cheapest plan fills a card to the last byte, and so it fits: `<=`, not `<`.", Rule(fits=operator.lt)),
    (_DDP, Rule({0: lambda g: 2 * g})),
    (_ZERO_1, Rule({1: lambda g: 2 * g + 1})),
    (_ZERO_1, Rule({1: lambda g: 3 * g})),
    *((_IN_EACH, Rule({2: rounds})) for rounds in (lambda g: 3, lambda g: g + 1, lambda g: 2 * g, lambda g: 3 * g)),
    *((_IN_EACH, Rule({3: rounds})) for rounds in
      (lambda g: 3, lambda g: 2 * g, lambda g: 2 * g + 1, lambda g: g + 2, lambda g: 4 * g)),
    (_WHOLE.format(1), Rule(per_parameter={1: (2, 14)})),
    (_SHARED.format(1), Rule(per_parameter={1: (16, 0)})),
    (_WHOLE.format(2), Rule(per_parameter={2: (0, 16)})),
    (_SHARED.format(2), Rule(per_parameter={2: (4, 12)})),
    (_SHARED.format(3), Rule(per_parameter={3: (2, 14)})),
    ("Adam's 12 bytes are two moments and the fp32 copy of the weights.",
     Rule(per_parameter={0: (12, 0), 1: (4, 8), 2: (2, 10), 3: (0, 12)})),
    (_ALIVE, Rule(at_once=lambda micro, texts: 0)),
    (_ALIVE, Rule(at_once=lambda micro, texts: 1)),
    (_ALIVE, Rule(at_once=lambda micro, texts: texts)),
    (_ALIVE, Rule(at_once=lambda micro, texts: texts // micro)),
    ("12 // 8 is 1: bytes per parameter over ranks have a fraction.", Rule(share=operator.floordiv)),
)  # fmt: skip
PRECISE = MISTAKES[0][0]


def likely_mistakes(found: Sequence[Plan | None]) -> list[str]:
    """What may be wrong with a rule that makes these choices: the sentence of each that does."""
    return list(dict.fromkeys(text for text, rule in MISTAKES if rule.explains(found)))
