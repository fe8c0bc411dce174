"""Define the description of an operation: its fields, route, noun and response."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar, cast
from urllib.parse import quote

from queue_workflows import errors
from queue_workflows.types import JsonDict

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Any:
        return lambda made: made


T = TypeVar("T")
Item = TypeVar("Item")
PAGE: Final = 1000
"""The largest page of a list."""
PREFIX: Final = "/api/v1/"


class Call(NamedTuple, Generic[T]):
    """A request over HTTP, and how its response is read."""

    method: str
    path: str
    read: Callable[[Any], T]
    """Takes the response's JSON."""
    query: Mapping[str, Any] = {}
    body: Any = None
    repeatable: bool = True
    """Whether a second request changes nothing that the first one has not."""
    wait_s: float = 0.0
    """How long the service may take on request."""
    missing: bool = False
    """Whether a thing that does not exist is None, and no error."""


Steps = Generator[Call[Any], Any, T]
"""The calls that a client makes one after the other; it sends in what each returns."""


class Route(NamedTuple):
    """How an operation is called over HTTP."""

    method: str
    path: str
    """Below PREFIX if it does not begin with a slash, with the names of fields in braces."""
    name: str
    """The name of the operation in the OpenAPI document."""
    body: str
    """The name of its body in the OpenAPI document, "" without a body."""
    once: bool
    """Whether a client must not repeat it; with an idempotency key it may."""
    refuses: tuple[int, ...]
    """Its error statuses besides the ones of every route."""


class Keep:
    """The default of an argument that leaves a setting unchanged."""


KEEP: Final = Keep()
SAME: Final = object()


@dataclass(frozen=True)
class Field:
    """How a field is sent over HTTP, its bounds, and what it means."""

    help: str = ""
    name: str = ""
    """Its name over HTTP, if that differs."""
    kind: Any = None
    """Its type over HTTP, if that differs."""
    default: Any = SAME
    """Its default over HTTP, if that differs, or a function that returns the default."""
    strict: bool = False
    header: bool = False
    """Whether it is a header, which is not sent with the call."""
    send: Callable[[Any], Any] | None = None
    """Converts a Python value into the value that a client sends."""
    take: Callable[[Any], Any] | None = None
    """Converts the value that the service receives into the Python value."""
    metavar: str = ""
    """What stands for its value in the usage of a command."""
    forms: str = ""
    """The accepted forms of the command-line argument; its help text shows them after `help`."""
    parse: Callable[[str], Any] | None = None
    """Converts a command-line argument into the Python value."""
    bounds: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`min_length`, `max_length`, `ge`, `gt`, `le`, `examples`, as pydantic has them."""


def text(help_: str = "", most: int = 1000, **more: Any) -> Field:
    """Return a field with a text of at most so many characters; "" is none."""
    bounds = {"min_length": 1, "max_length": most} | more.pop("bounds", {})
    return Field(help_, bounds=bounds, **more)


@dataclass(frozen=True)
class Request(Generic[T]):
    """An operation, its fields being what it takes; a client's method returns `T`.

    The first paragraph of its docstring is the text of the OpenAPI document.
    """

    route: ClassVar[Route]
    noun: ClassVar[str] = ""
    """The public function that does it, such as `queues.pause`."""
    missing: ClassVar[bool] = False
    """Whether a thing that does not exist is None, and no error."""

    @classmethod
    def summary(cls) -> str:
        """Return the first paragraph of its docstring."""
        return inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]

    def run(self, **more: Any) -> Any:
        """Do it, and return what the noun returns, which raises.

        `more`: arguments of the noun that are no fields.
        """
        module, _, name = self.noun.rpartition(".")
        function = getattr(importlib.import_module(f"queue_workflows.{module}"), name)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        given = {name: value for name, value in given.items() if value is not KEEP}
        first = [given.pop(name) for name in placed(type(self))]
        return function(*first, **given, **more)

    def read(self, found: Any) -> T:
        """Return the result in a response; raise TypeError or KeyError for an unknown form."""
        raise NotImplementedError

    def steps(self) -> Steps[T]:
        """Yield the calls of a client, receive the result of each, and return the final result."""
        return (yield self.call(self.read))

    def call(self, read: Callable[[Any], Any], *, wait_s: float = 0.0, **more: Any) -> Call[Any]:
        """Return the request of a client; `more`: further members of its query.

        Raises `InvalidConfig` for what no path can have.
        """
        sent, where = dict[str, Any](), self.path()
        in_path = placed(type(self))
        for each in fields(self):
            value, mark = getattr(self, each.name), marks(type(self))[each.name]
            # None is no member; another default counts where the service has another one.
            is_own = value is each.default and (value is None or mark.default is SAME)
            if each.name not in in_path and not is_own and not mark.header:
                sent[mark.name or each.name] = mark.send(value) if mark.send else value
        posts = self.route.method == "POST"
        repeatable = not self.route.once or sent.get("idempotency_key") is not None
        return Call(
            self.route.method,
            where,
            read,
            query={} if posts else sent | more,
            body=sent if posts and self.route.body else None,
            repeatable=repeatable,
            wait_s=wait_s,
            missing=self.missing,
        )

    def path(self) -> str:
        """Return its path; each value is one segment, whatever it holds. Raises `InvalidConfig`."""
        found = self.route.path.replace(":path", "")
        for name in placed(type(self)):
            found = found.replace(f"{{{name}}}", _segment(getattr(self, name)))
        return found if found.startswith("/") else PREFIX + found


R = TypeVar("R", bound=Request[Any])
OPERATIONS: Final[list[type[Request[Any]]]] = []
"""The classes that `operation` has made."""


@dataclass_transform(frozen_default=True)
def operation(
    route: str,
    noun: str = "",
    *,
    name: str = "",
    body: str = "",
    once: bool = False,
    refuses: tuple[int, ...] = (),
) -> Callable[[type[R]], type[R]]:
    """Return what makes a class the description of an operation: a frozen dataclass.

    `route`: `POST queues/{queue}/pause`. `noun`: the public function. The others are those of
    `Route`; the default name is the path's end.
    """
    method, _, path = route.partition(" ")
    last = "list_" if method == "GET" and "/" not in path else path.rpartition("/")[2]
    chosen = name or ("show" if last.endswith("}") else last)

    def made(kind: type[R]) -> type[R]:
        kind.route = Route(method, path, chosen, body, once, refuses)
        kind.noun = noun
        OPERATIONS.append(kind)
        return dataclass(frozen=True)(kind)

    return made


def _segment(value: Any) -> str:
    if not isinstance(value, str) or value in ("", ".", ".."):
        raise errors.InvalidConfig(f"{value!r:.80} cannot be a part of a path")
    try:
        return quote(value, safe="")
    except UnicodeEncodeError:
        raise errors.InvalidConfig("a part of the path has characters that are no text") from None


@functools.cache
def placed(kind: type[Request[Any]]) -> tuple[str, ...]:
    """Return the names of the fields that are in the path."""
    parts = kind.route.path.split("{")[1:]
    return tuple(part.partition("}")[0].partition(":")[0] for part in parts)


@functools.cache
def marks(kind: type[Request[Any]]) -> dict[str, Field]:
    """Return the description of each field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Field] = {}
    for name in (each.name for each in fields(kind)):
        given = getattr(hints[name], "__metadata__", ())
        found[name] = next((each for each in given if isinstance(each, Field)), Field())
    return found


