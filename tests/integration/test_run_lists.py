"""Lists of runs: their filters, their pages, and how few rows they read of a large table."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from queue_workflows import db, errors, runs
from tests.support import constants, database, factories, named_statements, tabled

NEW_YEAR = datetime(2026, 1, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
IDS = [str(uuid.UUID(int=number << 96)) for number in (0x1234ABCD, 0x1234ABCE, 0x77770000)]


def put(conn: Any, run_id: str, hours: float = 0, **columns: Any) -> str:
    """Insert a run that was created so many hours into the year."""
    return factories.run(conn, id=run_id, created_at=NEW_YEAR + hours * HOUR, **columns)


def found(**given: Any) -> list[str]:
    """Return the ids of a list; each page of one run has the same ones in all."""
    ids = [row["id"] for row in runs.list(**given)]
    paged: list[str] = []
    page = runs.page(limit=1, **given)
    while page.next is not None:
        paged += [row["id"] for row in page.items]
        page = runs.page(limit=1, before=page.next, **given)
    assert paged + [row["id"] for row in page.items] == ids
    return ids


def put_several(conn: Any) -> None:
    put(conn, "a", 0, workflow_name="w", status="failed", error="ValueError: No price for 7")
    put(conn, "b", 1, workflow_name="v", status="failed", error="TimeoutError: no reply")
    put(conn, IDS[0], 2, workflow_name="w", status="completed", context={"tenant": 7, "n": [1]})
    put(conn, IDS[1], 2, workflow_name="w", status="running", context={"tenant": "7"})
    put(conn, IDS[2], 3, workflow_name="v", status="queued", context={"tenant": 7, "n": [2]})
    put(conn, "c", 4, workflow_name="w", status="failed", error=f"run {IDS[2]} has NO PRICE")
    for hours, fired in enumerate((IDS[1], None, "a", "deleted")):
        at = NEW_YEAR + hours * HOUR
        factories.insert(conn, "schedule_fires", name="nightly", fire_at=at, run_id=fired)
    factories.insert(conn, "schedule_fires", name="other", fire_at=NEW_YEAR, run_id="b")
    for run_id, node_id, machine in (("a", "n", "box-1"), ("a", "m", "box-2"), ("c", "n", "box-2")):
        factories.node(conn, run_id, node_id, status="completed", host_label=machine)


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all, the newest first": ({}, ["c", IDS[2], IDS[0], IDS[1], "b", "a"]),
    "a status": ({"status": "failed"}, ["c", "b", "a"]),
    "a workflow": ({"workflow_name": "v"}, [IDS[2], "b"]),
    "both": ({"status": "failed", "workflow_name": "w"}, ["c", "a"]),
    "a status that no run has": ({"status": "drafted"}, []),
    "since": ({"since": NEW_YEAR + 3 * HOUR}, ["c", IDS[2]]),
    "until": ({"until": NEW_YEAR + 1 * HOUR}, ["b", "a"]),
    "between": (
        {"since": NEW_YEAR + 1 * HOUR, "until": NEW_YEAR + 2 * HOUR}, [IDS[0], IDS[1], "b"],
    ),
    "a status since": ({"status": "failed", "since": NEW_YEAR + HOUR / 2}, ["c", "b"]),
    "a workflow until": ({"workflow_name": "w", "until": NEW_YEAR + 2 * HOUR},
                         [IDS[0], IDS[1], "a"]),
    "never": ({"since": NEW_YEAR + HOUR, "until": NEW_YEAR}, []),
    "a part of an error": ({"text": "no PRICE"}, ["c", "a"]),
    "of a status": ({"text": "no", "status": "failed", "workflow_name": "v"}, ["b"]),
    "a text with signs of patterns": ({"text": "%"}, []),
    "an id": ({"text": "a", "status": "failed"}, ["a"]),
    "the beginning of an id": ({"text": "1234abcd"}, [IDS[0]]),
    "a whole one": ({"text": IDS[1]}, [IDS[1]]),
    "an id before errors that have it": ({"text": IDS[2]}, [IDS[2]]),
    "errors, if that run is of another status": ({"text": IDS[2], "status": "failed"}, ["c"]),
    "a short beginning": ({"text": "1234"}, [IDS[0], IDS[1]]),
    "an input": ({"input": {"tenant": 7}}, [IDS[2], IDS[0]]),
    "of its type": ({"input": {"tenant": "7"}}, [IDS[1]]),
    "several inputs": ({"input": {"tenant": 7, "n": [1]}}, [IDS[0]]),
    "any input": ({"input": {}, "status": "queued"}, [IDS[2]]),
    "an input and a text": ({"input": {"tenant": 7}, "text": "1234abcd"}, [IDS[0]]),
    "a schedule": ({"schedule": "nightly"}, [IDS[1], "a"]),
    "a schedule and a status": ({"schedule": "nightly", "status": "failed"}, ["a"]),
    "a schedule and an input": ({"schedule": "nightly", "input": {"tenant": 7}}, []),
    "a schedule until": ({"schedule": "nightly", "until": NEW_YEAR}, ["a"]),
    "a schedule that started none": ({"schedule": "daily"}, []),
    "a machine": ({"machine": "box-2"}, ["c", "a"]),
    "a machine and a text": ({"machine": "box-1", "text": "price"}, ["a"]),
    "a schedule and a machine": ({"machine": "box-1", "schedule": "other"}, []),
    "what no text of the database is": ({"text": "\0"}, []),
    "no machine": ({"machine": "\ud800"}, []),
}  # fmt: skip


def test_a_list_has_the_runs_that_match_every_filter(conn: db.Connection) -> None:
    put_several(conn)
    for name, (given, wanted) in CASES.items():
        with tabled.case(name):
            assert found(**given) == wanted


def test_a_page_of_a_list_with_an_end_has_no_run_of_the_page_before(conn: db.Connection) -> None:
    for hours, run_id in enumerate("abc", 1):
        put(conn, run_id, hours)
    ids: list[str] = []
    page = runs.page(limit=1, until=NEW_YEAR + 3 * HOUR)
    for _ in range(4):
        ids += [row["id"] for row in page.items]
        if page.next is None:
            break
        page = runs.page(limit=1, until=NEW_YEAR + 3 * HOUR, before=page.next)
    assert ids == ["c", "b", "a"]


@pytest.mark.parametrize("operators", ["jsonb_ops", "jsonb_path_ops"])
def test_an_index_of_inputs_changes_no_list(
    own: str, operators: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", 1)
    with db.connect() as conn:
        put_several(conn)
        tenant = {"tenant": 7}
        assert runs.page(input=tenant).next is not None
        conn.execute(
            f"CREATE INDEX theirs ON workflow_runs USING gin (context {operators})".encode()
        )
        page = runs.page(input=tenant)
        assert ([row["id"] for row in page.items], page.next) == ([IDS[2], IDS[0]], None)
    for name, (given, wanted) in CASES.items():
        with tabled.case(name):
            assert found(**given) == wanted


def test_a_schedule_with_many_runs_is_searched_among_the_newest(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", 3)
    for number in range(6):
        put(conn, f"r{number}", number)
    conn.execute(
        "INSERT INTO schedule_fires (name, fire_at, run_id)"
        " SELECT 'nightly', %s::timestamptz + n * interval '1 second',"
        " CASE n WHEN 1 THEN 'r1' WHEN 2 THEN 'r4' ELSE 'deleted' || n END"
        " FROM generate_series(1, 2001) n",
        [NEW_YEAR],
    )
    page = runs.page(schedule="nightly")
    assert ([row["id"] for row in page.items], page.next) == (["r4"], (NEW_YEAR + 3 * HOUR, "r3"))
    assert found(schedule="nightly") == ["r4", "r1"]


def test_times_may_be_so_long_ago(conn: db.Connection) -> None:
    ids = [factories.run(conn, created_at=ago) for ago in (_ago(30), _ago(90))]
    assert found(since=timedelta(hours=1)) == ids[:1]
    assert found(until=timedelta(hours=1)) == ids[1:]
    assert found(since=timedelta(hours=2), until=timedelta(minutes=10)) == ids


def _ago(minutes: int) -> datetime:
    return datetime.now(timezone.utc) - timedelta(minutes=minutes)


@pytest.mark.parametrize(
    "given",
    [
        {"since": datetime(2026, 1, 1)},
        {"until": datetime(2026, 1, 1)},
        {"since": "24h"}, {"until": 5.0}, {"limit": 0}, {"limit": -1},
        {"input": {"a": float("nan")}}, {"input": {"a": object()}},
    ],
)  # fmt: skip
def test_a_filter_that_can_mean_nothing_is_refused(db: ModuleType, given: dict[str, Any]) -> None:
    with pytest.raises((errors.InvalidConfig, errors.InvalidPayload)) as caught:
        runs.page(**given)
    assert next(iter(given)) in str(caught.value)


def test_a_page_ends_where_the_search_has_examined_enough(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", 3)
    for number in range(10):
        put(conn, f"r{number}", number, error="rare" if number in (1, 5) else None)
    page = runs.page(text="rare")
    assert page == ([], (NEW_YEAR + 7 * HOUR, "r7"))
    pages: list[list[str]] = []
    while page.next is not None:
        page = runs.page(text="rare", before=page.next)
        pages.append([row["id"] for row in page.items])
    assert pages == [["r5"], ["r1"], []]
    assert found(text="rare") == ["r5", "r1"]


def test_of_two_indexes_the_one_that_reaches_further_is_read(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", 5)
    put(conn, "sought", workflow_name="seldom", status="failed")
    put(conn, "rare", workflow_name="often", status="drafted")
    for number in range(1, 8):
        put(conn, f"f{number}", number, workflow_name="often", status="failed")
    page = runs.page(workflow_name="seldom", status="failed")
    assert ([row["id"] for row in page.items], page.next) == (["sought"], None)
    page = runs.page(workflow_name="often", status="drafted")
    assert ([row["id"] for row in page.items], page.next) == (["rare"], None)


def test_a_list_counts_the_nodes_of_each_run(conn: db.Connection) -> None:
    graph = {"nodes": [{"id": "m"}, {"id": "n"}]}
    run = factories.run(conn, definition=graph)
    factories.run(conn)
    for name, status in (("m", "completed"), ("m[1]/x", "failed"), ("m[2]/x", "completed")):
        factories.node(conn, run, name, status=status)
    counts = {row["id"]: (row["nodes"], row["nodes_total"]) for row in runs.list()}
    assert counts.pop(run) == ({"completed": 2, "failed": 1}, 4)
    assert [*counts.values()] == [({}, None)]


# --- a large table -----------------------------------------------------------------------------

ROWS = 30_000
MOST = 300
"""Runs that a page examines at most in these tests."""
FILL = """
SET session_replication_role = replica;
INSERT INTO workflow_runs (workflow_name, status, created_at, error, context)
    SELECT 'w' || i % 10, CASE WHEN i % 30 = 0 THEN 'failed' ELSE 'completed' END,
           '2026-01-01Z'::timestamptz + i * interval '1 s',
           CASE WHEN i % 30 = 0 THEN 'error ' || i END, jsonb_build_object('n', i)
      FROM generate_series(1, {ROWS}) i;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status)
    SELECT id, 'n', 'm', 'cpu', 'completed' FROM workflow_runs;
