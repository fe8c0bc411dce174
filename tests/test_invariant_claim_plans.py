"""The claim reads its index in the index's order, whatever the statistics say."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import pytest

from queue_workflows import config, queues
from queue_workflows import jobs as jobs_api
from queue_workflows.types import Row
from tests.support import database, factories, sweeps, transitions

FUNCTIONS = (
    "queue_workflows_node_step",
    "queue_workflows_nodes_step",
    "queue_workflows_gpu_take",
    "queue_workflows_gpu_line",
    "queue_workflows_gpu_weigh",
    "queue_workflows_gpu_queued",
    "queue_workflows_gpu_next",
    "queue_workflows_version_heads",
    "queue_workflows_ingest_kept",
    "queue_workflows_node_kept",
    "queue_workflows_ingest_due_in",
    "queue_workflows_node_due_in",
    "queue_workflows_pick_version",
    "queue_workflows_ingest_step",
)
READING = FUNCTIONS[3:12]
JOB_TABLES = ("workflow_node_jobs", "ingest_jobs")
TABLES = (*JOB_TABLES, "workflow_runs")
WAITING = {
    "workflow_node_jobs_claim_idx", "workflow_node_jobs_model_idx", "ingest_jobs_claim_idx",
    "workflow_node_jobs_age_idx", "workflow_node_jobs_gpu_idx",
    "workflow_node_jobs_blocked_idx", "ingest_jobs_blocked_idx",
    "workflow_node_jobs_resume_idx", "ingest_jobs_resume_idx",
}  # fmt: skip
"""Indexes of jobs that wait: partial, so that they never hold what is finished."""
BY_KEY = {"workflow_node_jobs_pkey", "ingest_jobs_pkey", "workflow_runs_pkey"}
STATEMENT = re.compile(
    r"(?:^|\b(?:THEN|ELSE|LOOP|BEGIN|QUERY)\s)\s*((?:SELECT|UPDATE|WITH)\b.*)", re.DOTALL
)
VARIABLE = re.compile(r"\b[pv]_\w+\b")
ROWS = 40_000
INGEST_ROWS = 25_000
ROWS_A_CLAIM = 60
ROWS_OF_A_COLD_CHOICE = 60 + 7 * 16
"""The balanced policy reads the first 16 jobs of each model that it compares."""
ANALYZE = "ANALYZE workflow_runs, workflow_node_jobs, ingest_jobs, worker_controls"
KEPT = 5_000
KEY = "'k' || i"


def kept(
    table: str, queue: str, name: str, host: str, at: str, priority: int = 0, key: str = "NULL"
) -> str:
    """A statement that inserts jobs which are kept for a host from a time on."""
    columns, values = "task_name", "'t'"
    if table == "workflow_node_jobs":
        columns, values = "run_id, node_id, node_module", f"'r1', '{name} ' || i, 'm'"
    return f"""
SET session_replication_role = replica;
INSERT INTO {table} ({columns}, queue, priority, lock_key, blocked_reason, available_at,
                     resume_host, resume_at, resume_until)
    SELECT {values}, '{queue}', {priority}, {key}, 'not_due', now() + interval '1 hour',
           {host}, {at}, now() + interval '1 hour'
      FROM generate_series(1, {KEPT}) i;
SET session_replication_role = origin;
"""


FILL = f"""
SET session_replication_role = replica;
INSERT INTO workflow_runs (id, workflow_name, status)
    SELECT 'r' || i, 'w', 'running' FROM generate_series(0, 99) i;
INSERT INTO workflow_node_jobs
       (run_id, node_id, node_module, queue, required_model, priority, status)
    SELECT 'r' || i % 100, i::text, 'm', CASE WHEN i % 2 = 0 THEN 'cpu' ELSE 'gpu' END,
           CASE WHEN i % 4 = 1 THEN 'model' || i % 7 END,
           CASE WHEN i % 10 = 0 THEN 10 ELSE 100 END,
           CASE WHEN i % 50 = 0 THEN 'completed' ELSE 'queued' END
      FROM generate_series(1, {ROWS}) i;
