"""Each mutant of the soak finds its target in the current code, and switches it off."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import db, errors, worker_control
from queue_workflows.claim import claims
from queue_workflows.cli import output
from queue_workflows.dag import confinement, plan
from queue_workflows.db import statements
from queue_workflows.worker import guards
from tests.hostile import extreme_values
from tests.soak import mutant, mutants
from tests.support import deaths, factories, transitions

pytestmark = pytest.mark.slow
"""They test the soak, which no quick test runs either."""
PACKAGE = Path(queue_workflows.__file__).parent
WITHOUT_PATCH = {"control", "columns"}
"""What they change is a variable of the environment, and the rights of a role."""
_CATALOG = """
SELECT array_agg(text ORDER BY text) AS texts FROM (
    SELECT pg_get_functiondef(p.oid) || coalesce(p.proacl::text, '') AS text FROM pg_proc p
     WHERE p.prokind = 'f' AND p.pronamespace = 'public'::regnamespace
    UNION ALL SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t
    UNION ALL SELECT i.indexdef FROM pg_indexes i WHERE i.schemaname = 'public') found
"""
Probe = Callable[[db.Connection], object]


@pytest.fixture(autouse=True)
def switched_on_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A mutant patches its process for good: here it ends with its test."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DISABLE_WORKER_CONTROL", "")
    yield
    mutant.undo()


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_changes_the_process_or_the_schema(name: str, db: ModuleType) -> None:
    """A target that is gone raises; one that reads as before would be no defence."""
    each = mutants.MUTANTS[name]
    with db.connect() as conn, conn.transaction(force_rollback=True):
        before = conn.execute(_CATALOG).fetchone()
        mutants.alter(conn, name)
        assert (conn.execute(_CATALOG).fetchone() != before) is (each.schema is not None)
    mutants.switch_off(name)
    changed = [(one.owner, one.name) for one in mutant.replaced]
    assert all(_now(owner, key) is not old for owner, key, old in mutant.replaced)
    assert bool(changed) is (each.process is not None and name not in WITHOUT_PATCH)
    assert changed or each.schema is not None or name in WITHOUT_PATCH


def _now(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_engine_calls_what_a_mutant_replaces(name: str) -> None:
    """A function that nobody calls any more can be replaced without an effect."""
    mutants.switch_off(name)
    called = _called()
    for owner, key, _ in mutant.replaced:
        if isinstance(owner, ModuleType):
            home = owner.__name__.rpartition(".")[2]
            assert {f"{home}.{key}", f"{owner.__name__}:{key}"} & called, f"nobody calls {key}"
        elif isinstance(owner, type):
            assert f".{key}" in called, f"nobody calls {key}"


@functools.cache
def _called() -> set[str]:
    """Return every call in the package: `module.name`, `.method`, `home.module:name`."""
    found = set[str]()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.walk(ast.parse(path.read_bytes())):
            # A function may be handed on by name, as `set_json_loads(load_json)` does.
            if isinstance(node, ast.Attribute):
                found.add(f".{node.attr}")
                if isinstance(node.value, ast.Name):
                    found.add(f"{node.value.id}.{node.attr}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(f"{module}:{node.id}")
    return found


def test_a_target_that_is_gone_is_reported(db: ModuleType) -> None:
    with pytest.raises(AssertionError, match="does not define no_such_function any more"):
        mutant.replace(claims, "no_such_function", print)
    statement = {"ingest_jobs": statements.Named(b"SELECT 1", "Return 1.", "value", None)}
    with pytest.raises(AssertionError, match="does not say b'SELECT 2' any more"):
        mutant.rewrite(statement, b"SELECT 2", b"")
    with db.connect() as conn, pytest.raises(AssertionError, match="does not say 'SELECT 2'"):
        mutant.edit(conn, "queue_workflows_node_step", ("SELECT 2", ""))


def test_a_name_that_a_module_bound_at_its_import_is_replaced_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tables print by `output.line`, which is `display.line` under another name."""
    output.table(["id"], [[extreme_values.ESCAPE]])
    assert extreme_values.ESCAPE not in capsys.readouterr().out
    mutants.switch_off("display")
    output.table(["id"], [[extreme_values.ESCAPE]])
    assert extreme_values.ESCAPE in capsys.readouterr().out
    mutant.undo()
    output.table(["id"], [[extreme_values.ESCAPE]])
    assert extreme_values.ESCAPE not in capsys.readouterr().out


def _finish_for_another(conn: db.Connection) -> object:
    factories.node(conn)
    job = transitions.claim_node(conn)
    return _outcome(conn, lambda: transitions.complete_node(conn, job | {"worker_id": "w2"}))


def _outcome(conn: db.Connection, act: Callable[[], object]) -> str:
    try:
        with conn.transaction():
            act()
    except (psycopg.Error, errors.QueueWorkflowsError) as error:
        return type(error).__name__
    return "done"


def _leave_terminal_state(conn: db.Connection) -> object:
    factories.node(conn)
    job = transitions.claim_node(conn)
    transitions.complete_node(conn, job)
    again = "UPDATE workflow_node_jobs SET status = 'queued' WHERE id = %s"
    return _outcome(conn, lambda: conn.execute(again, (job["id"],)))


