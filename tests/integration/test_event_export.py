"""The export of the history: each event once, in whatever order they commit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import export
from opentelemetry.sdk.trace.export import in_memory_span_exporter

from queue_workflows import claim_worker, db, errors, jobs, runs
from tests.support import collector, exports, factories, transitions
from tests.support.flow import Flow
from tests.support.wait import until

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Lists:
    """A sink that keeps what it gets, and fails on request."""

    wants_attempts = wants_events = True

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.kept: list[Any] = []
        self.fails = False

    def events(self, rows: Sequence[Any]) -> None:
        if self.fails:
            raise errors.ExportFailed("away")
        self.rows += rows

    def records(self, records: Sequence[Any]) -> None:
        self.kept += records

    def close(self) -> None:
        return


@pytest.fixture
def exported(db: ModuleType) -> Iterator[Callable[..., exports.Exporter]]:
    """Makes exports that start now."""
    made: list[exports.Exporter] = []

    def one(sink: Any, name: str = "test") -> exports.Exporter:
        each = exports.export(sink, name)
        each.run()
        made.append(each)
        return each

    yield one
    for each in made:
        each.stop()


# --- each event once --------------------------------------------------------------------------


def add(conn: Any, job_id: str, kind: str = "error") -> int:
    return factories.insert(conn, "ingest_job_events", job_id=job_id, event_type=kind)["id"]


class Followed:
    """An export whose rounds are looked at."""

    def __init__(self, conn: Any, export_: Callable[..., exports.Exporter]) -> None:
        self._conn = conn
        self._sink = Lists()
        self._export = export_(self._sink)

    def step(self) -> tuple[list[str], int]:
        """Export what is there; return its jobs, and the position that is stored."""
        self._sink.rows.clear()
        self._export.run()
        query = "SELECT ingest_event FROM event_exports WHERE name = 'test'"
        return [row["job_id"] for row in self._sink.rows], factories.one(self._conn, query)


@pytest.fixture
def follow(conn: Any, exported: Any) -> Followed:
    return Followed(conn, exported)


def test_an_event_that_commits_behind_later_ones_is_read(conn: Any, follow: Followed) -> None:
    with contextlib.closing(db.connect()) as late:
        with late.transaction():
            early = add(late, "late")
            last = add(conn, "soon")
            assert follow.step() == (["soon"], early - 1)
            assert follow.step() == ([], early - 1)
        assert follow.step() == (["late"], last)
    assert follow.step() == ([], last)


def test_a_rolled_back_event_does_not_hold_the_position_for_ever(
    conn: Any, follow: Followed
) -> None:
    with contextlib.closing(db.connect()) as late, late.transaction(force_rollback=True):
        early = add(late, "never")
        last = add(conn, "soon")
        assert follow.step() == (["soon"], early - 1)
    # Transactions of other databases of this server may have begun before it ended.
    until(lambda: follow.step() == ([], last))


def test_a_transaction_that_began_after_a_gap_does_not_release_it(
    conn: Any, follow: Followed
) -> None:
    """The gap stays until the transaction that drew the id has ended, however many others end."""
    with contextlib.closing(db.connect()) as late, contextlib.closing(db.connect()) as other:
        with late.transaction():
            early = add(late, "late")
            add(conn, "soon")
            for number in range(5):
                with other.transaction():
                    add(other, f"other{number}")
                _, stored = follow.step()
                assert stored == early - 1
        assert follow.step()[0] == ["late"]


def test_after_a_crash_nothing_is_missed(conn: Any, follow: Followed, exported: Any) -> None:
    with contextlib.closing(db.connect()) as late:
        with late.transaction():
            add(late, "late")
            add(conn, "soon")
            assert follow.step()[0] == ["soon"]
        conn.execute("UPDATE event_exports SET taken_until = now() - interval '1 second'")
        again = Lists()
        exported(again)
        assert sorted(row["job_id"] for row in again.rows) == ["late", "soon"]


def test_more_than_a_batch_is_read_in_order(conn: Any, follow: Followed) -> None:
    with contextlib.closing(db.connect()) as late, late.transaction():
        add(late, "late")
        conn.execute(
            "INSERT INTO ingest_job_events (job_id, event_type)"
            " SELECT n, 'error' FROM generate_series(1, 2500) n"
        )
        assert follow.step()[0] == [str(number) for number in range(1, 2501)]
    assert follow.step()[0] == ["late"]


# --- exports ---------------------------------------------------------------------------------


def ran(task: str, worker: claim_worker.ClaimWorker | None = None, **job: Any) -> str:
    collector.setup()
    job_id = jobs.enqueue(task, queue=collector.QUEUE, **job)
    claim_worker.ClaimWorker(queue=collector.QUEUE).run_once()
    return job_id


def test_two_exports_of_one_name_take_turns(exported: Any) -> None:
    first, second = Lists(), Lists()
    one, two = exported(first), exports.export(second)
    ran("traced")
    assert two.run() == 0
    assert one.run() > 0
    one.stop()
    ran("traced")
    assert two.run() > 0
    two.stop()
    assert {row["job_id"] for row in first.rows}.isdisjoint(row["job_id"] for row in second.rows)


def test_a_sink_that_fails_gets_the_events_again(exported: Any) -> None:
    sink = Lists()
    export_ = exported(sink)
    job_id = ran("traced")
    sink.fails = True
    with pytest.raises(errors.ExportFailed):
        export_.run()
    sink.fails = False
    export_.run()
    assert [row["event_type"] for row in sink.rows if row["job_id"] == job_id] == [
        "claimed", "completed",
    ]  # fmt: skip


def test_hostile_rows_hold_nothing_up(exported: Any, conn: Any) -> None:
    sink = Lists()
    export_ = exported(sink)
    for claim, at in ((1, "infinity"), (2, "-infinity"), (3, "4713-01-01 BC")):
        conn.execute(
            "INSERT INTO ingest_job_events (job_id, event_type, claim_no, elapsed_s, detail,"
            " created_at, error) VALUES ('odd', 'failed', %s, 'NaN', '[1]', %s, E'\\x1b[31m')",
            (claim, at),
        )
    conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, claim_no, elapsed_s)"
        " VALUES ('odd', 'completed', 9223372036854775807, 'infinity')"
    )
    job_id = ran("traced")
    export_.run()
    assert any(each.attributes["queue_workflows.job_id"] == job_id for each in sink.kept)


def spans_of(found: in_memory_span_exporter.InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in found.get_finished_spans()}


def test_an_attempt_is_a_child_of_the_span_that_enqueued(exported: Any) -> None:
    memory = in_memory_span_exporter.InMemorySpanExporter()
    export_ = exported(exports.spans(memory))
    job_id = ran("traced", headers={"traceparent": GIVEN})
    export_.run()
    span = spans_of(memory)["job traced"]
    assert f"{span.context.trace_id:032x}" == GIVEN[3:35]
    assert f"{span.parent.span_id:016x}" == GIVEN[36:52]
    assert span.attributes["queue_workflows.job_id"] == job_id
    assert span.attributes["queue_workflows.wait_s"] >= 0
    row = jobs.get(job_id)
    assert row is not None
    assert row["result"] == {
        "trace_id": GIVEN[3:35],
        "span_id": f"{span.context.span_id:016x}",
    }


def test_a_failure_is_an_error_with_its_traceback_and_no_secret(exported: Any) -> None:
    memory = in_memory_span_exporter.InMemorySpanExporter()
    export_ = exported(exports.spans(memory))
    ran("fails", args={"token": "c4nary"})
    export_.run()
    span = spans_of(memory)["job fails"]
    assert span.status.status_code.name == "ERROR"
    assert "ValueError" in span.events[-1].attributes["exception.stacktrace"]
    assert "c4nary" not in span.to_json()
    assert span.parent is None


def test_what_is_not_sampled_or_not_traced_has_no_span(exported: Any) -> None:
    memory = in_memory_span_exporter.InMemorySpanExporter()
    export_ = exported(exports.spans(memory, only_traced=True))
    ran("traced", headers={"traceparent": GIVEN[:-2] + "00"})
    ran("traced")
    ran("traced_async", headers={"traceparent": GIVEN})
    export_.run()
    assert [span.name for span in memory.get_finished_spans()] == ["job traced_async"]


def test_a_collector_that_refuses_gets_the_spans_later(exported: Any) -> None:
    class Refusing(in_memory_span_exporter.InMemorySpanExporter):
        refuse = True

        def export(self, spans: Any) -> export.SpanExportResult:
            if self.refuse:
                return export.SpanExportResult.FAILURE
            return super().export(spans)

    memory = Refusing()
    export_ = exported(exports.spans(memory))
    ran("traced")
    with pytest.raises(errors.ExportFailed):
        export_.run()
    memory.refuse = False
    export_.run()
    assert len(memory.get_finished_spans()) == 1


def test_a_span_that_is_refused_holds_up_no_other(
    exported: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Picky(in_memory_span_exporter.InMemorySpanExporter):
        def export(self, spans: Any) -> export.SpanExportResult:
            if "job fails" in [span.name for span in spans]:
                return export.SpanExportResult.FAILURE
            return super().export(spans)

    memory = Picky()
    export_ = exported(exports.spans(memory))
    before = ran("traced")
    for _ in range(2):
        ran("fails", args={"token": "c4nary"})
    after = ran("traced")
    export_.run()
    sent = {span.attributes["queue_workflows.job_id"] for span in memory.get_finished_spans()}
    assert sent == {before, after}
    assert caplog.text.count("the collector refuses span job fails") == 2
    ran("fails", args={"token": "c4nary"})
    with pytest.raises(errors.ExportFailed):  # alone, it might as well be an outage
        export_.run()
    last = ran("traced")
    export_.run()
    span = memory.get_finished_spans()[-1]
    assert span.attributes["queue_workflows.job_id"] == last


def test_a_run_is_a_trace(exported: Any, toy: Flow) -> None:
    collector.setup()
    memory = in_memory_span_exporter.InMemorySpanExporter()
    export_ = exported(exports.spans(memory))
    run_id = runs.submit("two", headers={"traceparent": GIVEN})["id"]
    toy.go()
    for _ in range(2):
        export_.run()
    spans = spans_of(memory)
    run = spans["run two"]
    assert f"{run.parent.span_id:016x}" == GIVEN[36:52]
    nodes = [spans["node s/a"], spans["node s/b"]]
    assert {span.parent.span_id for span in nodes} == {run.context.span_id}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {GIVEN[3:35]}
    assert run.start_time <= nodes[0].start_time and nodes[1].end_time <= run.end_time
    found = [each for each in runs.nodes(run_id) if each["node_id"] == "s/b"]
    assert found[0]["context_delta"]["span_id"] == f"{nodes[1].context.span_id:016x}"


def test_a_run_that_ends_before_its_nodes_is_exported_once(conn: Any, exported: Any) -> None:
    sink = Lists()
    export_ = exported(sink)
    run_id = factories.run(conn)
    factories.node(conn, run_id, node_id="s/a")
    held = transitions.claim_node(conn)
    export_.run()
    runs.cancel(run_id)
    export_.run()
    transitions.fail(conn, held)
    for _ in range(2):
        export_.run()
    assert [each.name.split()[0] for each in sink.kept] == ["node", "run"]


def test_enqueueing_in_a_span_stores_it(db: ModuleType) -> None:
    from opentelemetry import trace

    collector.setup()
    identity = trace.SpanContext(
        int(GIVEN[3:35], 16), int(GIVEN[36:52], 16), False, trace.TraceFlags(1)
    )
    with trace.use_span(trace.NonRecordingSpan(identity)):
        job_id = jobs.enqueue("traced", queue=collector.QUEUE)
        many = jobs.enqueue_many(task_name="traced", queue=collector.QUEUE, args=[{}, {}])
        run = runs.submit("two")
    for each in (job_id, *many):
        row = jobs.get(each)
        assert row is not None and row["headers"] == {"traceparent": GIVEN}
    assert run["headers"] == {"traceparent": GIVEN}
    assert runs.submit("two")["headers"] is None


@pytest.mark.parametrize(
    "headers", [{"a": 1}, {1: "a"}, "text", ["a"], {"a": "\0"}, {"a": "x" * 9000}, {"a": "\ud800"}]
)
def test_headers_of_a_run_that_cannot_be_stored_are_refused(db: ModuleType, headers: Any) -> None:
    with pytest.raises(ValueError):
        runs.submit("two", headers=headers)


@pytest.mark.parametrize("value", ["[1]", '"x"', '{"a": "%s"}' % ("x" * 9000)])
def test_headers_by_sql_are_bounded(conn: Any, value: str) -> None:
    with pytest.raises(db.Error):
        conn.execute(
            "INSERT INTO workflow_runs (workflow_name, headers) VALUES ('two', %s)", (value,)
        )


def test_a_plain_insert_gives_a_trace(exported: Any, conn: Any) -> None:
    sink = Lists()
    export_ = exported(sink)
    collector.setup()
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, headers)"
        " VALUES ('traced', %s, jsonb_build_object('traceparent', %s::text))",
        (collector.QUEUE, GIVEN),
    )
    claim_worker.ClaimWorker(queue=collector.QUEUE).run_once()
    export_.run()
    assert [each.span.trace_id for each in sink.kept] == [GIVEN[3:35]]


def test_the_audit_and_the_metric_log(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUDIT_LOG_PATH", str(tmp_path))
    monkeypatch.setenv("METRIC_PATH", str(tmp_path))
    memory = in_memory_span_exporter.InMemorySpanExporter()
    wanted = exports.wanted(memory)
    for each in wanted:
        each.run()
    job_id = ran("fails", args={"token": "c4nary\x1b"})
    for each in wanted:
        each.run()
        each.stop()
    audit = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    metric = [json.loads(line) for line in (tmp_path / "metric.log").read_text().splitlines()]
    assert [each["event"] for each in audit] == ["claimed", "failed"]
    assert {each["job_id"] for each in audit} == {job_id}
    assert audit[1]["error"] == "ValueError: token=***"
    (line,) = metric
    assert (line["job_id"], line["outcome"], line["task"]) == (job_id, "failed", "fails")
    assert line["duration_s"] >= 0 and line["wait_s"] >= 0
    assert int(line["trace_id"], 16) == spans_of(memory)["job fails"].context.trace_id


@pytest.mark.parametrize("value", ["some", "true"])
def test_a_wrong_setting_is_refused(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_SPANS", value)
    with pytest.raises(errors.InvalidConfig, match="all, traced"):
        exports.wanted()
