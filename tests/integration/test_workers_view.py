"""`queue-workflows workers`: every state, switches with their reason, and absent workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from queue_workflows import workers
from tests.support import console, factories, tabled, transitions, worker_reports

Row = dict[str, Any]


def worker(conn: Any, state: str = "idle", *, age_s: float = 0, **columns: Any) -> str:
    """A worker's row as it reported `age_s` ago; its id."""
    given = {"worker_id": "w1", "host_label": "box", "queue": "cpu", "pid": 7} | columns
    worker_id = factories.insert(conn, "workers", state=state, **given)["worker_id"]
    conn.execute(
        "UPDATE workers SET last_seen = now() - %s * interval '1 second' WHERE worker_id = %s",
        (age_s, worker_id),
    )
    return worker_id


def off(conn: Any, queue: str = "cpu", *, age_s: float = 0, **columns: Any) -> None:
    """A switch thrown by plain SQL `age_s` ago."""
    given = {"host_label": "box", "queue": queue, "desired_state": "off"} | columns
    factories.insert(conn, "worker_controls", **given)
    conn.execute(
        "UPDATE worker_controls SET updated_at = now() - %s * interval '1 second' WHERE queue = %s",
        (age_s, queue),
    )


def absent() -> Sequence[Row]:
    """What is listed of switches without a live worker."""
    return [row for row in workers.list() if row["state"] == workers.ABSENT]


def busy(conn: Any, worker_id: str = "w1") -> str:
    factories.node(conn)
    return transitions.claim_node(conn, transitions.who(worker_id=worker_id))["id"]


def only() -> Row:
    (row,) = workers.list(absent=False)
    return row


# --- states


@pytest.mark.parametrize("state", ["idle", "busy", "parked", "paused", "draining"])
def test_a_worker_that_is_on_is_busy_when_it_holds_a_job(conn: Any, state: str) -> None:
    job_id = busy(conn)
    worker(conn, state)
    row = only()
    assert (row["state"], row["desired_state"], row["job_ids"]) == ("busy", "on", [job_id])
    conn.execute("DELETE FROM workflow_node_jobs")
    assert only()["state"] == "idle"


@pytest.mark.parametrize(
    ("policy", "holds", "state"),
    [
        ("hard", False, "parked"),
        ("drain", False, "parked"),
        ("pause", False, "paused"),
        ("hard", True, "draining"),
        ("drain", True, "draining"),
        ("pause", True, "draining"),
    ],
)
def test_a_switch_shows_before_the_workers_next_report(
    conn: Any, policy: str, holds: bool, state: str
) -> None:
    if holds:
        busy(conn)
    worker(conn, "busy" if holds else "idle", age_s=8)
    off(conn, stop_policy=policy, age_s=2)
    assert (only()["state"], only()["stop_policy"]) == (state, policy)


@pytest.mark.parametrize("state", ["parked", "paused", "draining"])
def test_a_worker_that_reported_its_obedience_is_shown_obeying(conn: Any, state: str) -> None:
    worker(conn, state)
    off(conn, age_s=60)
    assert only()["state"] == "parked"


def test_a_worker_that_ignores_switches_is_not_shown_as_off(conn: Any) -> None:
    worker(conn, "idle", age_s=1)
    off(conn, age_s=60)
    assert (only()["state"], only()["desired_state"]) == ("idle", "off")


@pytest.mark.parametrize("state", ["throttled", "dead"])
def test_a_state_that_no_switch_explains_stays(conn: Any, state: str) -> None:
    worker(conn, state)
    off(conn)
    assert only()["state"] == state


LIMITS: list[tuple[Row, str]] = [
    ({"paused_at": "2020-01-01"}, "its queue is paused"),
    ({"max_running": 1}, "1 at once"),
    ({"rate_limit": 1, "rate_period_s": 60}, "1/m"),
    ({"partition_max_running": 1}, "limits of its partitions"),
]


@pytest.mark.parametrize(("limit", "words"), LIMITS)
def test_an_idle_worker_whose_queue_is_limited_is_throttled(
    conn: Any, limit: Row, words: str
) -> None:
    worker(conn, queue="fetch")
    worker(conn, queue="load", worker_id="w2")
    pausing = "paused_at" in limit
    factories.insert(conn, "queue_settings", queue="fetch", **({} if pausing else limit))
    for _ in range(2):
        factories.ingest(conn, partition_key="p")
    assert {row["state"] for row in workers.list(absent=False)} == {"idle"}, "one may start"
    transitions.claim_ingest(conn, transitions.who("fetch", worker_id="other"))
    if pausing:
        conn.execute("UPDATE queue_settings SET paused_at = now()")
    rows = workers.list(absent=False)
    assert {row["queue"]: row["state"] for row in rows} == {"fetch": "throttled", "load": "idle"}
    assert {row["throttle"] for row in rows} == {words, None}
    assert words in console.printed("workers")
    conn.execute("DELETE FROM ingest_jobs WHERE status = 'queued'")
    assert {row["state"] for row in workers.list(absent=False)} == {"idle"}, "nothing is due"