def _one_key_twice(conn: db.Connection) -> object:
    for prefix in ("a", "b"):
        jobs = '[{"task_name": "t", "queue": "fetch", "idempotency_key": "k"}]'
        conn.execute("SELECT * FROM queue_workflows_put_jobs(%s, %s)", (prefix, jobs))
    return factories.one(conn, "SELECT count(*) FROM ingest_jobs")


def _claimable_of_one_lock_key(conn: db.Connection) -> object:
    for _ in range(2):
        factories.ingest(conn, lock_key="k")
        conn.execute("SET CONSTRAINTS ALL IMMEDIATE")  # admits, as a commit does
        conn.execute("SET CONSTRAINTS ALL DEFERRED")
    return factories.one(
        conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'queued' AND blocked_reason IS NULL"
    )


def _claim_of_a_paused_queue(conn: db.Connection) -> object:
    factories.ingest(conn)
    conn.execute("INSERT INTO queue_settings (queue, paused_at) VALUES ('fetch', now())")
    return len(transitions.claim(conn, transitions.who("fetch")))


def _claim_of_a_cancelled_run(conn: db.Connection) -> object:
    job = factories.node(conn)
    end = "UPDATE workflow_runs SET status = 'cancelled' WHERE id = %s"
    conn.execute(end, (job["run_id"],))
    return not transitions.claim(conn)


def _renew(conn: db.Connection) -> object:
    factories.node(conn)
    job = transitions.claim_node(conn, transitions.who(lease_s=5))
    transitions.renew(conn, job, lease_s=500)
    return factories.one(
        conn, "SELECT lease_expires_at > now() + interval '60 s' FROM workflow_node_jobs"
    )


def _recover_a_neighbour(conn: db.Connection) -> object:
    return _recovered(conn, pid=2)


def _recover_the_dead(conn: db.Connection) -> object:
    return _recovered(conn, pid=1)


def _recovered(conn: db.Connection, *, pid: int) -> int:
    """How many jobs a parent takes back of the worker with pid 1 once this one is dead."""
    factories.node(conn)
    who = transitions.who(worker_id=deaths.worker_id("box", 1, "ex-0"))
    transitions.claim_node(conn, who)
    return len(deaths.recover(conn, deaths.killed(pid), "box"))


def _reclaim_a_lease_of_3_s(conn: db.Connection) -> object:
    factories.node(conn)
    transitions.claim_node(conn, transitions.who(lease_s=3))
    return len(transitions.reclaim_lapsed(conn, "node"))


def _reclaim_without_a_session(conn: db.Connection) -> object:
    factories.node(conn)
    job = transitions.claim_node(conn)
    of_process = {"host_label": "box", "queue": "cpu", "pid": 1, "detail": {"lock": True}}
    factories.insert(conn, "workers", worker_id=job["worker_id"], **of_process)
    conn.execute("UPDATE workers SET last_seen = now() - interval '60 s'")
    conn.execute("UPDATE workflow_node_jobs SET heartbeat_at = now() - interval '60 s'")
    return len(transitions.reclaim_gone(conn, "node", 1.0))


def _read_what_is_deep(_: db.Connection) -> object:
    return type(db.load_json(extreme_values.nested(300))).__name__


def _print_raw(_: db.Connection) -> object:
    return output.line(extreme_values.ESCAPE)


def _lease_that_ends(_: db.Connection) -> object:
    return guards.LeaseEnd(0.0, 6.0).check(100.0) is None


def _confine(_: db.Connection) -> object:
    return confinement.roots()


def _is_ready(_: db.Connection) -> object:
    return len(plan.Planner(_Waiting(), None, None).ready(["join"]))  # type: ignore[arg-type]


class _Waiting:
    """Progress of a run whose node `join` waits for one of two."""

    known = frozenset({"a"})

    def deps(self, _: str) -> tuple[str, ...]:
        return ("a", "b")

    def last_open(self, _: str) -> int:
        return 1


def _obeys(_: db.Connection) -> object:
    return worker_control.config.DISABLE_WORKER_CONTROL.read()


PROBES: dict[str, Probe] = {
    "fence": _finish_for_another, "terminal-guard": _leave_terminal_state, "keys": _one_key_twice,
    "lock-keys": _claimable_of_one_lock_key, "pauses": _claim_of_a_paused_queue,
    "cancel": _claim_of_a_cancelled_run, "renewal": _renew, "crash-recovery": _recover_a_neighbour,
    "no-crash-recovery": _recover_the_dead, "early-reclaim": _reclaim_a_lease_of_3_s,
    "loader": _read_what_is_deep, "display": _print_raw, "self-fence": _lease_that_ends,
    "folders": _confine, "ready-check": _is_ready, "control": _obeys,
    "evidence": _reclaim_without_a_session,
}  # fmt: skip


@pytest.mark.parametrize("name", PROBES)
def test_a_mutant_behaves_differently(
    name: str, db: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUT_ROOTS", os.fspath(tmp_path))
    with db.connect() as conn:
        with conn.transaction(force_rollback=True):
            before = PROBES[name](conn)
        with conn.transaction(force_rollback=True):
            mutants.alter(conn, name)
            mutants.switch_off(name)
            after = PROBES[name](conn)
    assert after != before