INSERT INTO ingest_jobs (task_name, queue, priority, status)
    SELECT 't', CASE WHEN i % 2 = 0 THEN 'fetch' ELSE 'load' END, 100,
           CASE WHEN i % 50 = 0 THEN 'completed' ELSE 'queued' END
      FROM generate_series(1, {INGEST_ROWS}) i;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model, priority)
    SELECT 'r1', 'late' || i, 'm', 'gpu', 'rare', 200 FROM generate_series(1, 3) i;
INSERT INTO workflow_runs (id, workflow_name, status, mode)
    SELECT 'over' || i, 'w', 'completed', 'node' FROM generate_series(1, 5000) i;
INSERT INTO workflow_node_jobs
       (run_id, node_id, node_module, queue, status, worker_id, lease_expires_at)
    SELECT 'r1', 'busy' || i, 'm', 'cpu', 'running', 'other', 'infinity'
      FROM generate_series(1, 300) i;
INSERT INTO ingest_jobs (task_name, queue, status, worker_id, lease_expires_at)
    SELECT 't', 'load', 'running', 'other', 'infinity' FROM generate_series(1, 300) i;
INSERT INTO ingest_jobs (task_name, queue, lock_key, blocked_reason, idempotency_key)
    SELECT 't', 'line', 'busy', CASE WHEN i > 0 THEN 'locked' END, 'key' || i
      FROM generate_series(0, 9999) i;
SET session_replication_role = origin;
{kept("workflow_node_jobs", "cpu", "kept elsewhere", "'other'", "now()")}
{kept("workflow_node_jobs", "cpu", "kept later", "'box'", "now() + interval '30 minutes'")}
{kept("workflow_node_jobs", "cpu", "kept, locked", "'box'", "now() - interval '1 hour'", 0, KEY)}
{kept("ingest_jobs", "fetch", "", "'box'", "now() - interval '1 hour'", 0, KEY)}
{kept("ingest_jobs", "fetch", "", "'other'", "now()")}
{kept("ingest_jobs", "fetch", "", "'box'", "now() + interval '30 minutes'")}
"""
EMPTIED = """
SET session_replication_role = replica;
DELETE FROM workflow_runs; DELETE FROM workflow_node_jobs; DELETE FROM ingest_jobs;
SET session_replication_role = origin
"""
ALIKE = f"""
SET session_replication_role = replica;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model)
    SELECT 'r', i::text, 'm', 'gpu', 'model' || i % 6 FROM generate_series(1, 30000) i;
{ANALYZE};
DELETE FROM workflow_node_jobs;
SET session_replication_role = origin;
"""
"""Statistics by which a job of any model is soon found in the queue's own index, and cheaper."""


class Statement(NamedTuple):
    """A statement of a claim function over waiting jobs, its variables as parameters."""

    text: str
    parameters: int
    settings: tuple[str, ...]


def statements(conn: Any, function: str) -> list[Statement]:
    """The text of the function itself, split into its statements, so that the test follows it."""
    row = conn.execute(
        "SELECT prosrc, proconfig, proargnames, ARRAY(SELECT format_type(t, NULL)"
        " FROM unnest(proargtypes) WITH ORDINALITY AS a (t, n) ORDER BY n) AS types"
        " FROM pg_proc WHERE proname = %s",
        (function,),
    ).fetchone()
    source = re.sub(r"--.*", "", row["prosrc"])
    kinds = dict(zip(row["proargnames"] or (), row["types"], strict=False))
    kinds |= dict(re.findall(r"^\s+(v_\w+)\s+([\w\[\]]+)(?: :=.*)?;", source, re.MULTILINE))
    found: list[Statement] = []
    for part in source.split(";"):
        match = STATEMENT.search(part)
        if match is None or not re.search(r"blocked_reason IS|is_claimable", match[1]):
            continue
        text = re.sub(r"\bINTO v_\w+(?:, v_\w+)*", "", match[1])
        names = list(dict.fromkeys(VARIABLE.findall(text)))
        for number, name in enumerate(names, 1):
            text = re.sub(rf"\b{name}\b", f"(${number}::{kinds[name]})", text)
        found.append(Statement(text, len(names), tuple(row["proconfig"])))
    return found