SET session_replication_role = origin;
""".replace("{ROWS}", str(ROWS))
EMPTIED = """
SET session_replication_role = replica;
DELETE FROM workflow_runs; DELETE FROM workflow_node_jobs;
SET session_replication_role = origin
"""
TABLES = ("workflow_runs", "workflow_node_jobs")
BY_HAND = [f"ALTER TABLE {name} SET (autovacuum_enabled = off)" for name in TABLES]
ANALYZE = f"ANALYZE {', '.join(TABLES)}"
STATES = {
    "full": [ANALYZE],
    "uncounted": [],
    "emptied": [
        EMPTIED, *(f"VACUUM (ANALYZE, TRUNCATE false) {name}" for name in TABLES), FILL,
    ],
}  # fmt: skip
"""What the statistics have seen of the rows, and how they get there from a filled database."""
DEEP = (datetime(2026, 1, 1, 2, tzinfo=timezone.utc), "x")
LISTS: dict[str, dict[str, Any]] = {
    "the first page": {},
    "a deep page": {"before": DEEP},
    "a status": {"status": "completed", "before": DEEP},
    "a rare status": {"status": "failed", "before": DEEP},
    "a status that no run has": {"status": "drafted"},
    "a workflow": {"workflow_name": "w3", "before": DEEP},
    "a workflow that no run has": {"workflow_name": "none"},
    "a status and a workflow that no run has together": {"status": "failed", "workflow_name": "w3"},
    "since": {"since": DEEP[0]},
    "until": {"until": DEEP[0]},
    "a text that no error has": {"text": "nowhere"},
    "a text of a status": {"text": "nowhere", "status": "failed"},
    "an id": {"text": "00000000"},
    "an input that no run has": {"input": {"n": 0}},
    "a schedule that no run has": {"schedule": "none"},
    "a machine that no run has": {"machine": "none"},
    "a machine of a workflow": {"machine": "none", "workflow_name": "w3"},
}


class Read(NamedTuple):
    """The rows of the tables that a statement has read."""

    by_index: int
    by_scan: int


def rows_read(conn: Any) -> Read:
    """Return what this transaction has read so far."""
    query = """
