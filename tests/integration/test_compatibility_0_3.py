"""Functions and tables behave for apps that were written for version 0.3.0."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    config,
    errors,
    ingest_executor,
    jobs,
    model_cache,
    model_registry,
    node_executor,
    node_queue,
    runs,
    tasks,
    workers,
)
from queue_workflows.types import Row
from tests.support import factories, flow, tabled, transitions


def test_none_is_not_passed_to_configure() -> None:
    config.configure(
        db_url_env="APP_DB",
        node_module_package="app.nodes",
        ingest_queues={"x"},
        host_label_env="H",
    )
    found = config.configure(
        db_url_env=None,
        video_model_ids=None,
        node_module_package=None,
        host_label_env=None,
        host_priority_env=None,
        container_prefix=None,
        ingest_queues=None,
        ingest_default_budget_s=None,
    )
    assert (found.db_url_env, found.node_module_package) == ("APP_DB", "app.nodes")
    assert (found.ingest_queues, found.host_label_env) == ({"x"}, "H")
    assert found.container_prefix == "ai_leads-"


def test_there_is_always_a_registrar_of_models() -> None:
    config.get_config().builtin_model_registrar()
    assert not model_registry.known_ids()


def asked(toy: flow.Flow, widget: str, answer: str, **keys: Any) -> dict[str, Any]:
    """Return the question of a run that a person then answers so."""
    toy.define({"id": "it", "kind": "input", "widget": widget, "target": "answer", **keys})
    run_id = toy.started()
    assert node_queue.mark_awaiting_input(flow.job(run_id, "it")["id"]) is not None
    toy.look()
    runs.answer(run_id, "it", answer, check=True)
    return flow.job(run_id, "it")["input_spec"]


@pytest.mark.parametrize("key", ["options", "turnout_options"])
def test_turnout_offers_what_either_key_names(toy: flow.Flow, key: str) -> None:
    options: Any = {key: ["left", {"label": "Right", "value": "r"}]}
    assert asked(toy, "turnout", "r", **options)["turnout_options"] == [
        {"label": "left", "value": "left"},
        {"label": "Right", "value": "r"},
    ]


def test_an_upload_without_accept_takes_any_file_and_a_missing_prompt_is_empty(
    toy: flow.Flow,
) -> None:
    spec = asked(toy, "file_upload", "any.bin")
    assert (spec["accept"], spec["prompt"]) == ("*/*", "")


def test_a_skipped_job_needs_no_module(db: ModuleType) -> None:
    with db.connection() as conn:
        factories.run(conn, id="r")
    job = node_queue.get_node_job(node_queue.insert_skipped_job(run_id="r", node_id="a/b"))
    assert job is not None
    assert (job["status"], job["node_module"]) == ("skipped", "a/b")


NODE: dict[str, Any] = {
    "run_id": "r", "node_id": "n", "node_module": "m", "queue": "gpu", "required_model": "sd",
    "inputs": {"a": 1, "b": [1.5, "x"]}, "pipeline_name": "p",
}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"node_module": "m2"},
        {"queue": "cpu", "required_model": None},
        {"required_model": "xl"},
        {"inputs": {"a": 2}},
        {"inputs": None},
        {"pipeline_name": None},
    ],
)
def test_a_second_node_of_one_id_with_other_content_is_refused(
    db: ModuleType, other: dict[str, Any]
) -> None:
    with db.connection() as conn:
        factories.run(conn, id="r")
    first = node_queue.enqueue_node_job(**NODE)
    before = node_queue.get_node_job(first)
    with pytest.raises(psycopg.errors.UniqueViolation, match="'r' has a node 'n' already") as seen:
        node_queue.enqueue_node_job(**NODE | other)
    assert isinstance(seen.value, errors.NodeTaken)
    assert (seen.value.sqlstate, seen.value.diag.sqlstate) == ("23505", None)
    assert isinstance(pickle.loads(pickle.dumps(seen.value)), errors.NodeTaken)
    assert node_queue.get_node_job(first) == before
    # The same once more is the repetition of a call whose reply was lost.
    assert node_queue.enqueue_node_job(**NODE | {"priority": 5}) == first
    assert node_queue.get_node_job(first) == before


def test_a_node_that_is_there_is_not_skipped_silently(db: ModuleType) -> None:
    with db.connection() as conn:
        factories.run(conn, id="r")
    node_queue.enqueue_node_job(**NODE)
    with pytest.raises(errors.NodeTaken, match="which is queued"):
        node_queue.insert_skipped_job(run_id="r", node_id="n")
    skipped = node_queue.insert_skipped_job(run_id="r", node_id="s", node_module="m")
    assert node_queue.insert_skipped_job(run_id="r", node_id="s", node_module="m") == skipped
    with pytest.raises(errors.NodeTaken, match="with other content"):
        node_queue.enqueue_node_job(run_id="r", node_id="s", node_module="m", queue="cpu")


def test_an_event_has_an_id_and_none_where_it_was_not_recorded(db: ModuleType) -> None:
    with db.connection() as conn:
        factories.run(conn, id="r")
    first = node_queue.record_node_event(run_id="r", node_id="n", event_type="error")
    second = node_queue.record_node_event(run_id="r", node_id="n", event_type="error")
    assert first is not None
    assert second is not None
    assert second > first
    assert node_queue.record_node_event(run_id="r", node_id="n", event_type="no such type") is None


def test_an_event_of_an_unknown_run_is_not_stored(
    db: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    stored = node_queue.record_node_event(run_id="gone", node_id="n", event_type="error")
    assert stored is None
    assert "no run 'gone'" in caplog.text
    with db.connection() as conn:
        assert factories.one(conn, "SELECT count(*) FROM workflow_node_events") == 0


@pytest.mark.parametrize("table", ["workflow_runs", "workflow_node_jobs", "ingest_jobs"])
def test_truncate_takes_what_belongs_to_the_rows(db: ModuleType, table: str) -> None:
    with db.connect() as conn:
        node, task = factories.node(conn), factories.ingest(conn)
        for job in (node, task):
            kind = transitions.TABLES[transitions.kind_of(job)]
            conn.execute(
                "INSERT INTO job_attempt_logs (job_table, job_id, claim_no) VALUES (%s, %s, 1)",
                (kind, job["id"]),
            )
        node_queue.record_node_event(
            run_id=node["run_id"], node_id=node["node_id"], event_type="error"
        )
        conn.execute(f"TRUNCATE {table} CASCADE")
        left = (
            factories.one(conn, "SELECT count(*) FROM workflow_node_events"),
            factories.column(conn, "SELECT job_table FROM job_attempt_logs"),
        )
    assert (
        left
        == {
            "workflow_runs": (0, ["ingest_jobs"]),
            "workflow_node_jobs": (1, ["ingest_jobs"]),
            "ingest_jobs": (1, ["workflow_node_jobs"]),
        }[table]
    )


def test_clearing_a_model_returns_the_row_or_none(db: ModuleType) -> None:
    assert node_queue.clear_worker_current_model("box", "gpu") is None
    node_queue.upsert_worker_heartbeat(
        host_label="box", queue="gpu", concurrency=1, current_model="sd"
    )
    row = node_queue.clear_worker_current_model("box", "gpu", mark_stale=False)
    assert row is not None
    assert (row["host_label"], row["current_model"]) == ("box", None)


def test_flagged_workers_say_how_many_jobs_they_run(db: ModuleType) -> None:
    with db.connection() as conn:
        conn.execute(
            "INSERT INTO worker_heartbeats (host_label, queue, concurrency, last_seen)"
            " VALUES ('box', 'fetch', 1, now() - interval '1 hour'),"
            " ('idle', 'fetch', 1, now() - interval '1 hour')"
        )
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, status, claimed_by, worker_id, claim_no,"
            " lease_expires_at) SELECT 't', 'fetch', 'running', 'box', 'w', 1, now()"
            " + interval '1 minute' FROM generate_series(1, 2)"
        )
    (row,) = node_queue.flag_stale_workers_holding_running_jobs()
    assert (row["host_label"], row["running_jobs"]) == ("box", 2)
    assert row["last_flagged_dead_at"] is not None
    assert node_queue.flag_stale_workers_holding_running_jobs() == []


def test_reap_idle_once_works_while_the_reaper_thread_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    model_registry.register(model_registry.ModelSpec("a", object))
    cache = model_cache.ModelCache(idle_ttl_s=1, now_fn=lambda: now)
    cache.require_model("a")
    now = 100.0
    monkeypatch.setenv("AI_LEADS_DISABLE_GPU_IDLE_REAPER", "1")
    assert cache.reap_idle_once() is True
    assert cache.current_model is None


GONE = ("claimed_by", "worker_id", "lease_expires_at", "started_at")


def _requeue_by_reclaim(conn: Any, job: Row) -> None:
    transitions.expire(conn, job)
    transitions.reclaim_lapsed(conn, transitions.kind_of(job))


def _requeue_by_sql(conn: Any, job: Row) -> None:
    table = transitions.TABLES[transitions.kind_of(job)]
    conn.execute(f"UPDATE {table} SET status = 'queued' WHERE id = %s", (job["id"],))


def _requeue_by_sql_without_owner(conn: Any, job: Row) -> None:
    table = transitions.TABLES[transitions.kind_of(job)]
    conn.execute(
        f"UPDATE {table} SET status = 'queued', claimed_by = NULL WHERE id = %s", (job["id"],)
    )


WAYS: dict[str, Callable[[Any, Row], object]] = {
    "reclaim": _requeue_by_reclaim,
    "plain SQL": _requeue_by_sql,
    "plain SQL that clears the owner": _requeue_by_sql_without_owner,
    "hand-back": transitions.hand_back,
    "hand-back of all": lambda conn, job: transitions.hand_back_all(conn, [job]),
    "OFF": lambda conn, job: transitions.hand_back(conn, job, "off", front=True),
    "retry": lambda conn, job: transitions.fail(conn, job, most=2),
    "dead process": lambda conn, job: transitions.reclaim_dead(
        conn, transitions.kind_of(job), job["worker_id"]
    ),
}


@pytest.mark.parametrize("family", ["node", "ingest"])
def test_a_job_that_goes_back_belongs_to_nobody(db: ModuleType, family: str) -> None:
    for way in WAYS:
        with tabled.case(way), db.connect() as conn:
            goes_back(conn, family, way)
            factories.empty(conn, "workflow_runs", "ingest_jobs")


def goes_back(conn: Any, family: str, way: str) -> None:
    if family == "node":
        factories.node(conn)
        job = transitions.claim_node(conn)
    else:
        factories.ingest(conn)
        job = transitions.claim_ingest(conn)
    WAYS[way](conn, job)
    now = factories.reread(conn, job)
    assert now["status"] == "queued"
    assert {name: now[name] for name in GONE} == dict.fromkeys(GONE)
    if family == "ingest" or "SQL" not in way:  # what plain SQL does to nodes is not recorded
        events = transitions.EVENTS[transitions.kind_of(job)]
        host = factories.column(
            conn,
            f"SELECT host_label FROM {events} WHERE job_id = %s"
            " AND event_type IN ('requeued', 'reclaimed', 'retried')",
            job["id"],
        )
        assert host == [job["claimed_by"]]


def test_a_watchdog_puts_its_node_to_the_front(db: ModuleType) -> None:
    with db.connect() as conn:
        factories.node(conn, priority=100)
        first = transitions.end_by_watchdog(conn, transitions.claim_node(conn))
        assert first is not None
        assert (first["status"], first["priority"], first["claimed_by"]) == ("queued", 10, None)


@pytest.mark.parametrize("models", [None, ["sd"]])
@pytest.mark.parametrize("priority", [1, -1])
def test_a_gpu_worker_without_a_model_prefers_jobs_without_one(
    db: ModuleType, models: list[str] | None, priority: int
) -> None:
    with db.connect() as conn:
        run = factories.run(conn)
        for node, model in (("a", "sd"), ("b", None), ("c", "sd"), ("d", None)):
            factories.node(conn, run, node, queue="gpu", required_model=model)
    claimed = [
        node_queue.claim_next_gpu_job(host="box", known_models=models, host_priority=priority)
        for _ in range(4)
    ]
    order = [job["node_id"] for job in claimed if job is not None]
    assert order == (["b", "d", "a", "c"] if priority > 0 else ["d", "b", "c", "a"])


@pytest.fixture
def ran() -> list[str]:
    """The calls of the handlers of node `m` and of task `t`."""
    calls: list[str] = []
    config.register_node("m", lambda: calls.append("node"))
    config.register_ingest_task("t", lambda reason: calls.append(reason))
    return calls


def _read(job: Row) -> Row:
    row = jobs.get(job["id"], kind=transitions.kind_of(job))
    assert row is not None
    return {**row}


def _execute(job: Row) -> str:
    if transitions.kind_of(job) == "node":
        return node_executor.execute_node(job)
    return ingest_executor.execute_ingest_job(job)


def _one_of_each(conn: Any) -> tuple[Row, Row]:
    return factories.node(conn, node_module="m"), factories.ingest(conn, task_name="t")


@pytest.mark.usefixtures("invariants_hold")
def test_a_queued_job_is_claimed_and_then_run(db: ModuleType, ran: list[str]) -> None:
    with db.connect() as conn:
        for job in _one_of_each(conn):
            queued = _read(job)
            assert _execute(queued) == "completed"
            now = _read(job)
            assert (now["status"], now["claim_no"]) == ("completed", 1)
            assert now["claimed_by"] == config.host_label()
            events = transitions.EVENTS[transitions.kind_of(job)]
            told = f"SELECT event_type FROM {events} WHERE job_id = %s ORDER BY id"
            assert factories.column(conn, told, job["id"])[-2:] == ["claimed", "completed"]
            # The row is of a time before the job ended.
            assert _execute(queued) == "skipped"
            assert _execute(now) == "skipped"
    assert len(ran) == 2


def _held_by_another(conn: Any, job: Row) -> None:
    queue = job["queue"]
    assert transitions.claim(conn, transitions.who(queue, "box-2:1:abcdef01:0123"))


def _claimed_by_plain_sql(conn: Any, job: Row) -> None:
    table = transitions.TABLES[transitions.kind_of(job)]
    conn.execute(
        f"UPDATE {table} SET status = 'running', claimed_by = 'box-2' WHERE id = %s",
        (job["id"],),
    )


def _claimed_here_for_another_host(conn: Any, job: Row) -> None:
    del conn
    claimed = (
        node_queue.claim_next_cpu_job(host="box-2")
        if job["queue"] == "cpu"
        else node_queue.claim_next_ingest_job(job["queue"], host="box-2")
    )
    assert claimed is not None


def _cancelled(conn: Any, job: Row) -> None:
    table = transitions.TABLES[transitions.kind_of(job)]
    conn.execute(
        f"UPDATE {table} SET status = 'cancelled' WHERE id = %s",
        (job["id"],),
    )


def _switched_off(conn: Any, job: Row) -> None:
    del conn
    workers.disable(config.host_label(), job["queue"])


def _paused(conn: Any, job: Row) -> None:
    conn.execute(
        "INSERT INTO queue_settings (queue, paused_at) VALUES (%s, now())", (job["queue"],)
    )


def _limited(conn: Any, job: Row) -> None:
    """Let another job of its queue take the only place that the queue's limit has."""
    transitions.claimed(conn, "ingest", queue=job["queue"], priority=-1)
    conn.execute("INSERT INTO queue_settings (queue, max_running) VALUES (%s, 1)", (job["queue"],))


