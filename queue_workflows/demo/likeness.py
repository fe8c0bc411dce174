"""Comparing by vectors: pairs of like packages, groups of like functions, a map, telling words."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter, mul
from typing import TypedDict

from queue_workflows.demo import models, source
from queue_workflows.demo.models import Vector

PAIRS = 15
GROUPS = 20
LIKE_FUNCTIONS = 0.9
"""Cosine from which two functions count as near-duplicates; below it they merely share a topic."""
RARE_WORDS = 4
"""Two functions are compared when one of so many rarest words of each is the same."""

Progress = Callable[[float], object]


class Pair(TypedDict):
    """Two packages and the cosine of their vectors."""

    one: str
    other: str
    likeness: float


class Place(TypedDict):
    """A function in the sources."""

    path: str
    name: str
    line: int
    lines: int


class Group(TypedDict):
    """Functions that are all like the first; `repeated` lines are those of all but the first."""

    places: list[Place]
    likeness: float
    repeated: int


class Groups(TypedDict):
    """How many groups there are, and those with the most repeated lines."""

    compared: int
    groups: int
    functions: int
    repeated: int
    largest: list[Group]


class Position(TypedDict):
    """A package on the map; both axes run from 0 to 1."""

    name: str
    x: float
    y: float


def cosine(one: Vector, other: Vector) -> float:
    """How alike two unit vectors are: 1 for the same direction, about 0 for unrelated texts."""
    return sum(map(mul, one, other))


def like_pairs(vectors: Mapping[str, Vector], progress: Progress) -> list[Pair]:
    """The pairs of packages that are most alike, best first."""
    pairs: list[Pair] = []
    for number, (one, vector) in enumerate(vectors.items(), 1):
        for other in itertools.islice(vectors, number, None):
            pairs.append(Pair(one=one, other=other, likeness=cosine(vector, vectors[other])))
        progress(number / len(vectors))
    return sorted(pairs, key=lambda pair: (-pair["likeness"], pair["one"], pair["other"]))[:PAIRS]


def like_functions(
    functions: list[source.Function], model: models.CodeWords, progress: Progress
) -> Groups:
    """The groups of near-duplicates among functions that have `words`.

    Each function joins the first group whose leader it is like, or leads a new one. Only leaders
    with which it shares a rare word come into question, which spares nearly all comparisons.
    """
    spread = Counter(word for function in functions for word in function["words"] or ())
    leaders: list[_Leader] = []
    known: defaultdict[str, list[_Leader]] = defaultdict(list)
    for number, function in enumerate(functions, 1):
        words = function["words"] or {}
        rare = _rarest(words, spread)
        vector = model.vector(words)
        candidates = {leader.number: leader for word in rare for leader in known[word]}
        if not any(candidates[place].takes(function, vector) for place in sorted(candidates)):
            leader = _Leader(len(leaders), function, vector)
            leaders.append(leader)
            for word in rare:
                known[word].append(leader)
        if number % 100 == 0:
            progress(number / len(functions))
    groups = [leader.group for leader in leaders if len(leader.group["places"]) > 1]
    return Groups(
        compared=len(functions),
        groups=len(groups),
        functions=sum(len(group["places"]) for group in groups),
        repeated=sum(group["repeated"] for group in groups),
        largest=sorted(groups, key=itemgetter("repeated"), reverse=True)[:GROUPS],
    )


def _rarest(words: Iterable[str], spread: Mapping[str, int]) -> list[str]:
    """The words that the fewest other functions have, but at least one."""
    shared = [word for word in words if spread[word] > 1]
    return sorted(shared, key=lambda word: (spread[word], word))[:RARE_WORDS]


class _Leader:
    """The first function of a group, with which all others are compared."""

    def __init__(self, number: int, function: source.Function, vector: Vector) -> None:
        self.number = number
        self.vector = vector
        self.group = Group(places=[_place(function)], likeness=1.0, repeated=0)

    def takes(self, function: source.Function, vector: Vector) -> bool:
        """Take a function into the group if it is like the leader; whether it was."""
        likeness = cosine(self.vector, vector)
        if likeness < LIKE_FUNCTIONS:
            return False
        self.group["places"].append(_place(function))
        self.group["likeness"] = min(self.group["likeness"], likeness)
        self.group["repeated"] += function["lines"]
        return True


def _place(function: source.Function) -> Place:
    return Place(
        path=function["path"],
        name=function["name"],
        line=function["line"],
        lines=function["lines"],
    )


def lay_out(vectors: Mapping[str, Vector]) -> list[Position]:
    """A map on which like packages lie close: the two main directions in which they differ."""
    if len(vectors) < 3:
        return []
    rows = list(vectors.values())
    middle = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    rows = [[value - mean for value, mean in zip(row, middle, strict=True)] for row in rows]
    axes: list[list[float]] = []
    for _ in range(2):
        direction = _main_direction(rows)
        along = [cosine(row, direction) for row in rows]
        axes.append(along)
        rows = [
            [value - reach * part for value, part in zip(row, direction, strict=True)]
            for row, reach in zip(rows, along, strict=True)
        ]
    points = zip(vectors, _unit_range(axes[0]), _unit_range(axes[1]), strict=True)
    return [Position(name=name, x=x, y=y) for name, x, y in points]


def _main_direction(rows: list[Vector], rounds: int = 40) -> Vector:
    """The direction of the largest variance, by power iteration from a fixed start."""
    columns = list(zip(*rows, strict=True))
    direction: Vector = [1.0 + 0.01 * place for place in range(len(columns))]
    for _ in range(rounds):
        along = [cosine(row, direction) for row in rows]
        direction = [math.fsum(map(mul, along, column)) for column in columns]
        length = math.sqrt(cosine(direction, direction)) or 1.0
        direction = [part / length for part in direction]
    return direction


def _unit_range(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / ((high - low) or 1.0) for value in values]


def telling_words(counts: Mapping[str, int], model: models.CodeWords, limit: int = 8) -> list[str]:
    """The words that are frequent here and rare elsewhere, most telling first."""

    def rank(word: str) -> tuple[float, str]:
        return -math.sqrt(counts[word]) * (model.weight(word) - 1), word

    return sorted(counts, key=rank)[:limit]