def plan(conn: Any, statement: Statement) -> dict[str, Any]:
    """Its generic plan under the function's settings."""
    with conn.transaction(force_rollback=True):
        for setting in statement.settings:
            conn.execute(f"SET LOCAL {setting}".encode())
        conn.execute(f"PREPARE picked AS {statement.text}".encode())
        values = f"({', '.join(['NULL'] * statement.parameters)})" if statement.parameters else ""
        found = factories.one(conn, f"EXPLAIN (FORMAT JSON) EXECUTE picked{values}")
        conn.execute("DEALLOCATE picked")
    return found[0]["Plan"]


def faults(node: dict[str, Any], *, limited: bool = False, sorts: bool = False) -> Iterator[str]:
    """What a plan does with jobs and runs other than reading an index until it has enough."""
    kind, table, index = node["Node Type"], node.get("Relation Name"), node.get("Index Name")
    if table in TABLES and kind != "ModifyTable":
        if kind not in ("Index Scan", "Index Only Scan"):
            yield f"{kind} of {table}"
        elif index not in WAITING | BY_KEY:
            yield f"{table} by {index}"
        elif index in BY_KEY and "Index Cond" not in node:
            yield f"all of {table} is read by {index}"
        elif index in WAITING and not limited:
            yield f"all of {index} is read"
        elif index in WAITING and "required_model" in node.get("Filter", ""):
            yield f"{index} is read past the jobs of other models"
        elif index in WAITING and sorts:
            yield f"what {index} gives is sorted"
    limit = kind == "Limit"
    for child in node.get("Plans", []):
        yield from faults(
            child, limited=limited or limit, sorts=not limit and (sorts or "Sort" in kind)
        )


BY_HAND = [f"ALTER TABLE {table} SET (autovacuum_enabled = off)" for table in TABLES]
FEW = {"empty": [*BY_HAND, ANALYZE], "alike": [ALIKE]}
COUNTED = {"full": [ANALYZE]}
UNCOUNTED = {
    "emptied": [EMPTIED, *(f"VACUUM (ANALYZE, TRUNCATE false) {name}" for name in TABLES)],
    "uncounted": [FILL],
}
"""Filled again after the statistics saw nothing: planned as one row until autovacuum analyses."""
OWN_KEYS = 5_000
STALE = f"""
SET session_replication_role = replica;
INSERT INTO ingest_jobs (task_name, queue, status)
    SELECT 't', 'fetch', 'completed' FROM generate_series(1, 1000);
{ANALYZE};
DELETE FROM ingest_jobs;
INSERT INTO ingest_jobs (task_name, queue, lock_key)
    SELECT 't', 'fetch', 'own' || i FROM generate_series(1, {OWN_KEYS}) i;
SET session_replication_role = origin;
"""
"""Statistics of a time when each job had ended, and none had a lock key."""


@pytest.fixture(scope="module")
def crowded(own_database: database.Database) -> Generator[dict[str, Any]]:
    """What is wrong with the plans in each state, and the DSNs of three databases left full."""
    from queue_workflows import db

    found: dict[str, Any] = {}
    names = [own_database.fresh_name() for _ in range(3)]

    def enter(dsn: str, states: dict[str, list[str]]) -> None:
        with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn), db.connect(limited=False) as conn:
            for state, todo in states.items():
                for statement in todo:
                    conn.execute(statement.encode())
                found[state] = {
                    (function, one.text): list(faults(plan(conn, one)))
                    for function in FUNCTIONS
                    for one in statements(conn, function)
                }

    first = own_database.create_migrated(names[0])
    enter(first, FEW)
    with db.connect(url=first, limited=False) as conn:
        conn.execute(FILL.encode())
    second = own_database.create(names[1], template=names[0])
    enter(first, COUNTED)
    enter(second, UNCOUNTED)
    third = own_database.create_migrated(names[2])
    with db.connect(url=third, limited=False) as conn:
        for statement in (*BY_HAND, STALE):
            conn.execute(statement.encode())
    yield found | {"full at": first, "uncounted at": second, "stale at": third}
    for name in names:
        own_database.drop(name)