def _not_due(conn: Any, job: Row) -> None:
    table = transitions.TABLES[transitions.kind_of(job)]
    conn.execute(
        f"UPDATE {table} SET available_at = now() + interval '1 hour', blocked_reason = 'not_due'"
        " WHERE id = %s",
        (job["id"],),
    )


NOT_OURS: list[Callable[[Any, Row], None]] = [
    _held_by_another, _claimed_by_plain_sql, _claimed_here_for_another_host, _cancelled,
    _switched_off, _paused, _limited, _not_due,
]  # fmt: skip


@pytest.mark.parametrize("change", NOT_OURS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("is_read_before", [True, False])
def test_a_job_that_cannot_be_had_is_skipped_before_its_handler_runs(
    db: ModuleType,
    ran: list[str],
    change: Callable[[Any, Row], None],
    is_read_before: bool,
) -> None:
    with db.connect() as conn:
        for job in _one_of_each(conn):
            if change is _limited and transitions.kind_of(job) == "node":
                continue  # limits are of ingest queues
            before = _read(job)
            change(conn, job)
            now = _read(job)
            assert _execute(before if is_read_before else now) == "skipped"
            assert _read(job) == now
    assert ran == []


def test_a_job_is_run_within_the_limit_of_its_queue(db: ModuleType, ran: list[str]) -> None:
    with db.connect() as conn:
        job = factories.ingest(conn, task_name="t")
        conn.execute(
            "INSERT INTO queue_settings (queue, max_running) VALUES (%s, 1)", (job["queue"],)
        )
        assert _execute(_read(job)) == "completed"
    assert len(ran) == 1


def test_a_run_that_is_over_keeps_its_queued_node(db: ModuleType, ran: list[str]) -> None:
    with db.connect() as conn:
        node = factories.node(conn, node_module="m")
        conn.execute("SET session_replication_role = replica")  # no trigger cancels the node
        conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (node["run_id"],))
        conn.execute("RESET session_replication_role")
    assert _execute(_read(node)) == "skipped"
    assert ran == []


