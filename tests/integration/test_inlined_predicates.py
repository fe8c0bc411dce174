"""The SQL functions that name a rule, such as `queue_workflows_is_...`, cost no call: inlined."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tests.support import named_statements, tabled

_CALLS = (b"queue_workflows_is_", b"queue_workflows_prunable_run")
# Values that no condition becomes false of, which would take the rule out of the plan.
_GIVEN: dict[str, Any] = {
    "days": 1.0, "first": "(0,0)", "end": "(1,0)", "ids": ["x"], "aside": ["x"], "limit": 1,
    "queue": "q", "partition": "p", "at": None, "lasts": None, "by": None, "stale_s": 1.0,
    "job": "j", "result": "1", "seconds": 1.0, "rss": 1, "error": "e", "run_id": "r", "host": "h",
    "worker": "w", "models": ["m"], "required_model": "m", "given": ["error"], "status": "queued",
    "priority": 1, "seq": 1, "newest": True, "most": 10, "name": "spans", "batch": 1,
    "sweep_s": 1.0,
}  # fmt: skip
_SIGNS = {
    "is_lost": "now()",
    "is_off": "now()",
    "is_paused": "now()",
    "is_past_retention": "now()",
    "is_terminal_job": "'{completed,failed,cancelled,skipped}'",
    "is_terminal_run": "'{completed,failed,cancelled}'",
    "prunable_run": "workflow_dispatch_events e",
}
"""What the plan shows of a rule. An index on claimable jobs leaves nothing of `is_claimable`."""
_SELECTS = {
    "is_claimable": "workflow_node_jobs j WHERE {}(j.status, j.blocked_reason)",
    "is_lost": "ingest_jobs j WHERE {}(j.status, j.lease_expires_at)",
    "is_off": "worker_controls c WHERE {}(c.desired_state, c.until_at)",
    "is_past_retention": "ingest_jobs j WHERE {}(j.status, j.finished_at, 1.0)",
    "is_paused": "queue_settings s WHERE {}(s.paused_at, s.paused_until)",
    "is_terminal_job": "workflow_node_jobs j WHERE {}(j.status)",
    "is_terminal_run": "workflow_runs r WHERE {}(r.status)",
    "prunable_run": "workflow_runs r CROSS JOIN {}(r.id, r.status, r.finished_at, 1.0)",
}


class _Given(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


_TEXTS = {
    name: text
    for name, text in named_statements.texts().items()
    if any(call in text for call in _CALLS)
}


def _called(plan: str) -> list[str]:
    return [call.decode() for call in _CALLS if call.decode() in plan]


def _plan(db: ModuleType, text: bytes) -> str:
    with db.connect() as conn:
        conn.execute("SET enable_seqscan = off")  # an empty table, once analyzed, needs no index
        rows = conn.execute(b"EXPLAIN VERBOSE " + text, _Given(_GIVEN)).fetchall()
    return "\n".join(row["QUERY PLAN"] for row in rows)


def test_no_plan_of_a_statement_calls_one(db: ModuleType) -> None:
    for name in _TEXTS:
        with tabled.case(name):
            text = _TEXTS[name]
            plan = _plan(db, text)
            assert _called(plan) == []
            if name.startswith("queues.pause_"):  # EXPLAIN does not show what ON CONFLICT sets.
                continue
            signs = [
                sign for rule, sign in _SIGNS.items() if f"queue_workflows_{rule}(".encode() in text
            ]
            assert [sign for sign in signs if sign not in plan] == []


def test_each_is_inlined_where_it_selects_rows(db: ModuleType) -> None:
    with db.connect() as conn:
        rules = conn.execute(
            "SELECT substr(proname, 17) AS rule FROM pg_proc"
            " WHERE pronamespace = current_schema()::regnamespace"
            " AND starts_with(proname, 'queue_workflows_is_')"
        ).fetchall()
    assert {row["rule"] for row in rules} | {"prunable_run"} == set(_SELECTS)
    for rule, rest in _SELECTS.items():
        plan = _plan(db, f"SELECT FROM {rest.format('queue_workflows_' + rule)}".encode())
        assert _called(plan) == [], rule
        assert _SIGNS.get(rule, "Index") in plan, (rule, plan)


def test_one_function_names_the_runs_that_retention_may_delete(db: ModuleType) -> None:
    of_runs = {
        name: text
        for name, text in named_statements.texts().items()
        if name.startswith("retention.") and b" workflow_runs r" in text
    }
    names = ("old_runs", "count_runs")
    assert set(of_runs) == {f"retention.{name}" for name in names}
    for name, text in of_runs.items():
        assert (text.count(b"queue_workflows_prunable_run("), text.count(b"EXISTS")) == (1, 0), name
        plan = _plan(db, text)
        assert ("Function Scan" in plan, "Join" in plan) == (False, False), name
        assert "workflow_node_jobs n" in plan, name