@pytest.mark.parametrize("state", [*FEW, *COUNTED, *UNCOUNTED])
def test_every_pick_walks_its_index_in_order(crowded: dict[str, Any], state: str) -> None:
    looked_at = crowded[state]
    assert {text: wrong for (_, text), wrong in looked_at.items() if wrong} == {}
    for function in FUNCTIONS:
        picks = [text for of, text in looked_at if of == function and "SKIP LOCKED" in text]
        assert len(picks) >= 2 or function in READING, function
    assert len(looked_at) >= 12


@pytest.mark.parametrize(
    "bad",
    [
        "SELECT id FROM ingest_jobs WHERE status = 'queued' ORDER BY created_at LIMIT 1",
        "SELECT id FROM ingest_jobs WHERE queue = 'fetch' AND status = 'queued'"
        " AND blocked_reason IS NULL ORDER BY priority, created_at LIMIT 1",
        "SELECT max(seq) FROM workflow_node_jobs WHERE queue = 'cpu' AND status = 'queued'"
        " AND blocked_reason IS NULL",
    ],
)
def test_a_plan_that_reads_or_sorts_all_waiters_is_found(crowded: dict[str, Any], bad: str) -> None:
    from queue_workflows import db

    with db.connect(url=crowded["full at"]) as conn:
        assert list(faults(plan(conn, Statement(bad, 0, ()))))


MODELS = [f"model{number}" for number in range(7)]
CLAIMANTS = {
    "cpu": transitions.who("cpu"),
    "cpu, overflow": transitions.who("cpu", newest=True),
    "gpu, cold": transitions.who("gpu"),
    "gpu, warm": transitions.who("gpu", model="model3"),
    "gpu, known": transitions.who("gpu", models=MODELS),
    "gpu, known and warm": transitions.who("gpu", models=MODELS, model="model3"),
    "gpu, known, overflow": transitions.who("gpu", models=MODELS, newest=True),
    "gpu, known and far back": transitions.who("gpu", models=["rare"]),
    "gpu, balanced, far back": transitions.who("gpu", models=["rare"], policy="balanced"),
    "gpu, balanced, cold": transitions.who("gpu", policy="balanced"),
    "gpu, balanced, known": transitions.who("gpu", models=MODELS, policy="balanced"),
    "gpu, balanced, warm": transitions.who("gpu", model="model3", policy="balanced"),
    "gpu, balanced, overflow": transitions.who(
        "gpu", models=MODELS, policy="balanced", newest=True
    ),
    "ingest": transitions.who("fetch"),
}


def rows_read(conn: Any) -> int:
    """Of jobs, in this transaction."""
    return factories.one(
        conn,
        "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::bigint"
        " FROM pg_stat_xact_user_tables WHERE relname = ANY (%s)",
        list(JOB_TABLES),
    )


@pytest.fixture(params=["full", "uncounted"])
def many(crowded: dict[str, Any], request: pytest.FixtureRequest) -> Generator[Any]:
    """A transaction on a full database; nothing of it stays."""
    from queue_workflows import db

    dsn = crowded[f"{request.param} at"]
    with db.connect(url=dsn) as conn, conn.transaction(force_rollback=True):
        yield conn


@pytest.mark.parametrize("name", CLAIMANTS)
def test_a_claim_among_many_reads_a_few_rows(many: Any, name: str) -> None:
    who = CLAIMANTS[name]
    assert transitions.claim(many, who, promote=True)
    cold = who.policy == "balanced" and who.model is None
    assert 0 < rows_read(many) <= (ROWS_OF_A_COLD_CHOICE if cold else ROWS_A_CLAIM)