# --- kinds of responses -------------------------------------------------------------------------


def row(found: Any) -> JsonDict:
    """Return the response if it is a JSON object; else raise TypeError."""
    if not isinstance(found, dict):
        raise TypeError
    return cast("JsonDict", found)


class Row(Request[JsonDict]):
    """It returns a row."""

    def read(self, found: Any) -> JsonDict:
        return row(found)


class RowOrNone(Request["JsonDict | None"]):
    """It returns a row, or None if there is none."""

    missing = True

    def read(self, found: Any) -> JsonDict | None:
        return None if found is None else row(found)


class Items(Request["list[JsonDict]"]):
    """It returns all rows of a list, which is the member `items` of the response."""

    member: ClassVar[str] = "items"

    def read(self, found: Any) -> list[JsonDict]:
        return [*row(found)[self.member]]


class Pages(Request["list[Item]"], Generic[Item]):
    """It returns the first items of a list, up to its field `limit`, a page at a time."""

    member: ClassVar[str] = "items"

    def steps(self) -> Steps[list[Item]]:
        limit: int = getattr(self, "limit", sys.maxsize)
        cursor: str | None = getattr(self, "after", None)
        found: list[Item] = []
        while len(found) < limit:
            size = self.size(limit - len(found))
            items, cursor = yield self.call(self.page, limit=size, cursor=cursor)
            found += map(self.item, items)
            if cursor is None:
                break
        return found

    def page(self, found: Any) -> tuple[list[JsonDict], str | None]:
        """Return the rows of a page, and the cursor of the next one; None on the last."""
        members = row(found)
        return [*members[self.member]], members.get("next")

    def item(self, found: JsonDict) -> Item:
        """Return the item that a row becomes."""
        return cast("Item", found)

    def size(self, left: int) -> int:
        """Return the size of the next page, while so many items are left."""
        return min(left, PAGE)


# --- values over HTTP ---------------------------------------------------------------------------


def seconds(span: timedelta | float | None) -> float | None:
    """Return a time span as a number of seconds."""
    return span.total_seconds() if isinstance(span, timedelta) else span


def span(seconds: float | None) -> timedelta | None:
    """Return a number of seconds as a time span."""
    return None if seconds is None else timedelta(seconds=seconds)


def instant(at: datetime | timedelta | None) -> str | None:
    """Return a time as ISO 8601; of a time span, the time that long ago."""
    if isinstance(at, timedelta):
        at = datetime.now(timezone.utc) - at
    return None if at is None else at.isoformat()
