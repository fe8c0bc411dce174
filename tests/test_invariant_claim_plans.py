"""The claim reads its index in the index's order, whatever the statistics say."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import pytest

from queue_workflows.store import claims
from tests.support import database, factories

FUNCTIONS = (
    "queue_workflows_node_step",
    "queue_workflows_pick_gpu",
    "queue_workflows_gpu_take",
    "queue_workflows_gpu_line",
    "queue_workflows_gpu_weigh",
    "queue_workflows_gpu_queued",
    "queue_workflows_gpu_next",
    "queue_workflows_ingest_step",
)
READING = FUNCTIONS[3:7]
JOB_TABLES = ("workflow_node_jobs", "ingest_jobs")
WAITING = {
    "workflow_node_jobs_claim_idx", "workflow_node_jobs_model_idx", "ingest_jobs_claim_idx",
    "workflow_node_jobs_age_idx",
    "workflow_node_jobs_blocked_idx", "ingest_jobs_blocked_idx",
}  # fmt: skip
"""Indexes of jobs that wait: partial, so that they never hold what is finished."""
BY_KEY = {"workflow_node_jobs_pkey", "ingest_jobs_pkey", "workflow_runs_pkey"}
STATEMENT = re.compile(
    r"(?:^|\b(?:THEN|ELSE|LOOP|BEGIN|QUERY)\s)\s*((?:SELECT|UPDATE|WITH)\b.*)", re.DOTALL
)
VARIABLE = re.compile(r"\b[pv]_\w+\b")
ROWS = 100_000
ROWS_A_CLAIM = 60
ROWS_OF_A_COLD_CHOICE = 60 + 7 * 16
"""The balanced policy looks at the first 16 of each line that it weighs."""
ANALYZE = "ANALYZE workflow_runs, workflow_node_jobs, ingest_jobs, worker_controls"
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
      FROM generate_series(1, {ROWS // 4}) i;
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model, priority)
    SELECT 'r1', 'late' || i, 'm', 'gpu', 'rare', 200 FROM generate_series(1, 3) i;
SET session_replication_role = origin;
{ANALYZE}
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
    """What the function itself says, taken apart, so that the test follows it."""
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
        if match is None or "blocked_reason IS" not in match[1]:
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
    """What a plan does with jobs and runs besides walking an index until it has enough."""
    kind, table, index = node["Node Type"], node.get("Relation Name"), node.get("Index Name")
    if table in (*JOB_TABLES, "workflow_runs") and kind != "ModifyTable":
        if kind not in ("Index Scan", "Index Only Scan"):
            yield f"{kind} of {table}"
        elif index not in WAITING | BY_KEY:
            yield f"{table} by {index}"
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


@pytest.fixture(scope="module")
def crowded(own_database: database.Database) -> Generator[dict[str, Any]]:
    """What is wrong with the plans on empty tables and on full ones, and the DSN of the latter."""
    from queue_workflows import db

    name = own_database.fresh_name()
    dsn = own_database.create(name)
    found: dict[str, Any] = {"dsn": dsn}
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn):
        db.bootstrap()
        with db.connect(limited=False) as conn:
            for state, statement in (("empty", ANALYZE), ("alike", ALIKE), ("full", FILL)):
                conn.execute(statement.encode())
                found[state] = {
                    (function, one.text): list(faults(plan(conn, one)))
                    for function in FUNCTIONS
                    for one in statements(conn, function)
                }
    yield found
    own_database.drop(name)


@pytest.mark.parametrize("state", ["empty", "alike", "full"])
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
def test_a_plan_that_reads_or_sorts_the_line_is_seen(crowded: dict[str, Any], bad: str) -> None:
    from queue_workflows import db

    with db.connect(url=crowded["dsn"]) as conn:
        assert list(faults(plan(conn, Statement(bad, 0, ()))))


MODELS = [f"model{number}" for number in range(7)]
CLAIMANTS = {
    "cpu": factories.who("cpu"),
    "cpu, overflow": factories.who("cpu", newest=True),
    "gpu, cold": factories.who("gpu"),
    "gpu, warm": factories.who("gpu", model="model3"),
    "gpu, known": factories.who("gpu", models=MODELS),
    "gpu, known and warm": factories.who("gpu", models=MODELS, model="model3"),
    "gpu, known, overflow": factories.who("gpu", models=MODELS, newest=True),
    "gpu, known and far back": factories.who("gpu", models=["rare"]),
    "gpu, balanced, far back": factories.who("gpu", models=["rare"], policy="balanced"),
    "gpu, balanced, cold": factories.who("gpu", policy="balanced"),
    "gpu, balanced, known": factories.who("gpu", models=MODELS, policy="balanced"),
    "gpu, balanced, warm": factories.who("gpu", model="model3", policy="balanced"),
    "gpu, balanced, overflow": factories.who("gpu", models=MODELS, policy="balanced", newest=True),
    "ingest": factories.who("fetch"),
}


@pytest.mark.parametrize("name", CLAIMANTS)
def test_a_claim_among_many_reads_a_few_rows(crowded: dict[str, Any], name: str) -> None:
    from queue_workflows import db

    who = CLAIMANTS[name]
    step = claims.ingest_step if who.queue == "fetch" else claims.node_step
    with (
        db.connect(url=crowded["dsn"]) as conn,
        conn.transaction(force_rollback=True),
    ):
        assert step(conn, who, promote=True)
        read = factories.one(
            conn,
            "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::bigint"
            " FROM pg_stat_xact_user_tables WHERE relname = ANY (%s)",
            list(JOB_TABLES),
        )
        cold = who.policy == "balanced" and who.model is None
        assert 0 < read <= (ROWS_OF_A_COLD_CHOICE if cold else ROWS_A_CLAIM)
