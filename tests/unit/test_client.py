"""The client of the HTTP service: errors, repeated requests, events and hostile replies."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from queue_workflows import client, errors
from tests.support import tabled

Handler = Callable[[httpx.Request], httpx.Response]
STATUS = {"job_id": "j", "status": "running"}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause of a client, which takes none."""
    taken: list[float] = []

    async def pause(seconds: float) -> None:
        taken.append(seconds)

    monkeypatch.setattr(time, "sleep", taken.append)
    monkeypatch.setattr(asyncio, "sleep", pause)
    return taken


def made(handler: Handler, **more: Any) -> client.Client:
    http = httpx.Client(transport=httpx.MockTransport(handler))
    return client.Client("http://service", token="t0ken", http=http, **more)


def replies(*given: httpx.Response | Exception) -> tuple[Handler, list[httpx.Request]]:
    """Replies in this order, and the requests that came."""
    left, seen = [*given], list[httpx.Request]()

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return handler, seen


def problem(status: int, kind: str = "", **members: Any) -> httpx.Response:
    document = {"type": f"urn:queue-workflows:{kind}" if kind else "about:blank", "detail": "why"}
    headers = {"content-type": "application/problem+json"}
    return httpx.Response(status, json=document | members, headers=headers)


def test_a_problem_is_the_error_that_the_python_api_raises() -> None:
    cases: list[Any] = [
        (404, "unknown-job", errors.UnknownJob),
        (404, "unknown-queue", errors.UnknownQueue),
        (404, "unknown-schedule", errors.UnknownSchedule),
        (422, "unknown-task", errors.UnknownTask),
        (422, "args-refused", errors.ArgsRefused),
        (422, "invalid-payload", errors.InvalidPayload),
        (422, "invalid-workflow", errors.InvalidWorkflow),
        (422, "invalid", errors.RequestRefused),
        (422, "not-a-class-of-ours", errors.RequestRefused),
        (409, "input-refused", errors.InputRefused),
        (422, "invalid-answer", errors.InvalidAnswer),
        (409, "not-retried", errors.InvalidConfig),
        (410, "too-far-behind", errors.EventsLost),
        (503, "database-unavailable", errors.DatabaseUnavailable),
        (503, "not-ready", errors.ServiceUnavailable),
        (500, "internal-error", errors.ServiceFailed),
        (401, "", errors.AccessDenied),
        (403, "", errors.AccessDenied),
        (413, "", errors.RequestRefused),
        (503, "", errors.ServiceUnavailable),
        (500, "", errors.ServiceFailed),
        (302, "", errors.ServiceFailed),
        # No class that only handlers raise, nor the base of all.
        (422, "retry", errors.RequestRefused),
        (422, "queue-workflows-error", errors.RequestRefused),
    ]
    for status, kind, raised in cases:
        with tabled.case(status, kind, raised):
            handler, _ = replies(problem(status, kind))
            with pytest.raises(raised, match="why") as caught:
                made(handler, retries=0).jobs.cancel("j")
            assert type(caught.value) is raised


def test_every_error_of_the_package_is_known_by_the_name_that_the_service_gives_it() -> None:
    def raised(name: str) -> type[Exception]:
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
        handler, _ = replies(problem(422, kind))
        with pytest.raises(errors.QueueWorkflowsError) as caught:
            made(handler).jobs.cancel("j")
        return type(caught.value)

    every = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}
    only_of_handlers = {name for name, each in every.items() if issubclass(each, errors.JobSignal)}
    assert only_of_handlers == {"JobSignal", "Retry", "Snooze", "Discard"}
    leaves = {n: each for n, each in every.items() if n not in only_of_handlers}
    del leaves["QueueWorkflowsError"]
    assert {name: raised(name) for name in leaves} == leaves


def test_every_error_of_the_package_is_the_builtin_that_apps_catch() -> None:
    for each in vars(errors).values():
        if not inspect.isclass(each):
            continue
        assert issubclass(each, errors.QueueWorkflowsError), each
        builtin = {kind for kind in each.__mro__ if kind.__module__ == "builtins"}
        if not issubclass(each, errors.JobSignal) and each is not errors.QueueWorkflowsError:
            assert builtin - {Exception, BaseException, object}, each


