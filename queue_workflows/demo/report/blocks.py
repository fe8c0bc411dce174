"""The pieces that a report is made of, whatever it is rendered to."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """One line of a bar chart: its parts one after the other, and what to write beside it."""

    label: str
    parts: tuple[float, ...]
    value: str


class Bars(NamedTuple):
    """A bar chart from 0 to `whole`, which is that of the longest bar if it is None.

    A `legend` names the parts of the bars if they have several.
    """

    title: str
    bars: list[Bar]
    legend: tuple[str, ...] = ()
    whole: float | None = None

    @property
    def scale(self) -> float:
        """What the full width stands for; never 0."""
        return self.whole or max((sum(bar.parts) for bar in self.bars), default=0) or 1


class Columns(NamedTuple):
    """A histogram: labels of classes, and how many fall into each."""

    title: str
    labels: list[str]
    counts: list[int]
    axis: str


class Matrix(NamedTuple):
    """How often each of the names (rows) is linked to each (columns)."""

    title: str
    names: list[str]
    counts: list[list[int]]


class Point(NamedTuple):
    """A place on a map, both axes from 0 to 1; the area stands for the size."""

    label: str
    x: float
    y: float
    size: float


class Map(NamedTuple):
    """Points on a plane; those that come first are labelled first."""

    title: str
    points: list[Point]


class Table(NamedTuple):
    """Rows of text; the last `numbers` columns hold numbers."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: int = 0


class Notes(NamedTuple):
    """A list of sentences."""

    sentences: list[str]


Block = Bars | Columns | Matrix | Map | Table | Notes


def has_content(block: Block) -> bool:
    """Whether there is anything to show."""
    match block:
        case Bars():
            return bool(block.bars)
        case Columns():
            return any(block.counts)
        case Matrix():
            return bool(block.names)
        case Map():
            return bool(block.points)
        case Table():
            return bool(block.rows)
        case Notes():
            return bool(block.sentences)


class Section(NamedTuple):
    """A titled part: what it says in a sentence or two, and what shows it, none of it empty."""

    key: str
    title: str
    summary: str
    blocks: list[Block]


class Report(NamedTuple):
    """The whole. `tiles`: figures at the top, each a value and what it counts."""

    title: str
    folder: str
    summary: str
    tiles: list[tuple[str, str]]
    sections: list[Section]