@pytest.mark.parametrize("is_first", [False, True], ids=["behind others", "first"])
@pytest.mark.parametrize(
    ("name", "count"), [("cpu", 1), ("cpu", 10), ("gpu, warm", 1), ("ingest", 1), ("ingest", 10)]
)
def test_a_claim_beside_many_kept_jobs_reads_a_few_rows(
    many: Any, name: str, count: int, is_first: bool
) -> None:
    who = CLAIMANTS[name]
    table = transitions.TABLES["ingest" if who.queue == "fetch" else "node"]
    priority = 0 if is_first else 200
    many.execute(kept(table, who.queue, "due", "'box'", "now()", priority).encode())
    before = rows_read(many)
    jobs = transitions.claim(many, who, count)
    assert len(jobs) == count
    query = f"SELECT count(*) FROM {table} WHERE id = ANY (%s) AND resume_host IS NOT NULL"
    assert factories.one(many, query, [job["id"] for job in jobs]) == (count if is_first else 0)
    assert rows_read(many) - before <= ROWS_A_CLAIM * count + 100


DELAYED = """
SET session_replication_role = replica;
SET statement_timeout = 0;
INSERT INTO {table} ({columns}, queue, blocked_reason, available_at)
    SELECT {values}, '{queue}', 'not_due', now() + interval '1 ms' * i
      FROM generate_series(-1000, {rows}) i;
RESET statement_timeout;
SET session_replication_role = origin;
"""


@pytest.mark.parametrize("overdue", [False, True])
@pytest.mark.parametrize(
    ("function", "table", "queue", "other"),
    [
        ("queue_workflows_node_due_in", "workflow_node_jobs", "gpu", "cpu"),
        ("queue_workflows_ingest_due_in", "ingest_jobs", "load", "idle"),
    ],
    ids=JOB_TABLES,
)
def test_the_next_of_many_delayed_jobs_is_found_with_a_few_rows(
    many: Any, function: str, table: str, queue: str, other: str, overdue: bool
) -> None:
    columns, values = "task_name", "'t'"
    if table == "workflow_node_jobs":
        columns, values = "run_id, node_id, node_module", "'r1', 'delayed' || i, 'm'"
    filled = DELAYED.format(table=table, columns=columns, values=values, queue=queue, rows=ROWS)
    many.execute(filled.encode())
    many.execute(kept(table, other, "soon", "'box'", "now() + interval '900 seconds'").encode())
    before = rows_read(many)
    query = f"SELECT {function}(%s, %s, 3600, %s)"
    assert factories.one(many, query, "box", queue, overdue) == 0
    found = factories.one(many, query, "box", other, overdue)
    assert found is not None and 0 < found <= 900
    assert factories.one(many, query, "nowhere", other, overdue) is None
    assert rows_read(many) - before <= 3 * 2 * 100 + 10


def claimed(conn: Any, kind: transitions.Kind, count: int) -> list[Row]:
    if kind == "ingest":
        return transitions.claim(conn, transitions.who("fetch"), count)
    return [transitions.claim_node(conn) for _ in range(count)]


def lapse(conn: Any, jobs: list[Row]) -> None:
    for job in jobs:
        transitions.expire(conn, job)


def fall_due(conn: Any, jobs: list[Row]) -> None:
    transitions.hand_back_all(conn, jobs)
    for job in jobs:
        factories.change(conn, job, "blocked_reason = 'not_due', available_at = now()")


BESIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "renew": (lambda conn, jobs: None, lambda conn, jobs: transitions.renew(conn, *jobs)),
    "hand back": (lambda conn, jobs: None, transitions.hand_back_all),
    "reclaim": (
        lapse,
        lambda conn, jobs: transitions.reclaim_lapsed(conn, transitions.kind_of(jobs[0])),
    ),
    "promote": (fall_due, lambda conn, jobs: [None] * transitions.promote_due(conn)),
}


@pytest.mark.parametrize("kind", transitions.KINDS, ids=JOB_TABLES)
@pytest.mark.parametrize("name", BESIDE)
def test_changes_of_a_few_jobs_read_a_few_rows(
    many: Any, kind: transitions.Kind, name: str
) -> None:
    prepare, act = BESIDE[name]
    jobs = claimed(many, kind, 20)
    prepare(many, jobs)
    before = rows_read(many)
    assert len(act(many, jobs)) == 20
    assert 0 < rows_read(many) - before <= 20 * ROWS_A_CLAIM


