"""List the mutants, with which the soak's checks are tested."""

from __future__ import annotations

import os
import re
from typing import Any

from queue_workflows import db
from queue_workflows.claim import claims
from queue_workflows.dag import plan
from queue_workflows.db import statements
from queue_workflows.dispatch import schedule_rows
from queue_workflows.run import launcher
from queue_workflows.runtime import kernel
from queue_workflows.worker import (
    claimed_job,
    desk,
    guards,
    leases,
    node_plans,
    parent,
    queue_state,
)
from tests.soak import (
    mutants_executors,
    mutants_growth,
    mutants_hostile,
    mutants_jobs,
    mutants_streams,
)
from tests.soak.mutant import Conn, Mutant, edit, replace, rewrite

_RUN_IS_LIVE = (
    r"AND (?:\w+\.status NOT IN \('completed', 'failed', 'cancelled'\)"
    r"|NOT queue_workflows_is_terminal_run\(\w+\.status\))"
)


def names(text: str) -> list[str]:
    """Return the mutants of `a,b`; raise ValueError for an unknown one."""
    found = text.split(",")
    if unknown := [name for name in found if name not in MUTANTS]:
        raise ValueError(f"{unknown[0]} is none of {', '.join(sorted(MUTANTS))}")
    return found


def together(text: str | None) -> Mutant:
    """Return the load that shows these mutants, if any."""
    chosen = [MUTANTS[name] for name in names(text)] if text else []
    return Mutant(
        "", "",
        focus=next((each.focus for each in chosen if each.focus), None),
        load={name: n for each in chosen for name, n in each.load.items()},
        gap_s=next((each.gap_s for each in chosen if each.gap_s), None),
        jobs={name: n for each in chosen for name, n in each.jobs.items()},
        values=next((each.values for each in chosen if each.values), ""),
        calls=next((each.calls for each in chosen if each.calls), None),
        hostile=tuple(column for each in chosen for column in each.hostile),
        strangers=next((each.strangers for each in chosen if each.strangers), ""),
        grants=next((each.grants for each in chosen if each.grants), ""),
    )  # fmt: skip


def switch_off(text: str) -> None:
    """Patch this process with the mutant."""
    for name in names(text):
        if (patch := MUTANTS[name].process) is not None:
            patch()


def alter(conn: Conn, text: str) -> None:
    """Alter the soak's own schema with the mutant."""
    for name in names(text):
        if (change := MUTANTS[name].schema) is not None:
            change(conn)


def _no_self_fence() -> None:
    """Let a worker continue after it lost its lease."""
    replace(guards.LeaseEnd, "check", lambda *_: None)
    replace(kernel.DeathTimer, "set", lambda *_: None)
    replace(launcher.Launcher, "hold", lambda *_: True)
    replace(desk.Desk, "lose", lambda *_: None)


def _no_fence(conn: Conn) -> None:
    """Let the finish of a node require only that the node is running."""
    held = r"worker_id IS NOT DISTINCT FROM p_worker AND j\.claim_no = p_claim_no\s+AND j\.status ="
    edit(conn, "queue_workflows_node_step", (held, "status ="))


def _drop_events(conn: Conn, condition: str) -> None:
    """Drop the event of node completions except where the condition is true."""
    old = "VALUES (v_old.run_id, v_old.node_id, 'completed', p_job, p_claim_no, v_old.generation,"
    end = "CASE WHEN v_ahead THEN now() END);"
    edit(
        conn,
        "queue_workflows_node_step",
        (re.escape(old), old.replace("VALUES (", "SELECT ")),
        (re.escape(end), f"CASE WHEN v_ahead THEN now() END WHERE {condition};"),
    )


def _no_outbox(conn: Conn) -> None:
    """Record results without the event that continues the run."""
    _drop_events(conn, "random() < 0.8")


def _late_outbox(conn: Conn) -> None:
    """Commit the finish first and the event a moment later, separately."""
    _drop_events(conn, "false")


