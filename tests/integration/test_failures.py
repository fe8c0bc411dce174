"""Failures of jobs and schedules are grouped by their causes, and hidden once somebody saw them."""

from __future__ import annotations

import json
from collections.abc import Generator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import queue_workflows
from queue_workflows import acts, db, errors, failures, schedules
from tests.support import console, database, factories, named_statements

NOW = datetime.now(timezone.utc).replace(microsecond=0)
Row = dict[str, Any]


def failed(conn: Any, error: str | None, minutes: float = 1, **columns: Any) -> str:
    """Insert an ingest job that failed so many minutes ago; return its id."""
    given = {"status": "failed", "error": error, "finished_at": NOW - timedelta(minutes=minutes)}
    return factories.ingest(conn, **(given | columns))["id"]


def failed_node(conn: Any, error: str, minutes: float = 1, **columns: Any) -> Row:
    given = {"status": "failed", "error": error, "finished_at": NOW - timedelta(minutes=minutes)}
    run_id = factories.run(conn, workflow_name=columns.pop("workflow", "w"), status="failed")
    return factories.node(conn, run_id, columns.pop("node_id", "n"), **(given | columns))


def found(**filters: Any) -> dict[str, int]:
    """Return how many failures each signature has."""
    return {group["signature"]: group["count"] for group in failures.list(**filters).groups}


# --- groups ------------------------------------------------------------------------------------


def test_jobs_of_both_families_and_schedules_are_grouped(conn: Any) -> None:
    queue_workflows.register_ingest_task("t", dict)
    failed(conn, "ValueError: row 1 has no price", 9, claimed_by="box-1")
    failed(conn, "ValueError: row 22 has no price", 3, claimed_by="box-2", queue="load")
    node = failed_node(
        conn, "ValueError: row 3 has no price", 2, workflow="cut", claimed_by="box-1"
    )
    failed(conn, None, 1)
    factories.ingest(conn, status="cancelled", finished_at=NOW, error="cancelled")
    schedules.add("nightly", "0 3 * * *", task_name="t", queue="load")
    conn.execute("UPDATE schedules SET error = 'UnknownTask: no task ''t'''")
    page = failures.list()
    assert {group["signature"]: group["count"] for group in page.groups} == {
        "ValueError: row # has no price": 3, "no error was given": 1, "UnknownTask: no task '…'": 1,
    }  # fmt: skip
    group = next(one for one in page.groups if one["count"] == 3)
    assert group["first_at"] == NOW - timedelta(minutes=9)
    assert group["last_at"] == NOW - timedelta(minutes=2)
    assert sum(group["bars"]) == 3 and len(group["bars"]) == failures.BARS
    assert (group["names"], group["machines"]) == (["t", "cut"], ["box-1", "box-2"])
    assert sorted(group["queues"]) == ["cpu", "fetch", "load"]
    last, *others = group["members"]
    assert (last["id"], last["kind"]) == (node["id"], "node job")
    assert (last["run_id"], last["node_id"]) == (node["run_id"], "n")
    assert [row["kind"] for row in others] == ["ingest job"] * 2
    of_schedule = next(one for one in page.groups if one["names"] == ["nightly"])
    assert [(row["kind"], row["id"]) for row in of_schedule["members"]] == [("schedule", "nightly")]
    assert (page.examined, page.is_whole, page.hidden) == (4, True, 0)


def test_a_schedule_that_cannot_fire_failed_at_its_first_missed_instant(conn: Any) -> None:
    """Not whenever somebody looks, which would make it the newest failure."""
    factories.insert(conn, "schedules", name="nightly", expression="0 3 * * *", task_name="t")
    change = "UPDATE schedules SET error = 'E: x', next_at = %s, changed_at = %s"
    changed, soon = NOW - timedelta(hours=5), NOW + timedelta(hours=1)
    missed = NOW - timedelta(minutes=40)
    for next_at, expected in ((None, changed), (soon, changed), (missed, missed)):
        conn.execute(change, [next_at, changed])
        (group,) = failures.list().groups
        assert (group["first_at"], group["last_at"]) == (expected, expected)