SELECT sum(coalesce(idx_tup_fetch, 0))::bigint AS by_index, sum(seq_tup_read)::bigint AS by_scan
  FROM pg_stat_xact_user_tables WHERE relname = ANY (%s)"""
    (row,) = conn.execute(query, ([*TABLES],)).fetchall()
    return Read(row["by_index"], row["by_scan"])


def entered(dsn: str, *statements: str) -> str:
    with db.connect(url=dsn, limited=False) as conn:
        for statement in statements:
            conn.execute(statement.encode())
    return dsn


@pytest.fixture(scope="module")
def filled(own_database: database.Database) -> Generator[str]:
    """Return the name of a database with many runs, to copy."""
    name = own_database.fresh_name()
    entered(own_database.create_migrated(name), *BY_HAND, FILL)
    yield name
    own_database.drop(name)


@pytest.fixture(scope="module", params=["empty", *STATES])
def large(
    own_database: database.Database, filled: str, request: pytest.FixtureRequest
) -> Generator[str]:
    """Return the DSN of a database with many runs."""
    name = own_database.fresh_name()
    if request.param == "empty":
        yield entered(own_database.create_migrated(name), *BY_HAND, ANALYZE, FILL)
    else:
        yield entered(own_database.create(name, template=filled), *STATES[request.param])
    own_database.drop(name)


def test_no_list_reads_much_of_a_large_table(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", MOST)
    with db.connect(url=large) as conn:
        for name, given in LISTS.items():
            with tabled.undone(conn, name):
                before = rows_read(conn)
                runs.page(limit=20, conn=conn, **given)
                after = rows_read(conn)
                assert after.by_scan == before.by_scan
                # Up to MOST runs of each of two indexes, then those of the page and their nodes.
                assert after.by_index - before.by_index <= 2 * MOST + 3 * 21


def test_the_last_pages_read_as_little_as_the_first(
    large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", MOST)
    with db.connect(url=large) as conn, conn.transaction():
        for given in ({}, {"status": "completed"}, {"workflow_name": "w3"}):
            costs: list[int] = []
            for hour in (8, 4, 0.1):
                at = NEW_YEAR + hour * HOUR
                explained = conn.execute(*_explained(at, **given)).fetchone()
                plan = next(iter((explained or {}).values()))[0]["Plan"]
                costs.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
            assert max(costs) < 2 * min(costs) + 100, (given, costs)


def _explained(at: datetime, **given: Any) -> tuple[bytes, dict[str, Any]]:
    names = (
        "status", "workflow", "since", "since_ago", "until", "until_ago", "text", "low", "high",
        "inputs", "schedule", "machine",
    )  # fmt: skip
    given["workflow"] = given.pop("workflow_name", None)
    values = dict.fromkeys(names) | given
    values |= {"before": at, "before_id": "x", "limit": 21, "most": MOST, "by_workflow": False}
    return b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + named_statements.texts()[
        "runs.newest"
    ], values