def test_a_clash_has_the_job_that_has_the_key() -> None:
    handler, _ = replies(problem(409, "idempotency-clash", existing={"job_id": "other"}))
    with pytest.raises(errors.IdempotencyClash) as caught:
        made(handler).jobs.enqueue("t", queue="q", lock_key="l", idempotency_key="k")
    assert caught.value.job_id == "other"


def test_a_reply_that_is_not_the_services_is_refused() -> None:
    cases: list[Any] = [
        httpx.Response(200, content=b""), httpx.Response(200, content=b"<html>"),
        httpx.Response(200, json=[]), httpx.Response(200, json={}), httpx.Response(200, json=None),
        httpx.Response(200, content=b"[" * 100_000), httpx.Response(204),
        httpx.Response(500, content=b"\xff\x00"), httpx.Response(500, content=b"[" * 100_000),
    ]  # fmt: skip
    for response in cases:
        with tabled.case(response):
            handler, _ = replies(response)
            with pytest.raises(errors.ServiceFailed):
                made(handler).jobs.enqueue("t", queue="q", lock_key="l")


def test_what_does_not_exist_is_none_as_in_the_python_api() -> None:
    handler, _ = replies(problem(404, "unknown-job"))
    assert made(handler).jobs.get("j") is None
    assert made(handler).runs.get("r") is None
    with pytest.raises(errors.UnknownJob):
        made(handler).jobs.status("j")


def test_another_404_is_not_taken_for_a_job_that_is_missing() -> None:
    handler, _ = replies(httpx.Response(404, content=b"<html>"))
    with pytest.raises(errors.RequestRefused):
        made(handler).jobs.get("j")


def test_a_request_has_the_token_the_body_and_the_query() -> None:
    handler, seen = replies(httpx.Response(200, json={"job_id": "j", "status": "queued"}))
    made(handler).jobs.enqueue("t", queue="q", lock_key="l", args={"day": "ü"}, max_attempts=2)
    (request,) = seen
    assert request.headers["authorization"] == "Bearer t0ken"
    assert str(request.url) == "http://service/api/v1/jobs/trigger"
    assert json.loads(request.content) == {
        "queue": "q", "task": "t", "lock_key": "l", "args": {"day": "ü"}, "max_attempts": 2,
    }  # fmt: skip
    handler, seen = replies(httpx.Response(200, json={"items": [], "next": None}))
    assert made(handler).jobs.list(status=["failed", "lost"], limit=5) == []
    assert str(seen[0].url).endswith("/jobs?status=failed&status=lost&limit=5")


@pytest.mark.parametrize(
    ("given", "sent"),
    [("a/b", "a%2Fb"), ("ü?#", "%C3%BC%3F%23"), ("a\nb", "a%0Ab"), ("..;", "..%3B"), (" ", "%20")],
)
def test_an_id_is_one_segment_of_the_path(given: str, sent: str) -> None:
    handler, seen = replies(httpx.Response(200, json=STATUS))
    made(handler).jobs.status(given)
    assert seen[0].url.raw_path.decode() == f"/api/v1/jobs/{sent}/status"


@pytest.mark.parametrize("given", ["", ".", "..", None, 5, "\ud800"])
def test_what_cannot_be_in_a_path_is_refused_before_any_request(given: Any) -> None:
    handler, seen = replies(httpx.Response(200, json=STATUS))
    with pytest.raises(errors.InvalidConfig):
        made(handler).jobs.cancel(given)
    assert not seen


@pytest.mark.parametrize("args", [{"a": float("nan")}, {"a": object()}, {"a": {1, 2}}])
def test_a_body_that_is_no_json_is_refused_before_any_request(args: Any) -> None:
    handler, seen = replies(httpx.Response(200, json=STATUS))
    with pytest.raises(errors.InvalidPayload):
        made(handler).jobs.enqueue("t", queue="q", lock_key="l", args=args)
    assert not seen


@pytest.mark.parametrize("token", ["a\nb", "a b", "ü"])
def test_a_token_that_no_header_can_have_is_refused(token: str) -> None:
    with pytest.raises(errors.InvalidConfig) as caught:
        client.Client(token=token)
    assert token not in str(caught.value)


