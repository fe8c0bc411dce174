"""An app whose workflow takes, and passes on, a value of every documented type."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import typing
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, Generic, NamedTuple, NewType, TypedDict

import pydantic

from queue_workflows import node, workflow

T = typing.TypeVar("T")
UserId = NewType("UserId", uuid.UUID)
DAY = datetime.date(2026, 3, 1)
ZONE = datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))
AT = datetime.datetime(2026, 3, 1, 10, 0, 0, 120, ZONE)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


class Colour(enum.Enum):
    RED = "red"
    DEEP = (1, 2)
    DAY = DAY


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Span:
    first: datetime.date
    days: int = 1
    last: datetime.date | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.days < 0:
            raise KeyError("days")


@dataclasses.dataclass
class Tree:
    at: datetime.date
    children: list[Tree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Box(Generic[T]):
    content: T
    more: list[T] = dataclasses.field(default_factory=list)


class Price(NamedTuple):
    amount: Decimal
    on: datetime.date


class Part(TypedDict, total=False):
    note: str


class Line(Part):
    price: Decimal
    on: datetime.date


class Order(pydantic.BaseModel):
    day: datetime.date
    price: Decimal


def late() -> Span:
    made = Span(DAY)
    made.last = DAY
    return made


class Case(NamedTuple):
    """An annotation as it is written, a value of it, and how that is stored."""

    annotation: str
    value: Any
    stored: Any


CASES = {
    "text": Case("str", "a", "a"),
    "digits": Case("str", "0123", "0123"),
    "flag": Case("bool", True, True),
    "number": Case("int", 2**70, 2**70),
    "share": Case("float", 0.1, 0.1),
    "large": Case("float", 1e16, 1e16),
    "nothing": Case("None", None, None),
    "record": Case("dict", {"a": 1}, {"a": 1}),
    "listed": Case("list", [1, "a"], [1, "a"]),
    "bare_tuple": Case("tuple", (1, "a"), [1, "a"]),
    "old_list": Case("typing.List", [1], [1]),
    "old_dict": Case("typing.Dict", {"a": 1}, {"a": 1}),
    "old_tuple": Case("typing.Tuple", (1,), [1]),
    "sequence": Case("Sequence[datetime.date]", [DAY], ["2026-03-01"]),
    "iterable": Case("Iterable[Decimal]", [Decimal("1.10")], ["1.10"]),
    "mapping": Case("Mapping[str, datetime.date]", {"a": DAY}, {"a": "2026-03-01"}),
    "anything": Case("Any", {"a": [1]}, {"a": [1]}),
    "day": Case("datetime.date", DAY, "2026-03-01"),
    "at": Case("datetime.datetime", AT, "2026-03-01T10:00:00.000120-05:30"),
    "clock": Case("datetime.time", datetime.time(10, 30), "10:30:00"),
    "day_or_at": Case("datetime.datetime | datetime.date", DAY, "2026-03-01"),
    "at_or_day": Case("datetime.date | datetime.datetime", AT, "2026-03-01T10:00:00.000120-05:30"),
    "day_or_none": Case("Optional[datetime.date]", DAY, "2026-03-01"),
    "days": Case("list[datetime.datetime | datetime.date]", [DAY], ["2026-03-01"]),
    "key": Case("uuid.UUID", ID, str(ID)),
    "user": Case("UserId", ID, str(ID)),
    "file": Case("Path", Path("a/b"), "a/b"),
    "pure": Case("PurePosixPath | None", PurePosixPath("a/b"), "a/b"),
    "price": Case("Decimal", Decimal("1.10"), "1.10"),
    "huge": Case("Decimal", Decimal("12345678901234567.8900"), "12345678901234567.8900"),
    "price_or_none": Case("Decimal | None", Decimal("0.10"), "0.10"),
    "price_or_id": Case("Union[Decimal, uuid.UUID]", ID, str(ID)),
    "colour": Case("Colour", Colour.RED, "red"),
    "deep": Case("Colour", Colour.DEEP, [1, 2]),
    "dated": Case("Colour", Colour.DAY, "2026-03-01"),
    "level": Case("Level", Level.LOW, 1),
    "rights": Case("Right", Right.READ | Right.WRITE, 3),
    "choice": Case('Literal["a", 1, None]', "a", "a"),
    "chosen": Case("Literal[Colour.RED]", Colour.RED, "red"),
    "span": Case("Span", Span(DAY, 2), {"first": "2026-03-01", "days": 2, "last": None}),
    "late": Case("Span", late(), {"first": "2026-03-01", "days": 1, "last": "2026-03-01"}),
    "spans": Case("dict[str, list[Span]]", {"a": [late()]},
                  {"a": [{"first": "2026-03-01", "days": 1, "last": "2026-03-01"}]}),
    "tree": Case("Tree", Tree(DAY, [Tree(DAY)]),
                 {"at": "2026-03-01", "children": [{"at": "2026-03-01", "children": []}]}),
    "trees": Case('list["Tree"]', [Tree(DAY)], [{"at": "2026-03-01", "children": []}]),
    "old_trees": Case('typing.List["Tree"]', [Tree(DAY)], [{"at": "2026-03-01", "children": []}]),
    "tree_by_key": Case('dict[str, "Tree | None"]', {"a": Tree(DAY)},
                        {"a": {"at": "2026-03-01", "children": []}}),
    "box": Case("Box[datetime.date]", Box(DAY, [DAY]),
                {"content": "2026-03-01", "more": ["2026-03-01"]}),
    "named": Case("Price", Price(Decimal("1.10"), DAY), ["1.10", "2026-03-01"]),
    "line": Case("Line", {"on": DAY, "note": "x", "price": Decimal("1.10")},
                 {"price": "1.10", "on": "2026-03-01", "note": "x"}),
    "order": Case("Order", Order(day=DAY, price=Decimal("2.50")),
                  {"day": "2026-03-01", "price": "2.50"}),
    "pair": Case("tuple[datetime.date, Decimal]", (DAY, Decimal("1.10")), ["2026-03-01", "1.10"]),
    "ids": Case("tuple[uuid.UUID, ...]", (ID, ID), [str(ID)] * 2),
    "by_id": Case("dict[uuid.UUID, int]", {ID: 1}, {str(ID): 1}),
    "noted": Case('Annotated[datetime.date, "a note"]', DAY, "2026-03-01"),
}  # fmt: skip
"""Every annotation that docs/nodes.md names, and its neighbours."""

NEVER = {
    "octets": "bytes", "numbers": "set[int]", "frozen": "frozenset[str] | None",
    "length": "datetime.timedelta", "call": "Callable[[], int]", "complex_": "complex",
    "by_number": "dict[int, str]", "hidden": "NotHere", "hidden_inside": 'list["NotHere"]',
    "spans": "list[bytes]",
}  # fmt: skip
"""Annotations of which no input can be a value; `NotHere` is what only a type checker knows."""

received: list[dict[str, Any]] = []


HEAD = """
from __future__ import annotations
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Union
from queue_workflows import OFFERED
"""


def taking(kinds: Mapping[str, str], body: str, head: str = "") -> Callable[..., Any]:
    """Return a function with these parameters and postponed annotations."""
    listed = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
    source = f"{HEAD}\ndef made({listed}{head}):\n    {body}\n"
    exec(compile(source, __file__, "exec"), space := dict(globals()))
    return space["made"]


GIVEN = {key: case.stored if key == "by_id" else case.value for key, case in CASES.items()}
"""The values as Python gives them; the keys of a JSON object are texts."""
STORED = {key: case.stored for key, case in CASES.items()}
KINDS = {key: case.annotation for key, case in CASES.items()}
keep = node(name="typed.keep")(
    taking(KINDS, 'received.append(got := {k: v for k, v in locals().items() if k != "out"});'
           ' (out / "got.txt").write_text("\\n".join(f"{k} {v!r}" for k, v in got.items()))',
           ", *, out: Path = OFFERED")
)  # fmt: skip


@node(name="typed.make")
def make() -> dict[str, Any]:
    return GIVEN


every = workflow(name="every")(taking(KINDS, "keep(**locals())"))


@workflow
def between() -> None:
    made: Any = make()
    keep(**{key: made[key] for key in CASES})


@workflow
def above() -> None:
    made: Any = make()
    every(**{key: made[key] for key in CASES})


@dataclasses.dataclass
class Entry:
    name: str
    at: datetime.date | datetime.datetime
    price: Decimal
    trees: list[Tree]


ENTRIES = [Entry("a", DAY, Decimal("1.10"), [Tree(DAY)]), Entry("b", AT, Decimal(0), [])]


@node(name="typed.several")
def several() -> list[Entry]:
    return ENTRIES


@node(name="typed.each")
def each(entry: Entry) -> None:
    received.append({"entry": entry})


@workflow
def mapped() -> None:
    each.map(several(), key="name")


APP = (keep, make, every, between, above, several, each, mapped)
