"""Parts of a stream are stored under the claim, in order, within their limits."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, errors, ingest_executor, node_executor, steps, streams
from queue_workflows.types import Row
from tests.support import console, constants, factories, notifications, transitions, wait
from tests.support.transitions import Kind

FETCH = transitions.who("fetch")
WAITING = (
    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)
pytestmark = pytest.mark.usefixtures("invariants_hold")


def run(conn: db.Connection, task: Callable[..., Any]) -> str:
    """Claim the job of this task, which is queued if there is none; return how it ended."""
    queue_workflows.register_ingest_task("t", task)
    if factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'queued'") == 0:
        factories.ingest(conn, args={}, max_attempts=9)
    conn.execute("UPDATE ingest_jobs SET available_at = NULL WHERE status = 'queued'")
    return ingest_executor.execute_ingest_job(transitions.claim_ingest(conn, FETCH))


def the_id(conn: db.Connection) -> str:
    return factories.one(conn, "SELECT id FROM ingest_jobs")


def test_the_parts_of_the_last_attempts_are_read_with_reset_marks(conn: db.Connection) -> None:
    def task(reason: str) -> None:
        claim = queue_workflows.current_job().claim
        for number in range(2):
            streams.stream("text", [claim, number])
        streams.stream("log", None)
        if claim < 4:
            raise RuntimeError("again")

    assert [run(conn, task) for _ in range(4)] == ["failed"] * 3 + ["completed"]
    found = streams.read(the_id(conn))
    assert [(part.id, part.name, part.value) for part in found] == [
        each
        for claim in (2, 3, 4)
        for each in (
            (f"{claim}-0", "", None), (f"{claim}-1", "text", [claim, 0]),
            (f"{claim}-2", "text", [claim, 1]), (f"{claim}-3", "log", None),
        )
        if each[0] != "2-0"
    ]  # fmt: skip
    assert [part.id for part in streams.read(the_id(conn), "log", after="3-1")] == [
        "3-3", "4-0", "4-3",
    ]  # fmt: skip
    assert [part.id for part in streams.read(the_id(conn), after="3-3")] == [
        "4-0", "4-1", "4-2", "4-3",
    ]  # fmt: skip
    assert [*streams.follow(the_id(conn))] == found

    async def followed() -> list[streams.Part]:
        return [part async for part in streams.follow_async(the_id(conn), after="4-1")]

    assert asyncio.run(followed()) == found[-2:]


def test_a_later_claim_without_parts_is_a_reset_mark_whether_it_runs_or_not(
    conn: db.Connection,
) -> None:
    def task(reason: str) -> None:
        if queue_workflows.current_job().claim == 1:
            streams.stream("text", "old")
            raise RuntimeError("again")
        live.extend(part.id for part in streams.read(the_id(conn), after="1-1"))

    live: list[str] = []
    assert [run(conn, task) for _ in range(2)] == ["failed", "completed"]
    assert live == ["2-0"]
    assert [part.id for part in streams.read(the_id(conn), "text")] == ["1-1", "2-0"]


def test_a_name_is_chosen_by_the_database_and_other_parts_are_passed_once(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(reason: str) -> None:
        for number in range(30):
            streams.stream("text" if number % 10 == 9 else "log", number)

    assert run(conn, task) == "completed"
    pages = [streams.read_page(the_id(conn), "text", limit=2)]
    while pages[-1].full:
        pages.append(streams.read_page(the_id(conn), "text", after=pages[-1].after, limit=2))
    assert [[part.id for part in page.parts] for page in pages] == [["1-10", "1-20"], ["1-30"]]
    assert streams.read_page(the_id(conn), "none")[:2] == ([], "1-30")
    monkeypatch.setattr(streams.attempt_requests, "stored_value", pytest.fail)
    assert streams.read(the_id(conn), "none") == []


def test_large_parts_are_read_in_pages_of_about_a_mebibyte(conn: db.Connection) -> None:
    def task(reason: str) -> None:
        for number in range(40):
            streams.stream("text", f"{number}".ljust(60_000))

    assert run(conn, task) == "completed"
    page = streams.read_page(the_id(conn))
    assert (len(page.parts), page.full, page.over) == (18, True, False)
    assert [part.seq for part in streams.read(the_id(conn))] == [*range(1, 41)]


def test_a_batch_is_one_notification_of_its_transaction(conn: db.Connection) -> None:
    factories.ingest(conn, args={})
    job = transitions.claim_ingest(conn, FETCH)
    with contextlib.closing(notifications.NotificationListener()) as listener:
        with conn.transaction():
            transitions.stream(conn, job, 1, *range(9))
            assert listener.heard() == []
        assert listener.heard() == [("job_parts", job["id"])]
        assert not transitions.stream(conn, job | {"claim_no": 9}, 1, *range(9))
        assert listener.heard() == []


@pytest.fixture
def empty_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released at each read of a follower that has found no part."""
    found, read_page = threading.Semaphore(0), streams.read_page

    def counted(*args: Any, **options: Any) -> streams.Page:
        page = read_page(*args, **options)
        if not page.parts:
            found.release()
        return page

    monkeypatch.setattr(streams, "read_page", counted)
    return found