def test_the_token_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_TOKEN", "env")
    handler, seen = replies(httpx.Response(200, json={"status": "ok"}))
    http = httpx.Client(transport=httpx.MockTransport(handler))
    client.Client("http://service/", http=http).health()
    assert seen[0].headers["authorization"] == "Bearer env"
    assert str(seen[0].url) == "http://service/health"


# --- repeated requests ------------------------------------------------------------------------

LOST = httpx.ReadError("lost")
UNSENT = httpx.ConnectError("refused")
Act = Callable[[client.Client], object]


def enqueue(c: client.Client) -> object:
    return c.jobs.enqueue("t", queue="q", lock_key="l")


def enqueue_once(c: client.Client) -> object:
    return c.jobs.enqueue("t", queue="q", lock_key="l", idempotency_key="k")


REPEATABLE: list[Act] = [
    enqueue_once,
    lambda c: c.jobs.status("j"),
    lambda c: c.jobs.cancel("j"),
    lambda c: c.queues.pause("q"),
    lambda c: c.workers.disable("h", "q"),
]
ONCE: list[Act] = [
    enqueue,
    lambda c: c.jobs.retry("j"),
    lambda c: c.runs.submit("w"),
    lambda c: c.runs.retry("r"),
    lambda c: c.runs.answer("r", "n", 1),
    lambda c: c.schedules.run_now("s"),
]
GOOD = httpx.Response(200, json=STATUS | {"id": "j", "items": []})


def test_what_changes_nothing_twice_is_repeated() -> None:
    for first in (LOST, UNSENT, problem(503), httpx.Response(502)):
        for act in REPEATABLE:
            with tabled.case(act, first):
                handler, seen = replies(first, first, GOOD)
                act(made(handler))
                assert len(seen) == 3


@pytest.mark.parametrize("act", ONCE)
def test_what_may_have_been_done_is_not_repeated(act: Act) -> None:
    for first in (LOST, httpx.ReadTimeout("slow"), problem(503, "database-unavailable")):
        handler, seen = replies(first, GOOD)
        with pytest.raises(ConnectionError):
            act(made(handler))
        assert len(seen) == 1


def test_what_was_not_sent_is_repeated_up_to_a_limit() -> None:
    for act in (*ONCE[:1], *REPEATABLE):
        with tabled.case(act):
            handler, seen = replies(UNSENT)
            with pytest.raises(errors.ServiceUnavailable):
                act(made(handler, retries=2))
            assert len(seen) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 500])
def test_a_refusal_is_not_repeated(status: int) -> None:
    handler, seen = replies(problem(status))
    with pytest.raises(errors.QueueWorkflowsError):
        made(handler).jobs.status("j")
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("header", "longest"), [("3", 3.0), ("99999", 10.0), ("x", 10.0), ("-1", 10.0), ("²", 10.0)]
)
def test_the_service_says_when_to_come_again(
    header: str, longest: float, pauses: list[float]
) -> None:
    handler, _ = replies(httpx.Response(503, headers={"retry-after": header.encode()}), GOOD)
    made(handler).jobs.status("j")
    (pause_s,) = pauses
    assert 0 <= pause_s <= longest
    assert (pause_s == 3.0) == (header == "3")


@pytest.mark.parametrize("url", ["ftp://x", "no-scheme", "http://[::bad", ""])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with client.Client(url, retries=5) as made_, pytest.raises(errors.InvalidConfig):
        made_.health()


# --- long polls -------------------------------------------------------------------------------


def test_a_wait_polls_until_the_job_is_final() -> None:
    running = httpx.Response(200, json=STATUS)
    handler, seen = replies(running, running, httpx.Response(200, json=STATUS | {"status": "lost"}),
                            httpx.Response(200, json=STATUS | {"status": "canceled"}))  # fmt: skip
    assert made(handler).jobs.wait("j")["status"] == "canceled"
    assert len(seen) == 4
    assert seen[0].url.params["wait"] == "30.0"
    assert seen[0].extensions["timeout"]["read"] == 40.0


