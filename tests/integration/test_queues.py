"""Pausing and limiting queues: functions, command, `why`, `status`, and the worker."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import claim_worker, config, errors, node_queue, queues
from queue_workflows import jobs as jobs_api
from tests.support import console, factories, tabled, transitions
from tests.support.wait import until


def of(queue: str = "fetch") -> dict[str, Any]:
    (row,) = [row for row in queues.list() if row["queue"] == queue]
    return row


def printed(*arguments: str) -> str:
    return console.printed("queues", *arguments)


def test_a_queue_without_settings_is_open(db: ModuleType) -> None:
    row = of()
    assert row["state"] == "open"
    assert (row["ready"], row["rate"], row["max_running"], row["partitions"]) == (0, None, None, [])


def test_a_queue_with_waiting_jobs_and_no_worker_can_be_paused(db: ModuleType) -> None:
    with db.transaction() as conn:
        factories.ingest(conn, task_name="fetch", queue="rails")
    assert queues.pause("rails")["queue"] == "rails"
    assert of("rails")["state"] == "paused"
    assert queues.resume("rails")


def test_pause_and_resume(db: ModuleType) -> None:
    at = datetime.now(timezone.utc) + timedelta(hours=1)
    queues.pause("fetch", until=at, by="ana")
    assert (of()["state"], of()["paused_until"], of()["paused_by"]) == ("paused", at, "ana")
    since = queues.pause("fetch", until=timedelta(minutes=5))["paused_at"]
    assert queues.pause("fetch")["paused_at"] == since
    assert of()["paused_until"] is None
    assert queues.resume("fetch")
    assert not queues.resume("fetch")
    assert of()["state"] == "open"


def test_a_pause_that_has_run_out_is_none(db: ModuleType) -> None:
    first = queues.pause("fetch", until=timedelta(hours=1))["paused_at"]
    with db.connect() as conn:
        conn.execute("UPDATE queue_settings SET paused_until = now() - interval '1 s'")
    assert (of()["state"], of()["paused_until"]) == ("open", None)
    assert queues.pause("fetch")["paused_at"] > first


def test_a_limit_of_a_partition_that_is_not_named_stays(db: ModuleType) -> None:
    queues.limit("load", partition="a", max_running=1)
    queues.limit("load", partition="a", rate="7/m")
    (part,) = of("load")["partitions"]
    assert (part["max_running"], part["rate"]) == (1, "7/m")


def test_a_partition_without_settings_is_deleted(db: ModuleType) -> None:
    queues.pause("load", partition="a", by="ana")
    queues.limit("load", partition="b", max_running=3, rate="5/30s")
    a, b = of("load")["partitions"]
    assert (a["partition"], a["state"], a["paused_by"]) == ("a", "paused", "ana")
    assert (b["max_running"], b["rate"], b["state"]) == (3, "5/30s", "open")
    queues.resume("load", partition="a")
    queues.limit("load", partition="b", max_running=None)
    assert [row["rate"] for row in of("load")["partitions"]] == ["5/30s"]
    queues.limit("load", partition="b", rate=None)
    assert of("load")["partitions"] == []


def test_one_queue_has_more_partitions_than_a_list_of_queues(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "PARTITIONS", 2)
    for name in ("c", "a", "b"):
        queues.limit("load", partition=name, max_running=1)
    assert [part["partition"] for part in of("load")["partitions"]] == ["a", "b"]
    assert [part["partition"] for part in queues.get("load")["partitions"]] == ["a", "b", "c"]
    assert queues.get("fetch")["partitions"] == []


def test_a_queue_with_delayed_jobs_alone_is_shown(db: ModuleType) -> None:
    with db.connect() as conn:
        factories.ingest(conn, queue="rails", available_at="2999-01-01")
    assert queues.get("rails")["not_due"] == 1
    with pytest.raises(errors.UnknownQueue):
        queues.get("nobody")


def test_a_queue_of_jobs_of_both_families_counts_them_together(db: ModuleType) -> None:
    with db.connect() as conn:
        factories.ingest(conn, queue="cpu")
        factories.node(conn)
        transitions.claim_node(conn, transitions.who())
    row = of("cpu")
    assert (row["running"], row["ready"], row["in_per_min"]) == (1, 1, 0.4)


def test_a_pause_of_a_partition_that_is_in_force_keeps_its_beginning(db: ModuleType) -> None:
    since = queues.pause("load", partition="a", until=timedelta(minutes=5))["paused_at"]
    assert queues.pause("load", partition="a", by="ana")["paused_at"] == since
    with db.connect() as conn:
        conn.execute("UPDATE queue_partitions SET paused_until = now() - interval '1 s'")
    assert queues.pause("load", partition="a")["paused_at"] > since


def test_a_partition_key_may_be_as_long_as_that_of_a_job(db: ModuleType) -> None:
    queues.limit("fetch", partition="é" * 500, max_running=1)
    assert queues.pause("fetch", partition="é" * 500, by="ana")["paused_by"]
    assert queues.resume("fetch", partition="é" * 500)


def test_limits_are_set_one_by_one_and_taken_off(db: ModuleType) -> None:
    queues.limit("fetch", max_running=4, partition_rate="100/m")
    queues.limit("fetch", rate="1/d", partition_max_running=2)
    row = of()
    assert (row["max_running"], row["rate"]) == (4, "1/d")
    assert (row["partition_max_running"], row["partition_rate"]) == (2, "100/m")
    queues.limit("fetch", max_running=None, rate=None)
    assert (of()["max_running"], of()["rate"], of()["partition_rate"]) == (None, None, "100/m")


def test_a_change_joins_the_callers_transaction(db: ModuleType) -> None:
    with db.connect() as conn, conn.transaction(force_rollback=True):
        queues.pause("fetch", conn=conn)
        queues.limit("fetch", max_running=1, conn=conn)
        assert queues.resume("fetch", conn=conn)
    assert of()["max_running"] is None


REFUSED: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "unknown queue": (errors.UnknownQueue, lambda: queues.pause("nobody")),
    "a queue that is no text": (errors.UnknownQueue, lambda: queues.pause(5)),  # type: ignore[arg-type]
    "a queue with a NUL": (errors.UnknownQueue, lambda: queues.resume("a\x00")),
    "a text as until": (errors.InvalidConfig, lambda: queues.pause("fetch", until="2h")),  # type: ignore[arg-type]
    "a number as until": (errors.InvalidConfig, lambda: queues.pause("fetch", until=3600)),  # type: ignore[arg-type]
    "key that is no text": (errors.InvalidConfig, lambda: queues.pause("fetch", partition=5)),  # type: ignore[arg-type]
    "long key": (errors.InvalidConfig, lambda: queues.pause("fetch", partition="é" * 501)),
    "naive until": (errors.InvalidConfig, lambda: queues.pause("fetch", until=datetime.now())),
    "no span": (errors.InvalidConfig, lambda: queues.pause("fetch", until=timedelta(0))),
    "endless": (errors.InvalidConfig, lambda: queues.pause("fetch", until=timedelta.max)),
    "over": (
        errors.InvalidConfig,
        lambda: queues.pause("fetch", until=datetime(2020, 1, 1, tzinfo=timezone.utc)),
    ),
    "node partition": (errors.InvalidConfig, lambda: queues.pause("cpu", partition="a")),
    "node limit": (errors.InvalidConfig, lambda: queues.limit("gpu", max_running=1)),
    "empty key": (errors.InvalidConfig, lambda: queues.pause("fetch", partition="")),
    "surrogate key": (errors.InvalidConfig, lambda: queues.pause("fetch", partition="\ud800")),
    "nothing": (errors.InvalidConfig, lambda: queues.limit("fetch")),
    "zero": (errors.InvalidConfig, lambda: queues.limit("fetch", max_running=0)),
    "true": (errors.InvalidConfig, lambda: queues.limit("fetch", max_running=True)),
    "partition of one": (
        errors.InvalidConfig,
        lambda: queues.limit("fetch", partition="a", partition_max_running=1),
    ),
}
RATES = ("5", "0/s", "5/0s", "5/y", "-1/s", "5 / s", "1/400d", "1e9/s", "9999999999/s", 5)


def test_a_rate_that_cannot_be_is_refused(db: ModuleType) -> None:
    for rate in RATES:
        with tabled.case(rate):
            with pytest.raises(errors.InvalidConfig, match="N/PERIOD"):
                queues.limit("fetch", rate=rate)
            with pytest.raises(errors.InvalidConfig, match="partition_rate"):
                queues.limit("fetch", partition_rate=rate)


def test_what_cannot_be_is_refused_before_any_write(db: ModuleType) -> None:
    for name in REFUSED:
        with tabled.case(name):
            kind, call = REFUSED[name]
            with pytest.raises(kind) as refused:
                call()
            assert isinstance(refused.value, ValueError)
            with db.connect() as conn:
                assert factories.one(conn, "SELECT count(*) FROM queue_settings") == 0
                assert factories.one(conn, "SELECT count(*) FROM queue_partitions") == 0


def test_how_a_queue_stands_in_figures(db: ModuleType) -> None:
    with db.connect() as conn:
        queues.limit("fetch", partition_max_running=1)
        jobs = [factories.ingest(conn, partition_key="a") for _ in range(3)]
        factories.ingest(conn, lock_key="k")
        factories.ingest(conn, lock_key="k")
        plain = "UPDATE ingest_jobs SET available_at = now() + interval '1 h' WHERE id = %s"
        conn.execute(plain, (jobs[2]["id"],))
        transitions.complete_ingest(conn, transitions.claim_ingest(conn))
        transitions.claim_ingest(conn)
    row = of()
    stand = ("running", "ready", "limited", "locked", "not_due")
    assert [row[name] for name in stand] == [1, 1, 0, 1, 1]
    assert (row["in_per_min"], row["out_per_min"]) == (1.0, 0.2)
    assert 0 <= row["oldest_s"] < 60
    with db.connect() as conn:
        conn.execute(
            "UPDATE ingest_jobs SET blocked_reason = 'unserved' WHERE blocked_reason = 'locked'"
        )
    assert [of()[name] for name in stand] == [1, 1, 0, 1, 1]


def test_a_cancelled_job_has_left_its_queue(db: ModuleType) -> None:
    with db.connect() as conn:
        job = factories.ingest(conn)
    jobs_api.cancel(job["id"])
    assert (of()["in_per_min"], of()["out_per_min"]) == (0.2, 0.2)


def test_why_names_the_limit(db: ModuleType) -> None:
    def reason_of(job: dict[str, Any]) -> tuple[str, str]:
        found = jobs_api.explain(job["id"])
        assert found is not None
        return found["clause"], found["detail"]

    with db.connect() as conn:
        free = factories.ingest(conn)
        queues.pause("fetch", by="ana")
        said = "queue fetch is paused by ana, and no live worker serves its queue"
        assert reason_of(free) == ("paused", said)
        queues.resume("fetch")
        queues.limit("fetch", rate="1/h")
        transitions.claim_ingest(conn)
        job = factories.ingest(conn)
        assert reason_of(job)[1].startswith("queue fetch starts 1/h: the next in 3")
        queues.limit("fetch", rate=None, max_running=1)
        assert reason_of(job) == ("limited", "queue fetch runs its limit of 1")
        queues.limit("fetch", max_running=None)
        queues.limit("fetch", partition="a", max_running=1)
        _, second = (factories.ingest(conn, partition_key="a", priority=1) for _ in range(2))
        for _ in range(2):
            transitions.claim(
                conn, transitions.who("fetch"), on_wait=transitions.on_wait(lambda _: None, 1.0)
            )
        assert reason_of(second)[1] == "it waits for partition a, of which 1 of 1 jobs run"
        queues.limit("fetch", partition="a", max_running=None, rate="1/h")
        conn.execute("SELECT queue_workflows_mend_lines()")
        queues.pause("fetch", partition="a", until=timedelta(hours=1))
        clause, detail = reason_of(second)
        assert (clause, detail[:30]) == ("paused", "partition a is paused until 20")


def test_the_command(db: ModuleType) -> None:
    printed("pause", "fetch", "--until", "2h", "--by", "ana")
    out = printed("limit", "fetch", "--rate", "100/m", "--partition-max-running=2")
    assert "100/m, each partition 2 at once" in out
    assert "by ana" in out
    printed("pause", "load", "--partition", "a")
    assert "load, partition a: paused" in printed("list")
    printed("resume", "fetch")
    printed("limit", "fetch", "--rate", "none")
    (row,) = json.loads(printed("list", "fetch", "--json"))
    assert (row["state"], row["rate"], row["partition_max_running"]) == ("open", None, 2)


def test_the_command_refuses_in_one_line(db: ModuleType) -> None:
    cases: list[Any] = [
        ("pause",),
        ("list", "fetch", "--partition", "a"),
        ("list", "nobody"),
        ("resume", "fetch", "--until", "2h"),
        ("pause", "fetch", "--rate", "1/s"),
        ("pause", "fetch", "--until", "soon"),
        ("limit", "fetch", "--max-running", "many"),
        ("limit", "fetch", "--rate", "many"),
        ("limit", "nobody", "--max-running", "1"),
    ]
    for arguments in cases:
        with tabled.case(arguments):
            console.refusal("queues", *arguments)


def test_status_shows_what_is_paused(db: ModuleType) -> None:
    queues.pause("cpu", by="ana")
    queues.pause("load", partition="a")
    out = console.printed("status")
    assert "queue cpu is paused by ana: `queue-workflows queues resume cpu` resumes it\n" in out
    assert (
        "queue load, partition a is paused: `queue-workflows queues resume load --partition a`"
        in out
    )


@pytest.mark.parametrize("key", [None, "a"])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_worker_sleeps_no_longer_than_until_the_next_is_due(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str | None, batch: int
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "600")
    ran: list[str] = []
    config.register_ingest_task("t", ran.append)
    queues.limit("fetch", partition=key, rate="1/0.3s")
    with db.connect() as conn:
        for _ in range(3):
            factories.ingest(conn, partition_key=key)
    worker = claim_worker.ClaimWorker(queue="fetch", batch=batch)
    thread = threading.Thread(target=worker.run_forever)
    thread.start()
    try:
        until(lambda: len(ran) == 3, timeout_s=60)
    finally:
        worker.stop()
        thread.join()
    with db.connect() as conn:
        started = factories.column(
            conn,
            "SELECT extract(epoch FROM created_at)::float8 FROM ingest_job_events"
            " WHERE event_type = 'claimed' ORDER BY created_at",
        )
    assert all(later - first >= 0.3 - 1e-6 for first, later in itertools.pairwise(started))


def test_the_function_that_apps_claim_by_obeys_too(db: ModuleType) -> None:
    with db.connect() as conn:
        factories.ingest(conn)
    queues.pause("fetch")
    assert node_queue.claim_next_ingest_job("fetch") is None
    queues.resume("fetch")
    assert node_queue.claim_next_ingest_job("fetch") is not None