def test_a_claim_of_this_process_is_run_as_it_was_returned_or_read_again(
    db: ModuleType, ran: list[str]
) -> None:
    with db.connect() as conn:
        run = factories.run(conn)
        for name in ("a", "b", "c"):
            factories.node(conn, run, name, node_module="m")
        factories.ingest(conn, task_name="t")
    first = node_queue.claim_next_cpu_job(host="box-2")
    assert first is not None
    assert _execute(pickle.loads(pickle.dumps(first))) == "completed"
    again = node_queue.claim_next_cpu_job()
    assert again is not None
    assert _execute(_read(again)) == "completed"
    task = node_queue.claim_next_ingest_job("fetch")
    assert task is not None
    assert _execute(_read(task)) == "completed"
    lost = node_queue.claim_next_cpu_job()
    assert lost is not None
    with db.connect() as conn:
        transitions.expire(conn, lost)
        transitions.reclaim_lapsed(conn, "node")
    assert _execute(lost) == "skipped"
    assert len(ran) == 3


class _OnlyRequires:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def require_model(self, model_id: str) -> str:
        self.asked.append(model_id)
        return f"handle of {model_id}"


class _Counts(_OnlyRequires):
    busy = 0
    most = 0

    def mark_busy(self) -> None:
        self.busy += 1
        self.most = max(self.most, self.busy)

    def mark_idle(self) -> None:
        self.busy -= 1