def test_a_wait_ends_after_its_time() -> None:
    handler, seen = replies(httpx.Response(200, json=STATUS))
    with pytest.raises(TimeoutError, match="is running") as caught:
        made(handler).jobs.wait("j", timeout_s=0.0)
    assert isinstance(caught.value, errors.WaitTimeout)
    assert len(seen) == 1
    with pytest.raises(errors.WaitTimeout):
        made(handler).runs.wait("r", timeout_s=0.01)


def test_lists_are_read_page_by_page() -> None:
    pages = [httpx.Response(200, json={"items": [{}] * 2, "next": "c"}) for _ in range(3)]
    handler, seen = replies(*pages)
    assert len(made(handler).jobs.list(limit=5)) == 6
    assert [request.url.params.get("cursor") for request in seen] == [None, "c", "c"]
    assert [request.url.params["limit"] for request in seen] == ["5", "3", "1"]


def test_each_page_of_a_list_has_the_filters_that_an_iterator_gave() -> None:
    pages = [httpx.Response(200, json={"items": [{}], "next": "c"}) for _ in range(3)]
    handler, seen = replies(*pages)
    assert len(made(handler).jobs.list(status=iter(["failed", "lost"]), limit=3)) == 3
    assert [request.url.params.get_list("status") for request in seen] == [["failed", "lost"]] * 3


@pytest.mark.parametrize("given", [{"j"}, ("j",), iter(["j"]), "j"])
def test_ids_are_sent_as_a_list(given: Any) -> None:
    handler, seen = replies(httpx.Response(200, json={"items": []}))
    assert made(handler).jobs.cancel_many(given) == []
    assert json.loads(seen[0].content) == {"ids": ["j"]}


@pytest.mark.parametrize("items", [1, None, "x", [1], ["x"], [None], [[]], {"id": "j"}])
def test_a_list_of_what_is_no_row_is_refused(items: Any) -> None:
    lists: list[Act] = [
        lambda c: c.workers.list(),
        lambda c: c.jobs.list(),
        lambda c: c.jobs.parts("j"),
        lambda c: c.jobs.cancel_many(["j"]),
    ]
    for read in lists:
        handler, _ = replies(httpx.Response(200, json={"items": items, "next": None}))
        with pytest.raises(errors.ServiceFailed):
            read(made(handler))


# --- events -----------------------------------------------------------------------------------


def parsed(*chunks: bytes) -> list[client.Event]:
    """Return the events of a stream that arrives in these chunks and is not resumed."""
    handler, _ = replies(httpx.Response(200, content=iter(chunks)), problem(410, "too-far-behind"))
    found: list[client.Event] = []
    with contextlib.suppress(errors.EventsLost):
        found.extend(made(handler).events())
    return found


ONE = b'id: 7-j1\nevent: job\ndata: {"job_id": "j"}\n\n'


def test_events_are_read_however_the_bytes_arrive() -> None:
    text = b"retry: 10\n\n: alive\n\n" + ONE + ONE.replace(b"7", b"8").replace(b"\n", b"\r\n")
    whole = parsed(text)
    assert whole == parsed(*(bytes([byte]) for byte in text))
    assert [tuple(event) for event in whole] == [
        ("7-j1", "job", {"job_id": "j"}), ("8-j1", "job", {"job_id": "j"}),
    ]  # fmt: skip
    assert parsed(b'data: {"a":\ndata: 1}\n\n')[0].data == {"a": 1}


@pytest.mark.parametrize("data", [b"[1]", b"x", b"[" * 100_000, b"null"])
def test_an_event_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(errors.ServiceFailed):
        parsed(b"data: " + data + b"\n\n")


def test_a_page_of_another_server_is_no_stream() -> None:
    page = httpx.Response(200, html="<p>Log in</p>")
    handler, seen = replies(page, problem(410, "too-far-behind"))
    with pytest.raises(errors.ServiceFailed, match=r"'text/html.*this is not the service"):
        next(made(handler).events())
    assert len(seen) == 1


def test_an_endless_event_is_refused() -> None:
    part = b"x" * (1 << 20)
    for chunks in ([b"data: " + part + b"\n"] * 17, [part] * 17):
        with pytest.raises(errors.ServiceFailed, match="an event of more than 16,777,216 bytes"):
            parsed(*chunks)