def _send_later() -> None:
    claim = queue_state.Queue.claim
    event = (
        b"INSERT INTO workflow_dispatch_events"
        b" (run_id, node_id, kind, job_id, claim_no, generation)"
        b" SELECT run_id, node_id, 'completed', id, claim_no, generation"
        b" FROM workflow_node_jobs WHERE id = %(job)s"
    )

    def swapped(own: queue_state.Queue, count: int, done: Any, **more: Any) -> db.Script[Any]:
        rows = yield from claim(own, count, done, **more)
        for job, _ in done if own.table.in_run else ():
            yield db.Statement(event, {"job": job.id})
        return rows

    replace(node_plans, "after", lambda done: [None] * len(done))
    replace(queue_state.Queue, "claim", swapped)


def _no_guards(conn: Conn) -> None:
    conn.execute("DROP TRIGGER workflow_runs_guard ON workflow_runs")
    over = (
        r"IF (?:OLD\.status IN \('completed', 'failed', 'cancelled', 'skipped'\)"
        r"|queue_workflows_is_terminal_job\(OLD\.status\))"
    )
    edit(conn, "queue_workflows_job_changed", (over, "IF false"))


def _no_renewal() -> None:
    def pretend(leases: Any, **_: Any) -> db.Script[list[claims.Renewal]]:
        yield db.Statement(b"SELECT")
        return [claims.Renewal(lease.job_id, lease.claim_no, cancel=False) for lease in leases]

    replace(claims, "renew", pretend)


def _recover_all_workers() -> None:
    of_process = b"starts_with(worker_id, %(prefix)s::text)"
    rewrite(statements.claims.held_by, of_process, b"worker_id IS NOT NULL")


def _recover_no_worker() -> None:
    replace(parent, "recover_claims", lambda *_, **__: [])


def _charge_no_worker() -> None:
    """Let a parent count no crash of a job whose handler has killed its worker."""
    replace(parent, "_is_crash", lambda *_: False)


def _never_alone() -> None:
    """Let a job run beside others even if its next crash is its last."""
    replace(claimed_job.recovery, "is_last", lambda *_: False)


def _trust_replies() -> None:
    """Never look for claims, or records, whose reply was lost."""

    def forget(_: desk.Desk, own: queue_state.Queue, done: Any) -> None:
        del done
        own.claiming, own.may_claim = False, True

    replace(desk.Desk, "_unknown", forget)


def _wait_for_rows() -> None:
    """Renew all leases by one statement that waits for each row, and never one by one."""

    def together(held: Any, reports: Any, _: Any) -> db.Script[list[claims.Renewal]]:
        found: list[claims.Renewal] = []
        for own, jobs in held:
            found += yield from leases._renewal(own, jobs, reports)
        return found

    rewrite(statements.claims.renew, b"FOR UPDATE SKIP LOCKED", b"FOR UPDATE")
    replace(leases, "_renewals", together)


def _ignore_ended_sessions() -> None:
    rewrite(statements.recovery.gone, b"LIMIT 100", b"LIMIT 0")


def _reclaim_early() -> None:
    old = b"lease_expires_at < now()"
    rewrite(statements.recovery.lapsed, old, old + b" + interval '4.5 seconds'")


def _ready_at_once() -> None:
    """Count a node as ready when one of its dependencies has ended."""
    ready = plan.Planner.ready

    def eager(self: plan.Planner, candidates: Any) -> list[str]:
        listed = list(candidates)
        at_end = ready(self, [node for node in listed if node == plan.END])
        return [node for node in listed if node != plan.END or at_end]

    replace(plan.Planner, "ready", eager)


def _two_answers(conn: Conn) -> None:
    conn.execute("DROP INDEX workflow_input_submissions_inflight_unique")
    # ON CONFLICT wants an index; one that never refuses.
    conn.execute(
        "CREATE UNIQUE INDEX workflow_input_submissions_inflight_unique"
        " ON workflow_input_submissions (run_id, node_id, id)"
        " WHERE status IN ('pending', 'processing')"
    )


def _accept_all() -> None:
    def submit(conn: Conn, *, run_id: str, node_id: str, value: str) -> Any:
        return conn.execute(
            "INSERT INTO workflow_input_submissions (run_id, node_id, value)"
            " VALUES (%s, %s, %s::jsonb) RETURNING *",
            (run_id, node_id, value),
        ).fetchone()

    replace(statements.input_answers, "submit", submit)