@pytest.mark.parametrize("kind", transitions.KINDS, ids=JOB_TABLES)
def test_a_result_is_recorded_with_a_few_rows(many: Any, kind: transitions.Kind) -> None:
    (job,) = claimed(many, kind, 1)
    before = rows_read(many)
    transitions.complete(many, job)
    assert 0 < rows_read(many) - before <= ROWS_A_CLAIM


def test_the_sweep_of_orphans_compares_no_job_with_each_run(many: Any) -> None:
    many.execute("SET LOCAL statement_timeout = '5s'")  # that would be 250 million comparisons
    sweeps.cancel_orphans(many)


def test_a_batch_is_recorded_and_the_next_claimed_with_a_few_rows(many: Any) -> None:
    jobs, who = claimed(many, "ingest", 50), transitions.who("fetch")
    before = rows_read(many)
    assert len(transitions.complete_and_claim(many, jobs, who, 50)) == 50
    assert rows_read(many) - before <= 50 * ROWS_A_CLAIM


def test_several_nodes_are_recorded_and_the_next_claimed_with_a_few_rows(many: Any) -> None:
    done = [(job, transitions.plan()) for job in claimed(many, "node", 20)]
    before = rows_read(many)
    assert len(transitions.complete_with_plans(many, done, count=20, promote=True)) == 20
    assert rows_read(many) - before <= 20 * ROWS_A_CLAIM


def test_admission_from_a_long_lock_queue_reads_a_few_rows(many: Any) -> None:
    who = transitions.who("line")
    (job,) = transitions.claim(many, who)
    before = rows_read(many)
    transitions.complete(many, job)
    many.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert len(transitions.claim(many, who)) == 1
    assert rows_read(many) - before <= 2 * ROWS_A_CLAIM


def test_keys_that_are_taken_are_found_with_a_few_rows(many: Any) -> None:
    jobs = [{"idempotency_key": f"key{n}"} for n in range(100)]
    config.configure(ingest_queues={"line"})
    config.register_ingest_task("t", print)
    before = rows_read(many)
    made = jobs_api.enqueue_many(task_name="t", queue="line", jobs=jobs, conn=many)
    assert not any(job_id.created for job_id in made)
    assert rows_read(many) - before <= 100 * 10


def test_a_limit_that_is_set_on_a_long_queue_reads_what_it_moves(many: Any) -> None:
    config.configure(ingest_queues={"fetch"})
    many.execute(
        "UPDATE ingest_jobs SET partition_key = 'p' || seq % 10 WHERE id = ANY (ARRAY("
        "SELECT id FROM ingest_jobs WHERE queue = 'fetch' AND status = 'queued'"
        " AND blocked_reason IS NULL ORDER BY priority, seq LIMIT 600))"
    )
    queues.limit("fetch", partition_max_running=1, conn=many)
    assert transitions.claim(many, transitions.who("fetch")) == []  # the lines are read first
    many.execute("SET CONSTRAINTS ALL IMMEDIATE")
    many.execute("SET CONSTRAINTS ALL DEFERRED")
    free, before = factories.one(many, _FREE), rows_read(many)
    assert len(transitions.claim(many, transitions.who("fetch"))) <= 1
    read = rows_read(many) - before
    assert free - factories.one(many, _FREE) >= 400
    assert 0 < read <= 5000


_FREE = (
    "SELECT count(*) FROM ingest_jobs WHERE queue = 'fetch' AND status = 'queued'"
    " AND blocked_reason IS NULL"
)


LINE, SEVERAL = 5_000, 200
GHOSTS = f"""
SET session_replication_role = replica;
INSERT INTO ingest_jobs (task_name, queue, lock_key, blocked_reason, priority)
    SELECT 't', 'ghost', 'ghosts only', CASE WHEN i > 0 THEN 'locked' END, 100
      FROM generate_series(0, {LINE}) i;
INSERT INTO ingest_jobs (task_name, queue, lock_key, blocked_reason, priority)
    SELECT 't', CASE WHEN i = {SEVERAL} THEN 'line' ELSE 'ghost' END, 'stuck',
           CASE WHEN i > 0 THEN 'locked' END, 100 FROM generate_series(0, {SEVERAL}) i;
SET session_replication_role = origin;
"""