def test_a_stream_is_resumed_behind_the_last_event_without_repeating_any() -> None:
    two = ONE.replace(b"7-j1", b"8-j2")
    handler, seen = replies(
        httpx.Response(200, content=b"retry: 0\n\n" + ONE + b"id: half"),
        LOST,
        problem(503),
        httpx.Response(200, content=ONE + two),
        problem(410, "too-far-behind"),
    )
    found: list[str] = []
    with pytest.raises(errors.EventsLost):
        found += [event.id for event in _each(made(handler).events(queue="q"), found)]
    assert found == ["7-j1", "8-j2"]
    assert [request.headers.get("last-event-id") for request in seen] == [
        None, "7-j1", "7-j1", "7-j1", "8-j2",
    ]  # fmt: skip
    assert seen[0].url.params["queue"] == "q"


def _each(stream: Any, found: list[str]) -> Any:
    for event in stream:
        found.append(event.id)
    return []


def test_a_service_that_stays_away_ends_the_stream() -> None:
    handler, seen = replies(UNSENT)
    with pytest.raises(errors.ServiceUnavailable, match="the service at http://service does not"):
        next(made(handler, retries=2).events())
    assert len(seen) == 3


def test_a_quiet_stream_outlasts_any_number_of_interruptions() -> None:
    """Such as those of a proxy that cuts long connections; no event comes between them."""

    def quiet() -> Iterator[bytes]:
        yield b"retry: 0\n\n: alive\n\n"
        raise LOST

    interrupted = [httpx.Response(200, content=quiet()) for _ in range(6)]
    handler, seen = replies(*interrupted, UNSENT, httpx.Response(200, content=block(1, 1) + END))
    assert [each.id for each in made(handler, retries=2).jobs.follow("j")] == ["1-1"]
    assert len(seen) == 8


def test_a_stream_outlasts_a_database_that_the_service_cannot_reach() -> None:
    two = ONE.replace(b"7-j1", b"8-j2")

    def away() -> httpx.Response:
        return problem(503, "database-unavailable")

    handler, seen = replies(
        httpx.Response(200, content=b"retry: 0\n\n" + ONE), away(),
        httpx.Response(200, content=two), away(), away(), away(),
    )  # fmt: skip
    found: list[client.Event] = []
    with pytest.raises(errors.DatabaseUnavailable):
        found.extend(made(handler, retries=2).events())
    assert ([each.id for each in found], len(seen)) == (["7-j1", "8-j2"], 6)

    async def run() -> list[str]:
        begun = httpx.Response(200, content=b"retry: 0\n\n" + block(1, 1))
        handler, _ = replies(begun, away(), httpx.Response(200, content=block(1, 2) + END))
        http = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        async with http, client.AsyncClient("http://service", http=http) as own:
            return [each.id async for each in own.jobs.follow("j")]

    assert asyncio.run(run()) == ["1-1", "1-2"]


def part(claim_no: int, seq: int, value: Any = None) -> dict[str, Any]:
    return {
        "id": f"{claim_no}-{seq}", "reset": not seq, "claim_no": claim_no, "seq": seq,
        "name": "text" if seq else "", "value": value, "created_at": None,
    }  # fmt: skip


def block(claim_no: int, seq: int, value: Any = None) -> bytes:
    kind, data = "part" if seq else "reset", json.dumps(part(claim_no, seq, value))
    return f"id: {claim_no}-{seq}\nevent: {kind}\ndata: {data}\n\n".encode()


END = b'event: end\ndata: {"job_id": "j", "status": "succeeded"}\n\n'
PARTS = ["1-1", "1-2", "2-0", "2-1"]
RESUMED = [None, "1-1", "1-1", "2-0", "2-0"]


def cut() -> list[httpx.Response | Exception]:
    """A stream of PARTS that is interrupted in every way."""
    return [
        httpx.Response(200, content=b"retry: 0\n\n" + block(1, 1, "a") + b"id: 1-2\nevent: part"),
        LOST,
        httpx.Response(200, content=block(1, 2, "b") + b": alive\n\n" + block(2, 0)),
        problem(503),
        httpx.Response(200, content=block(2, 1, "c") + END + block(9, 9)),
    ]