@pytest.mark.parametrize("cache", [_OnlyRequires(), _Counts()])
def test_a_model_cache_needs_no_more_than_require_model(
    db: ModuleType, cache: _OnlyRequires
) -> None:
    got: list[str] = []
    config.register_node("m", lambda model_handle: got.append(model_handle))
    with db.connect() as conn:
        run = factories.run(conn)
        for node_id in ("a", "b"):
            factories.node(conn, run, node_id, queue="gpu", required_model="sd", node_module="m")
        claimed = node_queue.claim_next_gpu_job(host="box")
        assert claimed is not None
        assert node_executor.execute_node(claimed, model_cache=cache) == "completed"
    worker = claim_worker.ClaimWorker(queue="gpu", host="box", model_cache=cache)
    assert worker.run_once() is True
    assert got == ["handle of sd"] * 2
    assert cache.asked == ["sd"] * 2
    if isinstance(cache, _Counts):
        assert (cache.busy, cache.most) == (0, 1)


def test_the_name_of_0_3_0_queues_with_its_own_default_priority(db: ModuleType) -> None:
    queue_workflows.configure(ingest_queues={"prices"})
    tasks.register_ingest_task("prices", lambda: None, queue="prices", priority=7)
    named = node_queue.enqueue_ingest_job(task_name="prices", queue="prices")
    declared = jobs.enqueue("prices")
    assert {row["id"]: row["priority"] for row in jobs.list()} == {named: 100, declared: 7}