def test_a_follower_reads_at_once_when_a_batch_comes(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch, empty_reads: threading.Semaphore
) -> None:
    """With pauses of a minute only the notifications wake it."""
    monkeypatch.setattr(streams, "PAUSE_FIRST_S", 60.0)
    monkeypatch.setattr(streams, "PAUSE_MAX_S", 60.0)
    factories.ingest(conn, args={})
    job = transitions.claim_ingest(conn, FETCH)

    def send(number: int, *, after_reads: int = 0) -> None:
        for _ in range(after_reads):
            assert empty_reads.acquire(timeout=30)
        assert transitions.stream(conn, job, number, number)

    send(1)
    reader = streams.follow(job["id"])
    found = [next(reader).value]
    # It listens, reads once more, and from then on reads only when it is woken.
    for number, reads in ((2, 1), (3, 0), (4, 0)):
        thread = threading.Thread(target=send, args=(number,), kwargs={"after_reads": reads})
        thread.start()
        found.append(next(reader).value)
        thread.join()
    reader.close()

    async def followed() -> None:
        parts = streams.follow_async(job["id"], after="1-4")
        for number, reads in ((5, 2), (6, 0)):
            waiting = asyncio.ensure_future(anext(parts))
            await asyncio.to_thread(send, number, after_reads=reads)
            found.append((await asyncio.wait_for(waiting, 20)).value)
        await parts.aclose()

    asyncio.run(followed())
    assert found == [1, 2, 3, 4, 5, 6]