def test_a_stream_of_parts_is_resumed_behind_the_last_part_and_ends() -> None:
    handler, seen = replies(*cut())
    found = [*made(handler).runs.follow("r", "cut/a", name="text")]
    assert [each.id for each in found] == PARTS
    assert [each.value for each in found] == ["a", "b", None, "c"]
    assert [each.is_reset for each in found] == [False, False, True, False]
    assert [request.headers.get("last-event-id") for request in seen] == RESUMED
    assert seen[0].url.raw_path == b"/api/v1/runs/r/nodes/cut%2Fa/stream?name=text"


def test_the_async_client_resumes_a_stream_of_parts() -> None:
    handler, seen = replies(*cut(), httpx.Response(200, json={"items": [part(1, 7)], "next": None}))

    async def run() -> None:
        http = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        async with http, client.AsyncClient("http://service", http=http) as own:
            assert [each.id async for each in own.jobs.follow("j")] == PARTS
            assert [each.id for each in await own.jobs.parts("j", after="1-6")] == ["1-7"]

    asyncio.run(run())
    assert [request.headers.get("last-event-id") for request in seen[:5]] == RESUMED
    assert seen[5].url.params["cursor"] == "1-6"


def test_stored_parts_are_read_page_by_page() -> None:
    handler, seen = replies(
        httpx.Response(200, json={"items": [part(1, 3, "c")], "next": "1-3"}),
        httpx.Response(200, json={"items": [part(1, 4, "d")], "next": None}),
    )
    found = made(handler).jobs.parts("j", name="text", after="1-2")
    assert [(each.id, each.value) for each in found] == [("1-3", "c"), ("1-4", "d")]
    assert [request.url.params["cursor"] for request in seen] == ["1-2", "1-3"]


def test_a_job_without_a_stream_and_what_is_no_part_are_errors() -> None:
    handler, _ = replies(
        problem(404, "unknown-job"), httpx.Response(200, content=b"id: 1-1\ndata: {}\n\n")
    )
    with pytest.raises(errors.UnknownJob):
        next(made(handler).jobs.follow("none"))
    with pytest.raises(errors.ServiceFailed, match="lacks a member"):
        next(made(handler).jobs.follow("j"))
    with pytest.raises(errors.InvalidConfig):
        next(made(handler).jobs.follow("j", after="1\r\nx: y"))


# --- both clients -----------------------------------------------------------------------------


@pytest.mark.parametrize("noun", ["", "jobs", "runs", "workers", "queues", "schedules"])
def test_both_clients_have_the_same_verbs(noun: str) -> None:
    plain, other = client.Client, client.AsyncClient
    if noun:
        plain, other = (type(getattr(each("http://s"), noun)) for each in (plain, other))

    def verbs(kind: type) -> dict[str, inspect.Signature]:
        return {
            name: str(inspect.signature(getattr(kind, name)).replace(return_annotation=None))
            for name in vars(kind)
            if callable(getattr(kind, name))
            and not name.startswith("_")
            and name not in ("close", "aclose")
        }

    assert len(verbs(plain)) >= 4
    assert verbs(plain) == verbs(other)
    for name in verbs(plain):
        assert getattr(plain, name).__doc__ == getattr(other, name).__doc__, "help() shows it"


def test_the_async_client_repeats_waits_and_follows() -> None:
    handler, seen = replies(
        LOST, httpx.Response(200, json=STATUS | {"status": "succeeded"}),
        httpx.Response(200, content=ONE),
    )  # fmt: skip

    async def run() -> tuple[Any, Any]:
        http = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        async with http, client.AsyncClient("http://service", http=http) as made_:
            status = await made_.jobs.wait("j", timeout_s=5.0)
            async for event in made_.events():
                return status, event
        raise AssertionError

    status, event = asyncio.run(run())
    assert status["status"] == "succeeded"
    assert event.id == "7-j1"
    assert len(seen) == 3


def test_the_id_of_an_event_that_no_header_can_have_is_refused() -> None:
    handler, seen = replies(httpx.Response(200))
    for last in ("\xe9", "1\r\nx: y"):
        with made(handler) as own, pytest.raises(errors.InvalidConfig):
            next(own.events(last_event_id=last))
    assert seen == []