def test_failures_without_a_machine_are_counted(conn: Any) -> None:
    for host in ("box-1", "box-1", None):
        failed(conn, "A: x", claimed_by=host)
    (group,) = failures.list().groups
    assert (group["machines"], group["unplaced"]) == (["box-1"], 1)
    listed = console.printed("failures", "list")
    assert "box-1" in listed and "all on" not in listed


def test_the_group_that_failed_last_is_the_first(conn: Any) -> None:
    for name, minutes in (("A", 5), ("B", 1), ("C", 9)):
        failed(conn, f"{name}: x", minutes)
    assert [group["signature"] for group in failures.list().groups] == ["B: x", "A: x", "C: x"]


def test_failures_of_one_instant_are_in_the_order_of_their_ids(conn: Any) -> None:
    """So a page that begins behind one of them has all the others."""
    for job_id in ("b", "a", "c", "é", "z"):
        failed(conn, "B: x" if job_id == "a" else "A: x", id=job_id)
    first, second = failures.list().groups
    assert [row["id"] for row in first["members"]] == ["a"]
    assert [row["id"] for row in second["members"]] == ["b", "c", "z", "é"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"since": timedelta(hours=5)}, {"B: x"}),
        ({"until": timedelta(hours=5)}, {"A: x", "C: y"}),
        ({"since": NOW - timedelta(hours=30), "until": NOW - timedelta(hours=5)}, {"A: x"}),
        ({"queue": "load"}, {"B: x"}),
        ({"workflow": "cut"}, {"C: y"}),
        ({"workflow": "t"}, {"A: x", "B: x"}),
        ({"machine": "box-1"}, {"A: x"}),
        ({"text": "Y"}, {"C: y"}),
        ({"queue": "load", "text": "y"}, set()),
        ({"queue": "\x00"}, set()),
        ({"text": ""}, {"A: x", "B: x", "C: y"}),
    ],
)
def test_filters(conn: Any, filters: dict[str, Any], expected: set[str]) -> None:
    failed(conn, "A: x", 10 * 60, claimed_by="box-1")
    failed(conn, "B: x", 60, queue="load")
    failed_node(conn, "C: y", 60 * 60, workflow="cut")
    assert {*found(**filters)} == expected


def test_it_examines_the_newest_and_says_how_far_it_went(conn: Any) -> None:
    for minutes in range(1, 7):
        failed(conn, f"E: {'odd' if minutes % 2 else 'even'} one", minutes)
    page = failures.list(newest=4, text="even")
    assert [group["count"] for group in page.groups] == [2]
    assert (page.examined, page.is_whole) == (4, False)
    assert page.back_to == page.begin == NOW - timedelta(minutes=4)
    none = failures.list(newest=4, text="nothing")
    assert (none.groups, none.examined, none.back_to) == ([], 4, NOW - timedelta(minutes=4))
    assert failures.list(newest=7).is_whole


def test_nothing_has_failed(db: Any) -> None:
    page = failures.list()
    assert (page.groups, page.examined, page.back_to, page.is_whole) == ([], 0, None, True)
    assert page.begin == page.now


def test_members_and_their_traceback(conn: Any) -> None:
    first, last = (failed(conn, f"E: no {n} x", 60 * (5 - n)) for n in (1, 2))
    node = failed_node(conn, "E: no 3 x", 60)
    failed(conn, "E: other")
    rows = next(one["members"] for one in failures.list().groups if one["count"] == 3)
    assert [row["id"] for row in rows] == [node["id"], last, first]
    assert failures.traceback(rows[0]) is None
    for table, key in (
        ("workflow_node_events", {"run_id": node["run_id"], "node_id": "n", "job_id": node["id"]}),
        ("ingest_job_events", {"job_id": last}),
    ):
        for kind, text in (("failed", "first"), ("failed", table), ("retried", "other")):
            factories.insert(conn, table, event_type=kind, detail={"traceback": text}, **key)
    assert failures.traceback(rows[0]) == "workflow_node_events"
    assert failures.traceback(rows[1]) == "ingest_job_events"
    assert failures.traceback(rows[2]) is None
    (group,) = failures.list(until=timedelta(hours=2)).groups
    assert [row["id"] for row in group["members"]] == [last, first]


