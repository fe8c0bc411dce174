"""Lay out a graph in ranks from left to right, with few crossings and straight long edges.

After K. Sugiyama, S. Tagawa and M. Toda, "Methods for Visual Understanding of Hierarchical System
Structures", IEEE Transactions on Systems, Man, and Cybernetics 11 (2), 1981: ranks, dummy points
where an edge passes a rank, an order by barycentres, then coordinates. Those are the nearest to
their neighbours by least squares that keep the order and the distances, found by pooling adjacent
violators (R. E. Barlow and others, "Statistical Inference under Order Restrictions", 1972).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

MOST: Final = 500
"""Boxes that are drawn at most."""
MOST_EDGES: Final = 2_000
WIDTH, HEIGHT, GAP_X, GAP_Y = 168, 30, 56, 14
"""Sizes of a box and of the space between boxes, in pixels."""
_DUMMY: Final = 6.0
"""Half of the height that a passing edge takes."""
_DUMMIES: Final = 4_000
"""Dummy points at most: the longest edges beyond are drawn straight."""
_STRAIGHT: Final = 8.0
"""Weight of a dummy point against a box: a bent long edge is worse than a box off its neighbours."""
_SWEEPS: Final = 8
Point = tuple[float, float]


class Box(NamedTuple):
    """The left upper corner of a box, and its rank."""

    x: float
    y: float
    rank: int


class Edge(NamedTuple):
    """An edge with the points that it passes; straight where it passes a rank, curved between."""

    source: str
    target: str
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """Return the path as the attribute `d` of SVG."""
        x, y = self.points[0]
        parts = [f"M{x:g} {y:g}"]
        for number, (to_x, to_y) in enumerate(self.points[1:]):
            if y == to_y or number % 2:
                parts.append(f"L{to_x:g} {to_y:g}")
            else:
                middle = (x + to_x) / 2
                parts.append(f"C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}")
            x, y = to_x, to_y
        return "".join(parts)


class Drawing(NamedTuple):
    """The boxes by name, and all edges."""

    width: float
    height: float
    boxes: dict[str, Box]
    edges: list[Edge]


class _Points:
    """The points of the layers: first the boxes, behind them the dummy points."""

    def __init__(self, boxes: int) -> None:
        self.boxes = boxes
        self.ranks = [0] * boxes
        self.before: list[list[int]] = [[] for _ in range(boxes)]
        self.behind: list[list[int]] = [[] for _ in range(boxes)]

    def add_dummy(self, rank: int, source: int) -> int:
        number = len(self.ranks)
        self.ranks.append(rank)
        self.before.append([])
        self.behind.append([])
        self.connect(source, number)
        return number

    def connect(self, source: int, target: int) -> None:
        self.behind[source].append(target)
        self.before[target].append(source)


def draw(depends_on: Mapping[str, Iterable[str]]) -> Drawing:
    """Return the drawing of a graph, given what each box depends on.

    Dependencies on unknown boxes and on itself are left out. An edge that closes a cycle is drawn
    backwards. The same graph always gives the same drawing.
    """
    names = list(depends_on)
    numbers = {name: number for number, name in enumerate(names)}
    given = [
        (numbers[name], number)
        for number, deps in enumerate(depends_on.values())
        for name in dict.fromkeys(deps)
        if numbers.get(name, number) != number
    ]
    points = _Points(len(names))
    order = _linear_order(len(names), given)
    edges = {edge: edge if order[edge[0]] < order[edge[1]] else edge[::-1] for edge in given}
    distinct = list(dict.fromkeys(edges.values()))
    _rank(points.ranks, order, distinct)
    passed = _add_dummies(points, distinct)
    layers = _ordered(points, len(distinct))
    y = _coordinates(points, layers)
    boxes = {
        name: Box(float(points.ranks[n] * (WIDTH + GAP_X)), round(y[n] - HEIGHT / 2, 1), points.ranks[n])
        for n, name in enumerate(names)
    }
    drawn: list[Edge] = []
    for given_edge, (source, target) in edges.items():
        line = _line(points, y, source, target, passed.get((source, target), ()))
        if given_edge != (source, target):
            line = line[::-1]
        drawn.append(Edge(names[given_edge[0]], names[given_edge[1]], line))
    width = max((box.x + WIDTH for box in boxes.values()), default=0.0)
    height = max((at + (HEIGHT / 2 if n < len(names) else _DUMMY) for n, at in enumerate(y)), default=0.0)
    return Drawing(width, round(height, 1), boxes, drawn)


def _linear_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the place of each box in an order with as many edges forward as a search finds."""
    behind: list[list[int]] = [[] for _ in range(count)]
    left = [0] * count
    for source, target in edges:
        behind[source].append(target)
        left[target] += 1
    place = [-1] * count
    ready = deque(number for number in range(count) if not left[number])
    rest = iter(range(count))
    placed = 0
    while placed < count:
        if not ready:  # every box that is left waits for a cycle
            ready.append(next(number for number in rest if place[number] < 0))
        number = ready.popleft()
        if place[number] >= 0:
            continue
        place[number] = placed
        placed += 1
        for target in behind[number]:
            left[target] -= 1
            if not left[target]:
                ready.append(target)
    return place


