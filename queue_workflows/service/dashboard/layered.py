"""Lay out a graph in ranks from left to right, with few crossings and straight long edges.

After K. Sugiyama, S. Tagawa and M. Toda, "Methods for Visual Understanding of Hierarchical System
Structures", IEEE Transactions on Systems, Man, and Cybernetics 11 (2), 1981: ranks, dummy points
where an edge passes a rank, then an order by barycentres. The heights are the nearest to these by
least squares that keep the order and the distances, found by pooling adjacent violators (R. E.
Barlow and others, "Statistical Inference under Order Restrictions", 1972).
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
"""Weight of a dummy point against a box: a bent long edge is worse than a box aside."""
_SWEEPS: Final = 3
"""How many sweeps to and fro; the one with the fewest crossings counts."""
_Edge = tuple[int, int]


class Box(NamedTuple):
    """The left upper corner of a box."""

    x: float
    y: float


class Edge(NamedTuple):
    """An edge with the points that it passes; straight where it passes a rank, curved between."""

    source: str
    target: str
    points: Sequence[tuple[float, float]]
    path: str
    """The points as the attribute `d` of SVG."""


class Drawing(NamedTuple):
    """The boxes by name, and all edges."""

    width: float
    height: float
    boxes: dict[str, Box]
    edges: list[Edge]


def draw(depends_on: Mapping[str, Iterable[str]]) -> Drawing:
    """Return the drawing of a graph, given the dependencies of each box.

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
    layout = _Layout(len(names), given)
    boxes = {
        name: Box(float(rank * (WIDTH + GAP_X)), round(middle - HEIGHT / 2, 1))
        for name, rank, middle in zip(names, layout.ranks, layout.y, strict=False)
    }
    lines = [layout.line(source, target) for source, target in given]
    edges = [
        Edge(names[source], names[target], line, _path(line))
        for (source, target), line in zip(given, lines, strict=True)
    ]
    width = max((box.x + WIDTH for box in boxes.values()), default=0.0)
    height = max((at + layout.half(n) for n, at in enumerate(layout.y)), default=0.0)
    return Drawing(width, round(height, 1), boxes, edges)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a line as the attribute `d` of SVG, in steps, which are shorter than places."""
    x, y = map(round, points[0])
    parts = [f"M{x} {y}"]
    for number, point in enumerate(points[1:]):
        right, down = round(point[0]) - x, round(point[1]) - y
        if not down:
            parts.append(f"h{right}")
        elif number % 2:
            parts.append(f"l{right} {down}")
        else:
            parts.append(f"c{right // 2} 0 {right // 2} {down} {right} {down}")
        x, y = x + right, y + down
    return "".join(parts)


class _Layout:
    """The points of the ranks by their numbers: first the boxes, behind them the dummy points."""

    def __init__(self, boxes: int, given: Sequence[_Edge]) -> None:
        self.boxes = boxes
        self.ranks = _ranks(boxes, given)
        self.before: list[list[int]] = [[] for _ in range(boxes)]
        self.behind: list[list[int]] = [[] for _ in range(boxes)]
        self.passed: dict[_Edge, list[int]] = {}
        """The dummy points of each long edge."""
        self._connect(dict.fromkeys(map(self._forward, given)))
        self.y = [0.0] * len(self.ranks)
        """The middle of each point from the top, which is 0."""
        self._arrange()

    def half(self, number: int, gap: float = 0.0) -> float:
        """Return half of the height of a point, a box with a gap."""
        return (HEIGHT + gap) / 2 if number < self.boxes else _DUMMY

    def line(self, source: int, target: int) -> list[tuple[float, float]]:
        """Return the points of an edge, from the right side of a box to the left of the other.

        It passes the ranks between on the height of its dummy points, beside their boxes.
        """
        first, last = edge = self._forward((source, target))
        line: list[tuple[float, float]] = []
        for number in (first, *self.passed.get(edge, ()), last):
            x, y = float(self.ranks[number] * (WIDTH + GAP_X)), self.y[number]
            line += [(x, y), (x + WIDTH, y)]
        # It excludes the left side of the first box and the right side of the last.
        return line[1:-1] if first == source else line[-2:0:-1]

    def _forward(self, edge: _Edge) -> _Edge:
        source, target = edge
        return edge if self.ranks[source] < self.ranks[target] else (target, source)

    def _connect(self, edges: Iterable[_Edge]) -> None:
        """Connect the ranks by dummy points, which the edges of one source share.

        Without a limit some hundred boxes that all depend on each other would have millions.
        """
        chains: dict[int, list[int]] = {}
        left = _DUMMIES
        by_length = sorted(edges, key=lambda edge: self.ranks[edge[1]] - self.ranks[edge[0]])
        for source, target in by_length:
            needed = self.ranks[target] - self.ranks[source]
            chain = chains.setdefault(source, [source])
            if needed - len(chain) > left:
                continue
            while len(chain) < needed:
                number = len(self.ranks)
                self.ranks.append(self.ranks[source] + len(chain))
                self.before.append([chain[-1]])
                self.behind.append([])
                self.behind[chain[-1]].append(number)
                chain.append(number)
                left -= 1
            self.before[target].append(chain[needed - 1])
            self.behind[chain[needed - 1]].append(target)
            self.passed[source, target] = chain[1:needed]

    def _arrange(self) -> None:
        """Set the height of each point: sweep to and fro, to the middle of its neighbours.

        The order comes from the last sweep with the fewest crossings. Two more sweeps keep it.
        """
        layers: list[list[int]] = [[] for _ in range(max(self.ranks, default=-1) + 1)]
        for number, rank in enumerate(self.ranks):
            layers[rank].append(number)
        nowhere: list[list[int]] = [[] for _ in self.ranks]
        both = [before + behind for before, behind in zip(self.before, self.behind, strict=True)]
        best, fewest = self.y, None
        for step, neighbours in enumerate([nowhere, *(self.before, self.behind) * _SWEEPS]):
            for layer in layers if step % 2 else reversed(layers):
                self._place(layer, neighbours, sorts=True)
            crossings = sum(map(self._crossings, layers))
            if fewest is None or crossings <= fewest:
                best, fewest = [*self.y], crossings
        self.y = best
        for step in range(2):
            for layer in layers if step % 2 else reversed(layers):
                layer.sort(key=self.y.__getitem__)
                self._place(layer, both, sorts=False)
        top = min((at - self.half(n) for n, at in enumerate(self.y)), default=0.0)
        self.y = [round(at - top, 1) for at in self.y]

    def _crossings(self, layer: Sequence[int]) -> int:
        """Return how many edges from a layer to the next cross: the inversions of their ends."""
        found, ends = 0, list[float]()
        for number in layer:
            targets = [self.y[target] for target in self.behind[number]]
            found += sum(len(ends) - bisect.bisect_right(ends, target) for target in targets)
            for target in targets:
                bisect.insort(ends, target)
        return found

    def _place(self, layer: list[int], neighbours: Sequence[Sequence[int]], *, sorts: bool) -> None:
        """Put each point of a layer to the middle of its neighbours, or next to it, apart."""
        y = self.y
        wanted = {
            n: sum(y[m] for m in near) / len(near) if (near := neighbours[n]) else y[n]
            for n in layer
        }
        if sorts:
            layer.sort(key=wanted.__getitem__)
        offsets: list[float] = []
        offset = last_half = 0.0
        blocks: list[tuple[float, float, int]] = []
        for number in layer:
            half = self.half(number, GAP_Y)
            offset += last_half + half
            last_half = half
            offsets.append(offset)
            mass, count = 1.0 if number < self.boxes else _STRAIGHT, 1
            total = (wanted[number] - offset) * mass
            while blocks and blocks[-1][0] * mass >= total * blocks[-1][1]:
                other, other_mass, other_count = blocks.pop()
                total, mass, count = total + other, mass + other_mass, count + other_count
            blocks.append((total, mass, count))
        means = [total / mass for total, mass, count in blocks for _ in range(count)]
        for number, mean, offset in zip(layer, means, offsets, strict=True):
            y[number] = mean + offset


def _ranks(count: int, edges: Iterable[_Edge]) -> list[int]:
    """Return the longest way to each box; sources are moved close to the boxes behind them.

    A cycle begins with its first box, so that few edges lead backwards.
    """
    around: list[dict[int, None]] = [{} for _ in range(count)]
    behind: list[list[int]] = [[] for _ in range(count)]
    left = [0] * count
    for source, target in edges:
        around[source][target] = around[target][source] = None
        behind[source].append(target)
        left[target] += 1
    ranks, order = [-1] * count, list[int]()
    ready = deque(number for number in range(count) if not left[number])
    rest = iter(range(count))
    while len(order) < count:
        if not ready:  # every box that is left waits for a cycle
            ready.append(next(number for number in rest if ranks[number] < 0))
        number = ready.popleft()
        if ranks[number] >= 0:
            continue
        ranks[number] = 1 + max((ranks[other] for other in around[number]), default=-1)
        order.append(number)
        for target in behind[number]:
            left[target] -= 1
            if not left[target]:
                ready.append(target)
    for number in reversed(order):
        later = [ranks[other] for other in around[number] if ranks[other] > ranks[number]]
        if 2 * len(later) > len(around[number]):
            ranks[number] = min(later) - 1
    return ranks


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
