"""Ranks what the site's search finds: lessons first, those that speak most of what was asked.

Sphinx's own index knows on which page a word stands, and not how often, so that of twenty lessons that
name NCCL the first in the alphabet would come first.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping

LEAST = 2  # how often a page says a word that counts
HEADING_WEIGHT = 10
PAIR_WEIGHT = 3  # of two words side by side, as asked
_WORD = re.compile(r"\w+")
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
SCRIPT = """const WEIGHTS = %s;
var Scorer = {
  score: ([page, , , , score]) => {
    const asked = new URLSearchParams(location.search).get("q") || "";
    const stemmer = new Stemmer();
    const stems = (asked.toLowerCase().match(/\\w+/g) || []).map(word => stemmer.stemWord(word));
    const pairs = stems.slice(1).map((stem, i) => `${stems[i]} ${stem}`);
    const own = WEIGHTS[page];
    return own ? 10 + score / 10 + [...stems, ...pairs].reduce((sum, s) => sum + (own[s] || 0), 0) : score / 10;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
"""


def stems(text: str) -> Counter[str]:
    """How often words and pairs of them are said, in headings many times over; a word is Sphinx's own stem."""
    found = _counted(text)
    for heading in _HEADING.findall(text):
        for stem, n in _counted(heading).items():
            found[stem] += HEADING_WEIGHT * n
    return found


def _counted(text: str) -> Counter[str]:
    # What Sphinx stems with, here and in the browser; it comes with Sphinx.
    stem = importlib.import_module("snowballstemmer").stemmer("english").stemWord
    words = [stem(word) for word in _WORD.findall(text.lower())]
    return Counter(words) + Counter(map(" ".join, itertools.pairwise(words)))


def weights(pages: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """What a word asked for adds to a page's rank, by page: the root of its count, times its rarity.

    A word's rarity is the log of pages over pages that say it often (term frequency times inverse document
    frequency: Spaerck Jones 1972, "A statistical interpretation of term specificity").

    Args:
        pages: The text of each page that ranks first, by its name.
    """
    counts = {page: stems(text) for page, text in pages.items()}
    said = Counter(stem for found in counts.values() for stem, n in found.items() if n >= LEAST)
    return {
        page: {
            stem: round(math.sqrt(n) * rare * (PAIR_WEIGHT if " " in stem else 1), 1)
            for stem, n in found.items()
            if n >= LEAST and (rare := math.log(len(pages) / said[stem]))
        }
        for page, found in counts.items()
    }


def scorer(pages: Mapping[str, str]) -> str:
    """The script that Sphinx's search asks for a result's rank."""
    return SCRIPT % json.dumps(weights(pages), separators=(",", ":"))