def _claim_cancelled(conn: Conn) -> None:
    conn.execute("DROP TRIGGER workflow_runs_close ON workflow_runs")
    nodes = ("node_step", "nodes_step", "node_kept")
    for function in (*nodes, "gpu_take", "gpu_line", "gpu_next"):
        edit(conn, f"queue_workflows_{function}", (_RUN_IS_LIVE, ""))


def _fire_unclaimed() -> None:
    def fire(conn: Conn, row: dict[str, Any], _: Any, *, reason: str = "tick") -> str:
        made = conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, reason) VALUES (%s, %s, %s) RETURNING id",
            (row["task_name"], row["queue"], reason),
        ).fetchone()
        assert made is not None
        return made["id"]

    replace(schedule_rows, "fire", fire)


def _disobey() -> None:
    os.environ["QUEUE_WORKFLOWS_DISABLE_WORKER_CONTROL"] = "1"


LAST_LONG = {"long": 3, "wide": 0, "diamond": 0}
MUTANTS = {
    "fence": Mutant(
        "a node finishes without its claim, and no worker stops when its claim is lost",
        "finalised by a superseded claim", _no_self_fence, _no_fence, "stop", LAST_LONG, 4.0,
    ),
    "self-fence": Mutant(
        "a worker that lost its claim continues",
        "handlers that outlived their claim", _no_self_fence, None, "freeze", LAST_LONG, 4.0,
    ),
    "renewal": Mutant(
        "leases are not renewed", "claims taken back without a fault", _no_renewal, load=LAST_LONG
    ),
    "terminal-guard": Mutant(
        "the triggers that keep terminal states", "terminal rows moved", None, _no_guards
    ),
    "outbox": Mutant("one result in five comes without its event", "invariants", None, _no_outbox),
    "swapped-commits": Mutant(
        "the event of a result is a separate commit", "invariants", _send_later, _late_outbox
    ),
    "crash-recovery": Mutant(
        "a parent hands back the jobs of all workers, not only of the dead one",
        "claims taken back without a fault", _recover_all_workers, None, "kill",
    ),
    "no-crash-recovery": Mutant(
        "a parent hands nothing back", "recovered later than promised",
        _recover_no_worker, None, "kill",
    ),
    "worker-killers": Mutant(
        "a parent charges no job for a worker that was killed",
        "deaths by handlers that nobody charged", _charge_no_worker, load={"kills_worker": 3},
        jobs={"mixed": 12},
    ),
    "neighbours": Mutant(
        "a job whose next crash is its last runs beside others", "crashes charged without evidence",
        _never_alone, load={"kills_worker": 3}, jobs={"mixed": 24},
    ),
    "lost-replies": Mutant(
        "a worker does not look for claims whose reply was lost",
        "claims taken back without a fault", _trust_replies, None, "cut", jobs={"pooled": 36},
    ),
    "row-locks": Mutant(
        "a row that somebody has locked keeps all leases of its worker from being renewed",
        "claims taken back without a fault", _wait_for_rows, load=LAST_LONG | {"long": 12},
        strangers="rows", jobs={"pooled": 36},
    ),
    "evidence": Mutant(
        "an ended session is ignored: only the lease decides",
        "stuck", _ignore_ended_sessions, None, "kill", {"killed": 3},
    ),
    "early-reclaim": Mutant(
        "leases lapse 4.5 s too early",
        "claims taken back without a fault", _reclaim_early, load=LAST_LONG,
    ),
    "ready-check": Mutant(
        "a node is ready when one of its dependencies is", "nodes that ran too early",
        _ready_at_once,
    ),
    "answers": Mutant(
        "every answer to a question is accepted", "answers", _accept_all, _two_answers
    ),
    "cancel": Mutant(
        "a cancel leaves queued jobs, and claims do not check the run",
        "claimed after a cancel or while OFF", None, _claim_cancelled, load={"wide": 6, "long": 0},
    ),
    "control": Mutant(
        "OFF is not obeyed", "claimed after a cancel or while OFF", _disobey, focus="off"
    ),
    "fires": Mutant(
        "schedulers fire without a claim", "doubled or missed fires", _fire_unclaimed
    ),
    **mutants_jobs.MUTANTS,
    **mutants_hostile.MUTANTS,
    **mutants_executors.MUTANTS,
    **mutants_growth.MUTANTS,
    **mutants_streams.MUTANTS,
}  # fmt: skip