@pytest.mark.parametrize(
    "given",
    [{"newest": 0}, {"newest": 10_001}, {"since": datetime(2026, 1, 1)}, {"until": "24h"}],
)
def test_what_is_no_filter_is_refused(db: Any, given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidConfig):
        failures.list(**given)


# --- marks -------------------------------------------------------------------------------------


def test_a_group_that_was_seen_is_hidden_until_it_fails_again(conn: Any) -> None:
    failed(conn, "A: 1", 5)
    failed(conn, "B: 1", 3)
    by_name = {group["signature"]: group for group in failures.list().groups}
    failures.mark_seen("A: #", by_name["A: #"]["last_at"], by="ann")
    page = failures.list()
    assert ([group["signature"] for group in page.groups], page.hidden) == (["B: #"], 1)
    (seen,) = (group for group in failures.list(seen=True).groups if group["seen_at"])
    assert (seen["signature"], seen["seen_by"]) == ("A: #", "ann")
    (act,) = acts.list()
    assert (act["actor"], act["action"], act["kind"], act["subject"]) == (
        "ann", "mark seen", "failures", "A: #",
    )  # fmt: skip
    failed(conn, "A: 2", 1)
    assert failures.list().hidden == 0
    failures.mark_seen("A: #", by_name["A: #"]["last_at"])
    assert failures.list().hidden == 0, "it failed after the last failure that was seen"
    failures.mark_seen("A: #", NOW)
    assert failures.list().hidden == 1
    assert failures.mark_seen("A: #", None, by="bob")
    assert not failures.mark_seen("A: #", None)
    assert failures.list().hidden == 0
    assert [one["action"] for one in acts.list()] == ["mark unseen", *["mark seen"] * 3]


@pytest.mark.parametrize("text", ["", "x" * 201, "a\x00b", "\ud800"])
def test_what_is_no_signature_is_refused(db: Any, text: str) -> None:
    for until in (NOW, None):
        with pytest.raises(errors.InvalidConfig):
            failures.mark_seen(text, until)


@pytest.mark.parametrize("until", [NOW.replace(tzinfo=None), timedelta(hours=1), "24h", 0])
def test_what_is_no_time_marks_nothing(db: Any, until: Any) -> None:
    with pytest.raises(errors.InvalidConfig):
        failures.mark_seen("x", until)
    assert acts.list() == []


def test_old_marks_are_deleted_by_the_next(conn: Any) -> None:
    failures.mark_seen("old", NOW, by="ann")
    conn.execute("UPDATE failures_seen SET seen_at = now() - interval '2 years'")
    failures.mark_seen("new", NOW)
    assert factories.column(conn, "SELECT signature FROM failures_seen") == ["new"]


# --- the command -------------------------------------------------------------------------------


def test_the_command_lists_shows_and_hides(conn: Any) -> None:
    one = failed(conn, "ValueError: row 1 has no price", 5, claimed_by="box-1")
    failed(conn, "ValueError: row 2 has no price", 3, claimed_by="box-1")
    (group,) = console.reply("failures")
    assert (group["signature"], group["count"]) == ("ValueError: row # has no price", 2)
    assert "members" not in group
    listed = console.printed("failures", "list", "--queue", "fetch", "--since", "1h")
    assert "ValueError: row # has no price" in listed
    assert "all on box-1" in listed
    shown = console.printed("failures", "show", group["id"][:6])
    assert "2 failures of ValueError: row # has no price" in shown
    assert one in shown
    assert console.reply("failures", "show", group["id"])["members"][1]["id"] == one
    members = console.reply("failures", "show", group["id"], "--limit", "1")["members"]
    assert len(members) == 1
    assert "hidden until it fails again" in console.printed("failures", "seen", group["id"])
    done = console.command("failures")
    assert group["id"] not in done.out
    assert "without 1 group marked as seen; --all lists all\n" in done.err
    assert group["id"] in console.printed("failures", "list", "--all")
    console.printed("failures", "seen", group["id"], "--undo")
    assert group["id"] in console.printed("failures")
    none = "no group has an id that begins with 'zzz' among the newest 2,000 failures"
    assert none in console.refusal("failures", "show", "zzz")