def test_a_throttled_worker_with_a_job_is_busy_and_one_that_is_off_parked(conn: Any) -> None:
    job = busy(conn)
    worker(conn)
    worker(conn, worker_id="w2", host_label="attic")
    off(conn, host_label="attic")
    factories.insert(conn, "queue_settings", queue="cpu", paused_at="2020-01-01")
    factories.node(conn, node_id="late")
    rows = workers.list(absent=False)
    assert [(row["state"], row["throttle"]) for row in rows] == [("parked", None), ("busy", None)]
    conn.execute("UPDATE worker_controls SET desired_state = 'on'")
    conn.execute("DELETE FROM workflow_node_jobs WHERE id = %s", (job,))
    assert {row["state"] for row in workers.list(absent=False)} == {"throttled"}


def test_a_worker_that_stopped_is_not_listed(conn: Any) -> None:
    worker(conn, "stopped")
    assert workers.list(absent=False) == []


@pytest.mark.parametrize(
    ("detail", "death"),
    [
        ({"signal": 9, "exit_code": None}, "killed by SIGKILL"),
        ({"signal": 64, "exit_code": None}, "killed by SIGRTMAX"),
        ({"signal": 99}, "killed by signal 99"),
        ({"exit_code": 77, "signal": None}, "ended with exit code 77"),
        ({"lease_s": 600}, "no heartbeat"),
    ],
)
def test_a_dead_worker_is_listed_with_its_cause_of_death(
    conn: Any, detail: Row, death: str
) -> None:
    worker(conn, "dead", detail=Jsonb(detail))
    assert only()["death"] == death


def test_a_worker_gone_stale_is_dead_and_shows_its_flag(conn: Any) -> None:
    worker(conn, "busy", age_s=95)
    factories.insert(
        conn, "worker_heartbeats", host_label="box", queue="cpu", current_model="m",
        last_flagged_dead_at="2026-01-02T03:04:05Z",
    )  # fmt: skip
    row = only()
    assert (row["state"], row["current_model"], row["death"]) == ("dead", "m", "no heartbeat")
    assert row["last_flagged_dead_at"].year == 2026
    line = console.printed("workers").splitlines()[1]
    assert re.search(r"1 min [34]\d s ago  no heartbeat, flagged$", line)


# --- switches


def test_a_switch_is_shown_with_who_why_and_until_when(conn: Any) -> None:
    worker(conn)
    off(conn, stop_policy="drain", requested_by="ops", reason="new disk")
    conn.execute("UPDATE worker_controls SET until_at = now() + interval '95 seconds'")
    row = only()
    assert [row[k] for k in ("stop_policy", "requested_by", "reason")] == [
        "drain",
        "ops",
        "new disk",
    ]
    assert 90 < row["until_s"] <= 95
    assert row["until_at"] > row["switched_at"]
    line = console.printed("workers").splitlines()[1]
    assert re.search(r"drain by ops, on again in 1 min [23]\d s: new disk$", line)
    assert line.split()[:5] == ["box", "cpu", "7", "parked", "off"]


def test_a_switch_whose_time_is_over_counts_no_more(conn: Any) -> None:
    worker(conn, "parked")
    off(conn, reason="lunch")
    conn.execute("UPDATE worker_controls SET until_at = now()")
    row = only()
    assert (row["state"], row["desired_state"], row["reason"]) == ("idle", "on", None)
    conn.execute("DELETE FROM workers")
    assert absent() == []


def test_the_switch_of_all_queues_counts_for_each_and_hard_wins(conn: Any) -> None:
    worker(conn)
    worker(conn, worker_id="w2", queue="gpu")
    worker(conn, worker_id="w3", host_label="other")
    off(conn, "all", stop_policy="hard", reason="power")
    off(conn, "gpu", stop_policy="pause", reason="heat")
    assert [(r["state"], r["reason"]) for r in workers.list(absent=False)] == [
        ("parked", "power"), ("parked", "power"), ("idle", None),
    ]  # fmt: skip
    conn.execute("UPDATE worker_controls SET stop_policy = 'drain' WHERE queue = 'all'")
    assert [r["reason"] for r in workers.list(absent=False)] == ["power", "heat", None]