def test_a_follower_that_nothing_wakes_reads_after_a_pause(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch, empty_reads: threading.Semaphore
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    factories.ingest(conn, args={})
    job = transitions.claim_ingest(conn, FETCH)
    reader = streams.follow(job["id"])

    def send() -> None:
        for _ in range(3):
            assert empty_reads.acquire(timeout=30)
        assert transitions.stream(conn, job, 1, 1)

    thread = threading.Thread(target=send)
    thread.start()
    assert next(reader).value == 1
    thread.join()
    reader.close()


def test_the_job_of_a_node_is_found(conn: db.Connection) -> None:
    row = factories.node(conn, inputs={})
    assert streams.job_of_node(row["run_id"], row["node_id"]) == row["id"]
    for run_id, node_id in ((row["run_id"], "none"), ("none", row["node_id"]), ("a\0", "\ud800")):
        with pytest.raises(errors.UnknownJob, match="has no node"):
            streams.job_of_node(run_id, node_id)


def test_a_part_that_cannot_be_read_hides_no_other_node(conn: db.Connection) -> None:
    run_id = factories.run(conn)
    made: dict[str, Row] = {}
    for node_id, part in (("s/bad", "9" * 5000), ("s/good", '"fine"')):
        made[node_id] = factories.node(conn, run_id, node_id, inputs={})
        job = transitions.claim_node(conn)
        conn.execute(
            "INSERT INTO job_parts VALUES ('workflow_node_jobs', %s, 1, 1, 'text', %s::jsonb)",
            (job["id"], part),
        )
        transitions.complete(conn, job)
    conn.execute("UPDATE workflow_runs SET status = 'completed', finished_at = now()")
    conn.execute("UPDATE workflow_dispatch_events SET processed_at = now()")
    shown = console.printed("show", run_id, "--follow").splitlines()
    found = [line for line in shown if "stream" in line or "fine" in line]
    assert found[0].startswith("s/bad: its stream cannot be shown: part 1-1 of job")
    assert found[1:] == ["s/good: text: fine"]
    one = console.printed("show", run_id, "--follow", "--node", "s/good")
    assert "s/good: text: fine" in one and "s/bad: " not in one
    alone = console.printed("show", made["s/bad"]["id"], "--follow").splitlines()
    assert [line[:32] for line in alone if "stream" in line] == ["its stream cannot be shown: part"]
    assert alone[-1].startswith(f"node job {made['s/bad']['id']} (s/bad): completed")


def test_async_handlers_and_nodes_stream(conn: db.Connection, monkeypatch: Any) -> None:
    async def task(reason: str) -> None:
        await streams.stream_async("text", {"a": 1})
        streams.stream("text", "b")

    assert run(conn, task) == "completed"
    assert [part.value for part in streams.read(the_id(conn))] == [{"a": 1}, "b"]

    @queue_workflows.node
    def speak() -> dict[str, Any]:
        streams.stream("text", "from a node")
        return {}

    row = factories.node(conn, node_module=speak.name, inputs={})
    assert node_executor.execute_node(transitions.claim_node(conn)) == "completed"
    assert [part.value for part in streams.read(row["id"])] == ["from a node"]


def test_threads_of_a_handler_that_begin_to_stream_at_once_share_one_stream(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Any = constants.value("tasks.attempt_requests.StreamParts")
    make, others = parts.__init__, list[threading.Thread]()

    def make_slowly(self: Any, *given: Any) -> None:
        make(self, *given)
        if not others:
            context = contextvars.copy_context()
            others.append(threading.Thread(target=context.run, args=(streams.stream, "text", "b")))
            others[0].start()
            others[0].join(0.1)

    monkeypatch.setattr(parts, "__init__", make_slowly)

    def task(reason: str) -> None:
        streams.stream("text", "a")
        others[0].join()

    assert run(conn, task) == "completed"
    assert sorted(part.value for part in streams.read(the_id(conn))) == ["a", "b"]


def test_parts_go_with_their_job(conn: db.Connection) -> None:
    assert run(conn, lambda reason: streams.stream("text", 1)) == "completed"
    job_id = the_id(conn)
    conn.execute("DELETE FROM ingest_jobs")
    assert factories.one(conn, "SELECT count(*) FROM job_parts") == 0
    with pytest.raises(errors.UnknownJob, match=job_id):
        streams.read(job_id)


def test_a_wait_keeps_what_came_before_it_and_begins_the_stream_again(
    conn: db.Connection,
) -> None:
    def task(reason: str) -> None:
        streams.stream("text", "before")
        streams.stream("text", "too")
        steps.sleep(0.01)
        streams.stream("text", "after")

    run(conn, task)
    assert [part.value for part in streams.read(the_id(conn))] == ["before", "too"]
    conn.execute("UPDATE job_steps SET due_at = now()")
    assert run(conn, task) == "completed"
    assert [part.value for part in streams.read(the_id(conn), after="1-2")] == [
        None, "before", "too", "after",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part", "error", "words"),
    [
        ("", 1, errors.StepRefused, "name"),
        ("n\0", 1, errors.StepRefused, "name"),
        ("text", "a\0", errors.InvalidPayload, "part of stream 'text'"),
        ("text", "\ud800", errors.InvalidPayload, "part of stream 'text'"),
        ("text", float("nan"), errors.InvalidPayload, "part of stream 'text'"),
        ("text", {1, 2}, errors.InvalidPayload, "part of stream 'text'"),
        ("text", "x" * 65 * 1024, errors.InvalidPayload, "the limit of 64 KiB"),
    ],
)
def test_a_bad_part_is_refused_and_takes_no_number(
    conn: db.Connection, name: str, part: Any, error: type[Exception], words: str
) -> None:
    def task(reason: str) -> None:
        with pytest.raises(error, match=words):
            streams.stream(name, part)
        streams.stream("text", "good")

    assert run(conn, task) == "completed"
    assert [(part.id, part.value) for part in streams.read(the_id(conn))] == [("1-1", "good")]


def test_a_deep_part_is_refused(conn: db.Connection) -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]

    def task(reason: str) -> None:
        with pytest.raises(errors.InvalidPayload, match="nested deeper than 64 levels"):
            streams.stream("text", deep)

    assert run(conn, task) == "completed"


@pytest.mark.parametrize(
    ("limit", "value", "part", "most", "said"),
    [
        ("MAX_PARTS", 3, "a", 3, "has streamed 3 parts"),
        ("MAX_MB", 1, "a" * 60 * 1024, 17, "more than the 1 MiB"),
    ],
)
def test_an_attempt_streams_up_to_its_limits(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch,
    limit: str, value: int, part: str, most: int, said: str,
) -> None:  # fmt: skip
    constants.put(monkeypatch, f"tasks.attempt_requests.{limit}", value)

    def task(reason: str) -> None:
        for _ in range(most):
            streams.stream("text", part)
        with pytest.raises(errors.InvalidPayload, match=said):
            streams.stream("text", part)

    assert run(conn, task) == "completed"
    assert len(streams.read(the_id(conn))) == most


def test_a_lost_claim_writes_nothing_and_a_repeated_batch_nothing_twice(
    conn: db.Connection,
) -> None:
    factories.ingest(conn, args={})
    job = transitions.claim_ingest(conn, FETCH)
    assert transitions.stream(conn, job, 1, 1, 2)
    assert transitions.stream(conn, job, 1, 1, 2)
    assert not transitions.stream(conn, job | {"claim_no": job["claim_no"] + 1}, 3, 1, 2)
    with pytest.raises(errors.RowRefused, match="an earlier batch"):
        transitions.stream(conn, job, 4, 1, 2)
    assert [part.id for part in streams.read(job["id"])] == ["1-1", "1-2"]
    again = take_over(conn, job)
    with pytest.raises(errors.RowRefused, match="an earlier batch"):
        transitions.stream(conn, again, 3, "the parts of another claim are not before it")


def reclaim(conn: db.Connection, job: Row) -> None:
    transitions.expire(conn, job)
    assert transitions.reclaim_lapsed(conn, transitions.kind_of(job))


def take_over(conn: db.Connection, job: Row) -> Row:
    """Let the worker that lost its claim claim the job again; return it as it is then."""
    reclaim(conn, job)
    kind = transitions.kind_of(job)
    conn.execute(f"UPDATE {transitions.TABLES[kind]} SET available_at = NULL".encode())
    again = (transitions.claim_node if kind == "node" else transitions.claim_ingest)(conn)
    assert (again["id"], again["worker_id"]) == (job["id"], job["worker_id"])
    return again


ENDS: dict[str, Callable[[db.Connection, Row], object]] = {
    "completed": transitions.complete,
    "failed": transitions.fail,
    "failed by the watchdog": transitions.end_by_watchdog,
    "cancelled": lambda conn, job: transitions.record(conn, job, "cancelled"),
    "handed back": transitions.hand_back,
    "waits": transitions.wait,
    "charged": transitions.charge,
    "reclaimed": reclaim,
    "claimed again": take_over,
}


@pytest.mark.parametrize("max_attempts", [1, 9])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["node", "ingest"])
def test_no_part_is_stored_under_a_claim_that_has_ended(
    conn: db.Connection, kind: Kind, end: str, max_attempts: int
) -> None:
    job = transitions.claimed(conn, kind, max_attempts=max_attempts)
    assert transitions.stream(conn, job, 1, "in time")
    assert not transitions.stream(conn, job | {"worker_id": "w2"}, 2, "of another worker")
    ENDS[end](conn, job)
    assert not transitions.stream(conn, job, 2, "late")
    assert [part.value for part in streams.read(job["id"]) if part.name] == ["in time"]


