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
    """A request over HTTP, and the function that reads its response."""

    method: str
    path: str
    read: Callable[[Any], T]
    """Converts the response's JSON to the result."""
    query: Mapping[str, Any] = {}
    body: Any = None
    repeatable: bool = True
    """Whether repeating the request is harmless."""
    wait_s: float = 0.0
    """How long the service may wait before it answers, as the caller has requested."""
    missing: bool = False
    """Whether the result is None, instead of an error, if the object does not exist."""


Steps = Generator[Call[Any], Any, T]
"""Yields the calls that a client makes one after the other, and receives their results."""


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
    """Its error statuses besides the ones that every route has."""


class Keep:
    """The default of an argument that leaves a setting unchanged."""


KEEP: Final = Keep()
SAME: Final = object()


@dataclass(frozen=True)
class Field:
    """How a field is sent over HTTP, with its bounds and its help text."""

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
    """The placeholder for its value in the usage of a command."""
    forms: str = ""
    """The accepted forms of the command-line argument; its help text shows them after `help`."""
    parse: Callable[[str], Any] | None = None
    """Converts a command-line argument into the Python value."""
    bounds: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`min_length`, `max_length`, `ge`, `gt`, `le`, `examples`, as pydantic has them."""


def text(help_: str = "", most: int = 1000, **more: Any) -> Field:
    """Return a field for a text of 1 to `most` characters."""
    bounds = {"min_length": 1, "max_length": most} | more.pop("bounds", {})
    return Field(help_, bounds=bounds, **more)


@dataclass(frozen=True)
class Request(Generic[T]):
    """An operation, whose fields are its arguments; a client's method returns `T`.

    The first paragraph of a subclass's docstring is used in the OpenAPI document.
    """

    route: ClassVar[Route]
    noun: ClassVar[str] = ""
    """The public function that carries it out, such as `queues.pause`."""
    missing: ClassVar[bool] = False
    """Whether the result is None, instead of an error, if the object does not exist."""

    @classmethod
    def summary(cls) -> str:
        """Return the first paragraph of its docstring."""
        return inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]

    def run(self, **more: Any) -> Any:
        """Call the noun with the fields; return its result, and raise its errors.

        `more` has further arguments of the noun.
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
        """Yield the calls of a client, receive their results, and return the final result."""
        return (yield self.call(self.read))

    def call(self, read: Callable[[Any], Any], *, wait_s: float = 0.0, **more: Any) -> Call[Any]:
        """Return the request of a client; `more` has further members of its query.

        Raises `InvalidConfig` for a value that cannot be part of a path.
        """
        sent, where = dict[str, Any](), self.path()
        in_path = placed(type(self))
        for each in fields(self):
            value, mark = getattr(self, each.name), marks(type(self))[each.name]
            # None is not sent, nor is a default, unless the service has another default.
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
        """Return its path, in which each value is quoted as one segment. Raises `InvalidConfig`."""
        found = self.route.path.replace(":path", "")
        for name in placed(type(self)):
            found = found.replace(f"{{{name}}}", _segment(getattr(self, name)))
        return found if found.startswith("/") else PREFIX + found


R = TypeVar("R", bound=Request[Any])
OPERATIONS: Final[list[type[Request[Any]]]] = []
"""The classes that `operation` has decorated."""


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
    """Return a decorator that makes a class an operation, as a frozen dataclass.

    `route` is such as `POST queues/{queue}/pause`, `noun` the public function. For the other
    arguments see `Route`; the default name is the end of the path.
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
    """An operation that returns a row."""

    def read(self, found: Any) -> JsonDict:
        return row(found)


class RowOrNone(Request["JsonDict | None"]):
    """An operation that returns a row, or None if it does not exist."""

    missing = True

    def read(self, found: Any) -> JsonDict | None:
        return None if found is None else row(found)


class Items(Request["list[JsonDict]"]):
    """An operation that returns all rows of a list, the member `items` of the response."""

    member: ClassVar[str] = "items"

    def read(self, found: Any) -> list[JsonDict]:
        return [row(each) for each in row(found)[self.member]]


class Pages(Request["list[Item]"], Generic[Item]):
    """An operation that returns up to `limit` items of a list, requested page by page."""

    member: ClassVar[str] = "items"

    def steps(self) -> Steps[list[Item]]:
        limit: int = getattr(self, "limit", sys.maxsize)
        cursor: str | None = getattr(self, "after", None)
        found: list[Item] = []
        call = self.call(self.page)  # once, as a field may be an iterator
        while len(found) < limit:
            page = {"limit": self.size(limit - len(found)), "cursor": cursor}
            items, cursor = yield call._replace(query={**call.query, **page})
            found += items
            if cursor is None:
                break
        return found

    def page(self, found: Any) -> tuple[list[Item], str | None]:
        """Return the items of a page, and the cursor of the next one; None on the last."""
        members = row(found)
        return [self.item(row(each)) for each in members[self.member]], members.get("next")

    def item(self, found: JsonDict) -> Item:
        """Return the item for a row."""
        return cast("Item", found)

    def size(self, left: int) -> int:
        """Return the size of the next page if so many items are left."""
        return min(left, PAGE)


# --- values over HTTP ---------------------------------------------------------------------------


def seconds(span: timedelta | float | None) -> float | None:
    """Return a time span as a number of seconds."""
    return span.total_seconds() if isinstance(span, timedelta) else span


def span(seconds: float | None) -> timedelta | None:
    """Return a number of seconds as a time span."""
    return None if seconds is None else timedelta(seconds=seconds)


def instant(at: datetime | timedelta | None) -> str | None:
    """Return a time as ISO 8601; a time span means the time that long ago."""
    if isinstance(at, timedelta):
        at = datetime.now(timezone.utc) - at
    return None if at is None else at.isoformat()