def test_the_view_and_the_claim_agree_on_which_switch_counts(conn: Any) -> None:
    worker(conn)
    for all_policy in ("hard", "drain", "pause"):
        for policy in ("hard", "drain", "pause"):
            conn.execute("DELETE FROM worker_controls")
            off(conn, "all", stop_policy=all_policy)
            off(conn, "cpu", stop_policy=policy)
            assert only()["stop_policy"] == workers.policy_in_force("box", "cpu")


# --- nobody there


def test_a_switch_without_a_live_worker_is_shown(conn: Any) -> None:
    worker(conn, "dead")
    off(conn, "cpu", reason="broken fan")
    off(conn, "all", requested_by="ops")
    rows = absent()
    assert [(r["queue"], r["state"], r["worker_id"], r["job_ids"]) for r in rows] == [
        ("all", "absent", None, []), ("cpu", "absent", None, []),
    ]  # fmt: skip
    assert {tuple(row) for row in [*rows, only()]} == {tuple(only())}
    lines = [" ".join(line.split()) for line in console.printed("workers").splitlines()]
    assert "box cpu - absent off - hard: broken fan" in lines


def test_a_switch_with_a_live_worker_is_shown_once(conn: Any) -> None:
    worker(conn, "parked")
    off(conn, "cpu")
    off(conn, "all")
    assert absent() == []


def test_a_switch_that_is_on_needs_nobody(conn: Any) -> None:
    off(conn, desired_state="on")
    assert absent() == []


MEMORY = "RAM at 93.1 % (limit 90 %)"


def test_a_worker_that_waits_for_memory_is_throttled_by_it(conn: Any) -> None:
    worker(conn, "throttled", detail=Jsonb({"throttle": MEMORY}))
    assert (only()["state"], only()["throttle"]) == ("throttled", MEMORY)
    assert MEMORY in console.printed("workers")


def test_a_busy_worker_shows_for_which_memory_it_claims_nothing_more(conn: Any) -> None:
    busy(conn)
    worker(conn, "throttled", detail=Jsonb({"throttle": MEMORY}))
    assert (only()["state"], only()["throttle"]) == ("busy", MEMORY)


def test_memory_comes_before_the_limits_of_the_queue(conn: Any) -> None:
    worker(conn, "throttled", queue="fetch", detail=Jsonb({"throttle": MEMORY}))
    factories.insert(conn, "queue_settings", queue="fetch", paused_at="2020-01-01")
    factories.ingest(conn)
    assert only()["throttle"] == MEMORY


@pytest.mark.parametrize("state", ["parked", "dead"])
def test_a_worker_that_would_not_claim_anyway_waits_for_no_memory(conn: Any, state: str) -> None:
    worker(conn, state, detail=Jsonb({"throttle": MEMORY}))
    off(conn)
    assert (only()["state"], only()["throttle"]) == (state, None)


@pytest.mark.parametrize("detail", [None, [], "x", {"throttle": 5}, {"throttle": {"a": 1}}])
def test_a_report_of_any_shape_can_be_listed(conn: Any, detail: Any) -> None:
    worker(conn, "throttled", detail=Jsonb(detail))
    assert (only()["state"], only()["throttle"]) == ("throttled", None)


# --- whose jobs fill the memory


def test_which_workers_have_jobs_that_fill_a_memory(conn: Any) -> None:
    cases: list[Any] = [
        ({}, True),
        ({"job_ids": []}, False),
        ({"state": "stopped"}, False),
        ({"state": "dead"}, False),
        ({"age_s": 31}, False),
        ({"worker_id": "own"}, False),
        ({"detail": Jsonb({"memory": ["m3"]})}, False),
        ({"detail": Jsonb({"memory": "m1"})}, True),
        ({"detail": Jsonb({})}, False),
        ({"detail": Jsonb(None)}, False),
        ({"detail": Jsonb([1])}, False),
    ]
    for columns, fills in cases:
        with tabled.undone(conn, columns, fills):
            given: Row = {
                "state": "busy",
                "job_ids": ["j"],
                "detail": Jsonb({"memory": ["m0", "m1"]}),
            }
            worker(conn, **given | columns)
            found = worker_reports.fill_memory(conn, ["m1", "m2"], but=["own"], stale_s=30.0)
            assert found == fills
