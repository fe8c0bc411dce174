"""The words that names in a source are made of: `parseHTTPDate` and `parse_http_date` alike."""

from __future__ import annotations

import functools
import re
from collections import Counter

_NAME = re.compile(r"[^\W\d]\w+")
_SEAM = re.compile(r"_+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def count_words(text: str) -> Counter[str]:
    """How often each word occurs in the names of the text, keywords and prose included."""
    words: Counter[str] = Counter()
    for name, times in Counter(_NAME.findall(text)).items():
        for word in split(name):
            words[word] += times
    return words


@functools.lru_cache(maxsize=50_000)
def split(name: str) -> tuple[str, ...]:
    """The words of one name in lower case, single letters left out."""
    return tuple(part.lower() for part in _SEAM.split(name) if len(part) > 1)