@pytest.mark.parametrize("kind", ["node", "ingest"])
def test_a_part_that_meets_the_end_of_its_claim_waits_and_is_not_stored(
    conn: db.Connection, kind: Kind
) -> None:
    job = transitions.claimed(conn, kind)
    stored: list[bool] = []

    def send() -> None:
        with db.connect() as own:
            stored.append(transitions.stream(own, job, 1, "late"))

    thread = threading.Thread(target=send)
    with conn.transaction():
        transitions.complete(conn, job)
        thread.start()
        wait.until(lambda: stored or factories.execute(WAITING))
    thread.join()
    assert (stored, streams.read(job["id"])) == ([False], [])


def test_a_follower_reads_once_a_second_while_no_part_comes() -> None:
    page = streams.Page([], "1-0", over=False, full=False, status="running")
    pause_s = streams.PAUSE_FIRST_S
    for _ in range(20):
        pause_s = streams.next_pause(page, "1-0", pause_s)
    assert pause_s == 1.0
    assert streams.next_pause(page._replace(after="1-1"), "1-0", pause_s) == 0.1


def test_streams_outside_of_a_job_and_bad_ids_are_refused(conn: db.Connection) -> None:
    with pytest.raises(errors.NoCurrentJob):
        streams.stream("text", 1)
    for job_id in ("none", "a\0"):
        with pytest.raises(errors.UnknownJob):
            streams.read(job_id)
    job_id = factories.ingest(conn, args={})["id"]
    for after in (
        "",
        "1",
        "a-1",
        "1--1",
        "1-²",
        "9" * 30 + "-1",
        "1-" + "9" * 10,
        "-",
        "1-9999999999",
    ):
        with pytest.raises(errors.InvalidConfig, match="no id of a part"):
            streams.read(job_id, after=after)
    assert streams.read(job_id, after="999999999999999999-999999999") == []
