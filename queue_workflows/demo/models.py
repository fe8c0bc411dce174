"""The model that the gpu nodes share: what a word in code is worth, and vectors made of that."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping

from queue_workflows import model_registry
from queue_workflows.demo import listing, words

CODE_WORDS = "code-words"
DIMENSIONS = 256
"""Unrelated vectors of this length are alike by about 1 / sqrt(256) = 6 %, by chance."""


Vector = list[float]


class CodeWords:
    """Weights of words by how rare they are in a body of code (TF-IDF), and vectors of texts."""

    def __init__(self, seen_in: Mapping[str, int], documents: int) -> None:
        self.seen_in = seen_in
        self.documents = documents

    def weight(self, word: str) -> float:
        """1 for a word of every document, rising with rarity; most for one never seen."""
        return 1 + math.log((1 + self.documents) / (1 + self.seen_in.get(word, 0)))

    def vector(self, counts: Mapping[str, int]) -> Vector:
        """A unit vector: each word adds its weight where, and with the sign that, its hash says."""
        vector = [0.0] * DIMENSIONS
        for word, times in sorted(counts.items()):
            code = zlib.crc32(word.encode())
            worth = (1 + math.log(times)) * self.weight(word)
            vector[code % DIMENSIONS] += worth if code & 0x80000000 else -worth
        length = math.sqrt(sum(value * value for value in vector)) or 1.0
        return [value / length for value in vector]


def load_code_words() -> CodeWords:
    """Fit the model to the modules of the standard library; takes about a second."""
    sources = sorted(listing.standard_library().glob("*.py"))
    if not sources:
        raise FileNotFoundError(f"no sources in {listing.standard_library()} to fit the model to")
    seen_in: Counter[str] = Counter()
    for source in sources:
        seen_in.update(words.count_words(source.read_text("utf-8", "replace")).keys())
    return CodeWords(seen_in, len(sources))


def register() -> None:
    """Tell the engine how to load each model; safe to call again."""
    model_registry.register(model_registry.ModelSpec(id=CODE_WORDS, loader=load_code_words))
