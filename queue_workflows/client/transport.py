"""Describe requests to the service, repeat them, and read responses, streams and errors."""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import httpx

import queue_workflows
from queue_workflows import errors
from queue_workflows.requests.catalog import Event, Stream
from queue_workflows.requests.request import Call, Request
from queue_workflows.runtime import masking, trace_context

T = TypeVar("T")
Got: TypeAlias = "httpx.Response | httpx.HTTPError | httpx.InvalidURL"
"""A response, or why there is none."""
TOKEN: Final = "QUEUE_WORKFLOWS_TOKEN"  # noqa: S105  the name of a variable
TIMEOUT_S: Final = 10.0
RETRIES: Final = 3
PAUSE_FIRST_S: Final = 0.2
PAUSE_MAX_S: Final = 10.0
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors of requests that the service has not seen."""
_AGAIN: Final = frozenset({408, 429, 502, 503, 504})


class Connection(NamedTuple):
    """Where the service is and how it is called."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    retries: int


def connection(url: str, token: str | None, timeout_s: float, retries: int) -> Connection:
    """Return checked arguments; the default `token` is QUEUE_WORKFLOWS_TOKEN (`InvalidConfig`)."""
    if timeout_s <= 0 or retries < 0:
        raise errors.InvalidConfig("timeout_s must be above 0, and retries at least 0")
    agent = f"queue_workflows/{queue_workflows.__version__}"
    headers = {"accept": "application/json", "user-agent": agent}
    chosen = os.environ.get(TOKEN) if token is None else token
    if chosen:
        if not chosen.isascii() or not chosen.isprintable() or " " in chosen:
            raise errors.InvalidConfig(
                "the token has a space or another character that no token has: copy it again"
            )
        headers["authorization"] = f"Bearer {chosen}"
    return Connection(url.rstrip("/"), headers, timeout_s, retries)


def exchange(
    conn: Connection, client: Any, asked: Request[T]
) -> Generator[httpx.Request | float, Got | None, T]:
    """Yield requests, each answered by a sent `Got`, and pauses in seconds; return the result."""
    steps, found = asked.steps(), None
    while True:
        try:
            call = steps.send(found)
        except StopIteration as end:
            return end.value
        tries, after_s = 0, 0.0
        got: Any = None
        while after_s is not None:
            tries += 1
            got = yield request(conn, client, call)
            if (after_s := pause_s(conn, call, tries, got)) is not None:
                yield after_s
        found = read(conn, call, got)