def ask(conn: Any, function: str, limit: int = 1000) -> tuple[int, int]:
    """What the function returns, and how many rows it reads."""
    before = rows_read(conn)
    call = f"SELECT queue_workflows_{function}('ingest_jobs', ARRAY['line', 'more'], {limit})"
    return factories.one(conn, call), rows_read(conn) - before


of_any_time = pytest.mark.parametrize("many", ["full", "uncounted", "stale"], indirect=True)


@of_any_time
def test_a_sweep_of_unserved_queues_reads_little_but_what_it_writes(many: Any) -> None:
    assert ask(many, "block_unserved") == (0, pytest.approx(2, abs=6))
    many.execute(GHOSTS.encode())
    count, read = ask(many, "block_unserved")
    assert count == SEVERAL, "the admitted one, and all in line but the last"
    assert read <= 10 * SEVERAL + 30
    many.execute("SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED")
    count, read = ask(many, "block_unserved")
    assert count == 0
    assert read <= 20
    assert ask(many, "unblock_served") == (0, 0)
    many.execute("UPDATE ingest_jobs SET queue = 'more' WHERE blocked_reason = 'unserved'")
    count, read = ask(many, "unblock_served")
    assert count == SEVERAL
    assert read <= 10 * SEVERAL + 30


@of_any_time
@pytest.mark.parametrize("key", ["stuck", "busy", "nobody's"])
def test_a_waiter_is_admitted_from_its_own_lock_queue(many: Any, key: str) -> None:
    many.execute(GHOSTS.encode())
    before = rows_read(many)
    call = f"SELECT queue_workflows_give_turns('ingest_jobs', ARRAY[$q${key}$q$])"
    assert factories.one(many, call) == 0
    assert rows_read(many) - before <= 10


@of_any_time
def test_the_sweep_of_lock_keys_reads_a_few_rows_of_each(many: Any) -> None:
    many.execute(GHOSTS.encode())
    before = rows_read(many)
    assert factories.one(many, "SELECT queue_workflows_mend_turns('ingest_jobs')") == 0
    assert rows_read(many) - before <= 20


LONG_KEYS = """
SET session_replication_role = replica;
INSERT INTO ingest_jobs (task_name, queue, lock_key, partition_key, blocked_reason)
    SELECT 't', 'line', repeat('k', 200) || i, repeat('p', 200) || i, 'locked'
      FROM generate_series(1, 5000) i;
INSERT INTO ingest_jobs (task_name, queue, partition_key, blocked_reason)
    SELECT 't', 'line', repeat('p', 200) || i, 'limited' FROM generate_series(1, 5000) i;
SET session_replication_role = origin;
"""
"""The ordered indexes become deeper than the one that a sort of all blocked jobs would read."""


@pytest.mark.parametrize("keys", ["", LONG_KEYS], ids=["short keys", "long keys"])
def test_the_sweeps_query_reads_no_lock_queue(many: Any, keys: str) -> None:
    many.execute(f"{GHOSTS}{keys}".encode())
    before = rows_read(many)
    found = sweeps.wanted(many)
    assert ("lock-keys" in found, "limits" in found) == (True, bool(keys))
    assert rows_read(many) - before <= 600 + 20, "the 600 that run, for their leases"


def test_the_birth_of_a_run_is_computed_in_the_plan_itself(many: Any) -> None:
    """A function call for each claimed node would cost about 30 us."""
    plan = "\n".join(
        row["QUERY PLAN"]
        for row in many.execute(
            "EXPLAIN VERBOSE SELECT queue_workflows_born(created_at) FROM workflow_runs"
        )
    )
    assert "EXTRACT(epoch" in plan
    assert "queue_workflows_born" not in plan
