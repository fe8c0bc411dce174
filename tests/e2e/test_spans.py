"""Spans of real processes at a collector: deaths with their cause, runs, a killed exporter."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator, Iterator
from types import ModuleType

import pytest

from queue_workflows import db, jobs, runs
from tests.support import collector, commands
from tests.support.collector import Collector
from tests.support.commands import Command, Commands
from tests.support.wait import until

APP = "tests.support.collector:setup"
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def received() -> Iterator[tuple[Collector, str]]:
    with collector.collecting() as made:
        yield made


@pytest.fixture
def cli(db: ModuleType, dsn: str, received: tuple[Collector, str]) -> Generator[Commands]:
    collector.setup()
    with commands.commands(
        QUEUE_WORKFLOWS_DB_URL=dsn, OTEL_EXPORTER_OTLP_ENDPOINT=received[1]
    ) as made:
        yield made


def exporting(cli: Commands) -> Command:
    """Starts an exporter and returns once it has the export."""
    started = cli.start("queue-workflows", "spans")
    until(_is_taken)
    return started


def _is_taken() -> bool:
    with contextlib.closing(db.connect()) as conn:
        row = conn.execute(
            "SELECT FROM event_exports WHERE name = 'spans' AND taken_until > now()"
        ).fetchone()
    return row is not None


def _has_reported_its_session() -> bool:
    with contextlib.closing(db.connect()) as conn:
        query = "SELECT FROM workers WHERE detail -> 'lock' = 'true'"
        return conn.execute(query).fetchone() is not None


def worker(cli: Commands, *more: str, queue: str = collector.QUEUE) -> Command:
    return cli.start("queue-claim-worker", "--queue", queue, "--app", APP, *more)


def test_an_attempt_that_was_killed_has_a_span_with_its_cause(
    cli: Commands, received: tuple[Collector, str]
) -> None:
    spans, _ = received
    exporting(cli)
    worker(cli, "--slots", "1")
    job_id = jobs.enqueue(
        "dies", queue=collector.QUEUE, args={"token": "canary"}, headers={"traceparent": GIVEN}
    )
    until(lambda: spans.of(job_id))
    first = spans.of(job_id)[0]
    assert first.attributes["queue_workflows.cause"] == "death"
    assert first.attributes["queue_workflows.signal"] == signal.SIGKILL
    assert "SIGKILL" in first.message
    assert (first.trace_id, first.parent, first.status) == (GIVEN[3:35], GIVEN[36:52], 2)
    assert first.end >= first.start


def test_a_worker_that_was_killed_with_its_job_leaves_a_span(
    cli: Commands, received: tuple[Collector, str]
) -> None:
    spans, _ = received
    exporting(cli)
    # By default it waits for 30 s, and again after 15 s in which it had no processor or database.
    cli.start("queue-orchestrator", "--app", APP, QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S="2")
    doomed = worker(cli, "--inline")
    # A worker that dies before it has reported its session is left to its lease of 600 s.
    until(_has_reported_its_session)
    job_id = jobs.enqueue("dies", queue=collector.QUEUE, args={"token": "x"})
    assert doomed.wait() == -signal.SIGKILL
    until(lambda: spans.of(job_id), timeout_s=60.0)
    (span, *_) = spans.of(job_id)
    assert span.attributes["queue_workflows.outcome"] == "reclaimed"
    assert span.status == 2
    assert "session of its worker is gone" in span.message or "session is gone" in span.message


def test_an_exporter_that_is_killed_misses_nothing(
    cli: Commands, received: tuple[Collector, str]
) -> None:
    spans, _ = received
    exporter = exporting(cli)
    worker(cli, "--slots", "2")
    made = [jobs.enqueue("traced", queue=collector.QUEUE) for _ in range(20)]
    until(lambda: len(spans.spans) > 0)
    exporter.send(signal.SIGKILL)
    exporter.wait()
    made += [jobs.enqueue("traced", queue=collector.QUEUE) for _ in range(20)]
    until(lambda: all((jobs.get(each) or {}).get("status") == "completed" for each in made))
    with contextlib.closing(db.connect()) as conn:
        conn.execute("UPDATE event_exports SET taken_until = now()")  # as a minute later
    cli.start("queue-workflows", "spans")
    until(lambda: all(len(spans.of(each)) == 1 for each in made))


def test_up_writes_spans_of_runs_if_it_is_set(
    cli: Commands, received: tuple[Collector, str]
) -> None:
    spans, _ = received
    cli.start(
        "queue-workflows", "up", "--app", APP, "--cpu", "1", "--no-ingest",
        QUEUE_WORKFLOWS_SPANS="all",
    )  # fmt: skip
    until(_is_taken, timeout_s=30.0)
    run_id = runs.submit("two")["id"]
    until(lambda: spans.named("run two"), timeout_s=30.0)
    (run,) = spans.named("run two")
    (node,) = spans.named("node s/b")
    assert (node.trace_id, node.parent) == (run.trace_id, run.span_id)
    found = {each["node_id"]: each["context_delta"] for each in runs.nodes(run_id)}
    assert found["s/b"] == {"trace_id": node.trace_id, "span_id": node.span_id}


def test_a_collector_that_is_away_costs_a_warning(
    cli: Commands, received: tuple[Collector, str]
) -> None:
    spans, _ = received
    spans.refuse = True
    exporter = exporting(cli)
    worker(cli, "--slots", "1")
    job_id = jobs.enqueue("traced", queue=collector.QUEUE)
    until(lambda: "the collector does not take spans" in exporter.err, timeout_s=30.0)
    spans.refuse = False
    until(lambda: spans.of(job_id), timeout_s=30.0)
    exporter.send(signal.SIGTERM)
    assert exporter.wait() == 0