def request(conn: Connection, client: Any, call: Call[Any]) -> httpx.Request:
    """Return the request of a call. Raises `InvalidPayload` for a body that JSON cannot hold."""
    headers = {**conn.headers}
    headers |= trace_context.with_current(None) or {}
    content = None
    if call.body is not None:
        try:
            content = json.dumps(call.body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise errors.InvalidPayload(f"it cannot be sent as JSON: {error}") from None
        headers["content-type"] = "application/json"
    query = {name: value for name, value in call.query.items() if value is not None}
    timeout = httpx.Timeout(conn.timeout_s, read=conn.timeout_s + call.wait_s)
    try:
        return client.build_request(
            call.method,
            conn.url + call.path,
            params=query,
            content=content,
            headers=headers,
            timeout=timeout,
        )
    except httpx.InvalidURL as error:
        raise of_transport(conn, error) from None


def read(conn: Connection, call: Call[T], got: Got) -> T:
    """Return the result in a response; raise its error, or the reason why there is none."""
    if not isinstance(got, httpx.Response):
        raise of_transport(conn, got)
    if not got.is_success:
        error = of_response(got)
        if call.missing and isinstance(error, errors.UnknownJob):
            return call.read(None)
        raise error
    try:
        return call.read(json.loads(got.content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.ServiceFailed(
            f"{call.method} {call.path}: the response is not that of the service: "
            f"{type(error).__name__}"
        ) from None


def pause_s(conn: Connection, call: Call[Any], tries: int, got: Got) -> float | None:
    """Return after how many seconds a call is repeated, or None if its result counts.

    A request that the service may have carried out is repeated only if it is `repeatable`.
    """
    if tries > conn.retries:
        return None
    if isinstance(got, httpx.Response):
        if got.status_code not in _AGAIN or not call.repeatable:
            return None
        given = got.headers.get("retry-after", "")
        if given.isascii() and given.isdigit() and len(given) < 6:
            return min(float(given), PAUSE_MAX_S)
    elif isinstance(got, (httpx.UnsupportedProtocol, httpx.InvalidURL)) or (
        not call.repeatable and not isinstance(got, _UNSENT)
    ):
        return None
    longest = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**tries)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  jitter


# --- streams -----------------------------------------------------------------------------------

_EVENTS: Final = "text/event-stream"
MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one event."""
RETRY_S: Final = 2.0
RETRY_MAX_S: Final = 60.0
REMEMBERED: Final = 10_000
"""Ids of events that are not returned again when a stream is resumed."""
SILENCE_S: Final = 60.0
"""A stream that was silent for so long is opened again; the service sends sooner."""


class Parser:
    """Makes events of the bytes of a stream."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._buffer = b""
        self._kind = ""
        self._id = ""
        self._data: list[str] = []
        self._size = 0
        self.retry_s = retry_s
        """How long to wait before the stream is opened again."""

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events that are complete now. Raises `ServiceFailed` for one over MAX_BYTES."""
        self._buffer += received
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if (event := self._line(line.removesuffix(b"\r"))) is not None:
                yield event
        if len(self._buffer) + self._size > MAX_BYTES:
            raise errors.ServiceFailed(f"an event of more than {MAX_BYTES:,} bytes")

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._end()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._size += len(line)
        elif name == "event":
            self._kind = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit() and len(value) < 9:
            self.retry_s = min(int(value) / 1000, RETRY_MAX_S)
        return None

    def _end(self) -> Event | None:
        text, kind = "\n".join(self._data), self._kind
        self._data, self._kind, self._size = [], "", 0
        if not text:
            return None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise errors.ServiceFailed("an event is no JSON object: this is not the service")
        return Event(self._id, kind or "message", cast("dict[str, Any]", data))


class Follower:
    """The place in a stream that is reopened; raises `InvalidConfig` for an id that none has."""

    def __init__(self, stream: Stream[Any]) -> None:
        self.last_id = stream.last_id
        if self.last_id and not (self.last_id.isascii() and self.last_id.isprintable()):
            raise errors.InvalidConfig(f"no event has the id {self.last_id!r:.80}")
        call = stream.call(stream.read)
        self.path, self.query = call.path, call.query
        self._ends = stream.ends
        self.over = False
        """Whether the last event has come."""
        self.failures = 0
        """How often in a row it could not be opened, or was interrupted since it was opened."""
        self.parser = Parser()
        self._seen = OrderedDict[str, None]()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers with which the stream is opened."""
        found = {"accept": _EVENTS}
        return found if self.last_id is None else found | {"last-event-id": self.last_id}

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events that were not returned before."""
        for event in self.parser.feed(received):
            if self._ends and event.kind == "end":
                self.over = True
                return
            self.last_id = event.id or self.last_id
            key = f"{event.kind} {event.id} {event.data.get('run_id') or ''}"
            if event.id and key in self._seen:
                continue
            self._seen[key] = None
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            yield event


def opened(conn: Connection, follow: Follower) -> dict[str, Any]:
    """Return the request with which a stream is opened."""
    follow.parser = Parser(follow.parser.retry_s)  # without the rest of an interrupted stream
    return {
        "method": "GET",
        "url": conn.url + follow.path,
        "params": follow.query,
        "headers": {**conn.headers, **follow.headers},
        "timeout": httpx.Timeout(conn.timeout_s, read=SILENCE_S),
        "follow_redirects": False,
    }


def begins(response: httpx.Response) -> bool:
    """Return whether a response is a stream; raise `ServiceFailed` for another one that is OK."""
    kind = response.headers.get("content-type", _EVENTS)
    if response.is_success and not kind.startswith(_EVENTS):
        raise errors.ServiceFailed(f"a response of type {kind!r:.80}: this is not the service")
    return response.is_success


def reopen(conn: Connection, follow: Follower, got: Got) -> None:
    """Note that a stream could not be read; raise the reason unless it is opened again."""
    if isinstance(got, httpx.Response):
        # The status decides, since a service without its database names that as the error.
        error, is_away = of_response(got), got.status_code in _AGAIN
    else:
        error = of_transport(conn, got)
        is_away = isinstance(error, errors.ServiceUnavailable)
    follow.failures += 1
    if not is_away or follow.failures > conn.retries:
        raise error from None


# --- errors ------------------------------------------------------------------------------------

_PREFIX: Final = "urn:queue-workflows:"
DETAIL_CHARACTERS: Final = 2000
_OTHERS: Final[Mapping[str, type[errors.QueueWorkflowsError]]] = {
    "not-retried": errors.InvalidConfig,
    "not-ready": errors.ServiceUnavailable,
    "too-far-behind": errors.EventsLost,
    "invalid": errors.RequestRefused,
    "internal-error": errors.ServiceFailed,
}
"""Types of problems that are not the name of a class of `errors`."""
_STATUSES: Final[Mapping[int, type[errors.QueueWorkflowsError]]] = {
    **dict.fromkeys((401, 403), errors.AccessDenied),
    **dict.fromkeys((408, 429, 502, 503, 504), errors.ServiceUnavailable),
}


def of_response(response: httpx.Response) -> errors.QueueWorkflowsError:
    """Return the error that a response reports. The caller has read its body.

    If the response names the class that the service raised, use it; else choose by the status.
    """
    document = _document(response)
    given = str(document.get("detail") or document.get("title") or response.reason_phrase)
    shown = masking.mask(given)[:DETAIL_CHARACTERS] or "no reason given"
    text = f"{shown} (HTTP {response.status_code})"
    kind = document.get("type")
    name = kind.removeprefix(_PREFIX) if isinstance(kind, str) else ""
    status = response.status_code
    default = errors.ServiceFailed if status >= 500 or status < 400 else errors.RequestRefused
    found = _leaves().get(name) or _OTHERS.get(name) or _STATUSES.get(status, default)
    if issubclass(found, errors.IdempotencyClash):
        existing = document.get("existing")
        members = cast("dict[str, Any]", existing) if isinstance(existing, dict) else {}
        return found(text, str(members.get("job_id") or ""))
    return found(text)


def _document(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


@functools.cache
def _leaves() -> dict[str, type[errors.QueueWorkflowsError]]:
    """Return the classes of errors by the name that the service gives them."""
    base = errors.QueueWorkflowsError
    return {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower(): kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
        and not issubclass(kind, errors.JobSignal)
    }  # fmt: skip


def of_transport(
    conn: Connection, error: httpx.HTTPError | httpx.InvalidURL
) -> errors.QueueWorkflowsError:
    """Return the error of a request that got no response."""
    text = masking.mask(str(error) or type(error).__name__)[:DETAIL_CHARACTERS]
    if isinstance(error, httpx.InvalidURL):
        text = text.partition(": ")[0]  # A password may be in the place of the port.
    if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol)):
        return errors.InvalidConfig(f"the service's URL cannot be used: {text}")
    return errors.ServiceUnavailable(
        f"the service at {masking.mask(conn.url)} does not answer: {text}"
    )