def test_the_command_says_how_far_it_went(conn: Any) -> None:
    for minutes in range(3):
        failed(conn, "E: x", minutes)
    done = console.command("failures", "--newest", "2")
    assert "the newest 2 failed jobs, back to" in done.err


# --- the plan ----------------------------------------------------------------------------------

FILLED = """
INSERT INTO {} (id, status, error, finished_at, created_at, {}) SELECT
    'f' || g, CASE WHEN g % 10 = 0 THEN 'failed' ELSE 'completed' END, 'E: row ' || g,
    timestamptz '2026-01-01Z' + g * interval '1 second', timestamptz '2026-01-01Z', {}
  FROM generate_series(1, {}) g
"""
ROWS = 40_000
TABLES = ("ingest_jobs", "workflow_node_jobs", "workflow_runs")
STATES = ("analyzed", "without statistics", "of empty tables", "of emptied tables")
"""The statistics that the planner has."""


@pytest.fixture(scope="module")
def filled(own_database: database.Database) -> Generator[str]:
    """Return the name of a database with many jobs, of which each tenth failed, to copy."""
    name = own_database.fresh_name()
    with db.connect(url=own_database.create_migrated(name), limited=False) as conn:
        by_hand(conn)
        fill(conn)
    yield name
    own_database.drop(name)


@pytest.fixture(scope="module", params=STATES)
def large(
    own_database: database.Database, filled: str, request: pytest.FixtureRequest
) -> Generator[str]:
    """Return the DSN of such a database in a state."""
    name = own_database.fresh_name()
    if request.param == "of empty tables":
        dsn = own_database.create_migrated(name)
    else:
        dsn = own_database.create(name, template=filled)
    with db.connect(url=dsn, limited=False) as conn:
        if request.param == "of empty tables":
            by_hand(conn)
            conn.execute(b"ANALYZE")
            fill(conn)
        if request.param == "of emptied tables":
            for table in reversed(TABLES):
                conn.execute(f"DELETE FROM {table}".encode())
                conn.execute(f"VACUUM (ANALYZE, TRUNCATE false) {table}".encode())
            fill(conn)
        if request.param == "analyzed":
            conn.execute(b"ANALYZE")
    yield dsn
    own_database.drop(name)


def by_hand(conn: Any) -> None:
    """Let nothing but the statements of these tests analyze or change the tables."""
    for table in TABLES:
        conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
        conn.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())


def fill(conn: Any) -> None:
    conn.execute(
        b"INSERT INTO workflow_runs (id, workflow_name, status)"
        b" SELECT 'r' || g, 'w', 'failed' FROM generate_series(1, 4000) g"
    )
    for table, columns, values in (
        ("ingest_jobs", "task_name, queue", "'t', 'load'"),
        ("workflow_node_jobs", "run_id, node_id, node_module, queue",
         "'r' || (1 + g % 4000), 'n' || g, 'm', 'cpu'"),
    ):  # fmt: skip
        conn.execute(FILLED.format(table, columns, values, ROWS).encode())


@pytest.mark.parametrize(
    "filters", [{}, {"machine": "none"}, {"text": "row 39"}, {"until": NOW - timedelta(days=1)}]
)
def test_no_list_reads_much_of_a_large_table(large: str, filters: dict[str, Any]) -> None:
    most = 200
    with db.connect(url=large) as conn, conn.transaction():
        page = failures.list(newest=most, conn=conn, **filters)
        assert page.examined == most
        given = {
            "since": None, "since_ago": None, "until": None, "until_ago": None, "queue": None,
            "workflow": None, "machine": None, "text": None, "most": most, "cut": 400,
        }  # fmt: skip
        read = conn.execute(
            b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
            + named_statements.texts()["failures.newest"],
            given | filters,
        ).fetchone()
        (plan,) = next(iter((read or {}).values()))
        blocks = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        assert blocks < 20 * most, json.dumps(plan)[:2000]
        scans = conn.execute(
            "SELECT sum(seq_scan)::int AS n FROM pg_stat_xact_user_tables WHERE relname = ANY (%s)",
            [[*TABLES]],
        ).fetchone()
        assert scans == {"n": 0}