def _rank(ranks: list[int], order: Sequence[int], edges: Iterable[tuple[int, int]]) -> None:
    """Set each rank to the longest way there; move what has more behind than before next to it."""
    before: list[list[int]] = [[] for _ in ranks]
    behind: list[list[int]] = [[] for _ in ranks]
    for source, target in edges:
        before[target].append(source)
        behind[source].append(target)
    by_place = sorted(range(len(ranks)), key=order.__getitem__)
    for number in by_place:
        ranks[number] = max((ranks[other] + 1 for other in before[number]), default=0)
    for number in reversed(by_place):
        if len(behind[number]) > len(before[number]):
            ranks[number] = min(ranks[other] for other in behind[number]) - 1


def _add_dummies(
    points: _Points, edges: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Connect the layers; return the dummy points of each long edge.

    The edges of one source share them. Without a limit some hundred boxes that all depend on each
    other would have millions.
    """
    chains: dict[int, list[int]] = {}
    passed: dict[tuple[int, int], tuple[int, ...]] = {}
    left = _DUMMIES
    by_length = sorted(edges, key=lambda edge: points.ranks[edge[1]] - points.ranks[edge[0]])
    for source, target in by_length:
        needed = points.ranks[target] - points.ranks[source] - 1
        chain = chains.setdefault(source, [])
        if needed - len(chain) > left:
            continue
        while len(chain) < needed:
            rank = points.ranks[source] + len(chain) + 1
            chain.append(points.add_dummy(rank, chain[-1] if chain else source))
            left -= 1
        points.connect(chain[needed - 1] if needed else source, target)
        passed[source, target] = tuple(chain[:needed])
    return passed


# --- order -------------------------------------------------------------------------------------


def _ordered(points: _Points, edges: int) -> list[list[int]]:
    """Return the points of each rank in the order of the fewest crossings that the sweeps find."""
    layers: list[list[int]] = [[] for _ in range(max(points.ranks, default=-1) + 1)]
    for number, rank in enumerate(points.ranks):
        layers[rank].append(number)
    place = [0.0] * len(points.ranks)
    for layer in layers:
        _set_places(place, layer)
    best, fewest = [[*layer] for layer in layers], None
    for sweep in range(max(2, min(_SWEEPS, 20_000 // (edges + 1)))):
        forward = sweep % 2 == 0
        neighbours = points.before if forward else points.behind
        for layer in layers if forward else reversed(layers):
            centre = {number: _mean(place, neighbours[number], place[number]) for number in layer}
            layer.sort(key=centre.__getitem__)
            _set_places(place, layer)
        crossings = sum(_crossings(points, place, layer) for layer in layers)
        if fewest is None or crossings < fewest:
            best, fewest = [[*layer] for layer in layers], crossings
        if not crossings:
            break
    return best


def _set_places(place: list[float], layer: Sequence[int]) -> None:
    """Set the places from 0 to 1, so that layers of other lengths are beside each other."""
    for index, number in enumerate(layer):
        place[number] = (index + 0.5) / len(layer)


def _mean(values: Sequence[float], numbers: Sequence[int], default: float) -> float:
    return sum(values[number] for number in numbers) / len(numbers) if numbers else default


def _crossings(points: _Points, place: Sequence[float], layer: Sequence[int]) -> int:
    """Return how many edges from this layer to the next cross: the inversions of their ends."""
    found, ends = 0, list[float]()
    for number in layer:
        targets = [place[target] for target in points.behind[number]]
        found += sum(len(ends) - bisect.bisect_right(ends, target) for target in targets)
        for target in targets:
            bisect.insort(ends, target)
    return found


# --- coordinates -------------------------------------------------------------------------------


def _coordinates(points: _Points, layers: Sequence[Sequence[int]]) -> list[float]:
    """Return the middle of each point from the top, which is 0."""
    half = [(HEIGHT + GAP_Y) / 2 if n < points.boxes else _DUMMY for n in range(len(points.ranks))]
    weight = [1.0 if n < points.boxes else _STRAIGHT for n in range(len(points.ranks))]
    y = [0.0] * len(points.ranks)
    both = [before + behind for before, behind in zip(points.before, points.behind, strict=True)]
    for layer in layers:
        at = 0.0
        for number in layer:
            y[number] = at + half[number]
            at += 2 * half[number]
    ways = [points.before, points.behind, points.before, points.behind, both, both]
    for step, neighbours in enumerate(ways):
        for layer in layers if step % 2 == 0 else reversed(layers):
            wanted = [_mean(y, neighbours[number], y[number]) for number in layer]
            found = _apart(wanted, [half[n] for n in layer], [weight[n] for n in layer])
            for number, at in zip(layer, found, strict=True):
                y[number] = at
    top = min((at - (HEIGHT / 2 if n < points.boxes else _DUMMY) for n, at in enumerate(y)), default=0.0)
    return [round(at - top, 1) for at in y]


def _apart(wanted: Sequence[float], half: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the places nearest to the wanted ones, in this order, without overlap."""
    offsets: list[float] = []
    offset = 0.0
    blocks: list[tuple[float, float, int]] = []
    for index, (at, weight) in enumerate(zip(wanted, weights, strict=True)):
        offset += half[index - 1] + half[index] if index else 0.0
        offsets.append(offset)
        total, mass, count = (at - offset) * weight, weight, 1
        while blocks and blocks[-1][0] * mass >= total * blocks[-1][1]:
            other, other_mass, other_count = blocks.pop()
            total, mass, count = total + other, mass + other_mass, count + other_count
        blocks.append((total, mass, count))
    means = [total / mass for total, mass, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _line(
    points: _Points, y: Sequence[float], source: int, target: int, dummies: Sequence[int]
) -> tuple[Point, ...]:
    """Return the points of an edge, from the right side of its source to the left of its target.

    It passes the ranks between on the height of its dummy points, beside their boxes.
    """
    step = WIDTH + GAP_X
    line = [(float(points.ranks[source] * step + WIDTH), y[source])]
    for number in dummies:
        left = float(points.ranks[number] * step)
        line += [(left, y[number]), (left + WIDTH, y[number])]
    return (*line, (float(points.ranks[target] * step), y[target]))


def path_of(depends_on: Mapping[str, Sequence[str]], name: str) -> set[str]:
    """Return a box with all that it depends on and all that depends on it."""
    behind: dict[str, list[str]] = {}
    for target, deps in depends_on.items():
        for source in deps:
            behind.setdefault(source, []).append(target)
    found = {name}
    for neighbours in (depends_on, behind):
        todo = [name]
        while todo:
            new = set(neighbours.get(todo.pop(), ())) - found
            found |= new
            todo += new
    return found
