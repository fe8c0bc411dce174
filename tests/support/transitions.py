"""What a worker or a sweep does to jobs, each in one call on a given connection.

Tests of rows claim, record and recover through this module alone: when the engine's own functions
change, this file does. A job is a row as a claim returned it; it says which claim is meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from psycopg import sql

from queue_workflows import db, errors
from queue_workflows.claim import (
    admission,
    claims,
    job_steps,
    job_tables,
    outcomes,
    recovery,
    row_isolation,
)
from queue_workflows.claim import record as recording
from queue_workflows.dag import policy
from queue_workflows.db import statements
from queue_workflows.types import Row
from tests.support import factories

Claimant = claims.Claimant
Kind = Literal["node", "ingest"]
KINDS: tuple[Kind, Kind] = ("node", "ingest")
TABLES = {"node": job_tables.NODE_JOBS.name, "ingest": job_tables.INGEST_JOBS.name}
"""The names of the tables of jobs."""
EVENTS = {"node": job_tables.NODE_JOBS.events, "ingest": job_tables.INGEST_JOBS.events}
"""The names of the tables of their events."""
_TABLES = {"node": job_tables.NODE_JOBS, "ingest": job_tables.INGEST_JOBS}


def kind_of(job: Row) -> Kind:
    """Return the kind of a job's row."""
    return "node" if "node_id" in job else "ingest"


def _table_of(job: Row) -> job_tables.JobTable:
    return _TABLES[kind_of(job)]


def lease_of(job: Row) -> job_tables.Lease:
    """Return the claim of a row, for functions of the engine."""
    return job_tables.lease_of(_table_of(job), job)


def who(queue: str = "cpu", worker_id: str = "w1", **more: Any) -> claims.Claimant:
    """Return a claimant of this identity on host `box`."""
    return claims.Claimant(worker_id, more.pop("host", "box"), queue, **more)


class OnWait(NamedTuple):
    """What to call with a `claims.Wait`, and how many seconds ahead to look for delayed jobs."""

    call: Callable[[claims.Wait], object]
    within_s: float


def on_limit_wait(waits_s: list[float]) -> OnWait:
    """Return what lets a claim append the seconds until a limit admits the next job."""

    def call(wait: claims.Wait) -> None:
        if wait.limit_s is not None:
            waits_s.append(max(0.0, wait.limit_s))

    return OnWait(call, 0.0)


def on_wait(call: Callable[[claims.Wait], object], within_s: float = 0.0) -> OnWait:
    """Return what tells a claim whom to call when there are fewer jobs than it may take."""
    return OnWait(call, within_s)


def claim(
    conn: db.Connection, claimant: claims.Claimant | None = None, count: int = 1, **more: Any
) -> list[Row]:
    """Claim up to `count` jobs of the claimant's queue, with its `promote` and `on_wait`."""
    claimant = claimant or who()
    return _claim(conn, job_tables.of_queue(claimant.queue), claimant, count, **more)


def _claim(
    conn: db.Connection,
    table: job_tables.JobTable,
    claimant: claims.Claimant,
    count: int,
    done: Sequence[claims.Done] = (),
    *,
    promote: bool = False,
    on_wait: OnWait | None = None,
) -> list[Row]:
    """Record completed jobs and claim others; `ClaimLost` when a claim is held no longer."""
    ahead_s = None if on_wait is None else on_wait.within_s
    script = claims.claim(table, claimant, count=count, done=done, promote=promote, ahead_s=ahead_s)
    try:
        rows = db.run(conn, script)
    except db.Error as error:
        if error.sqlstate == claims.CLAIM_LOST:
            raise errors.ClaimLost(str(error)) from None
        raise
    if rows and rows[-1]["id"] is None:
        last = rows.pop()
        if on_wait is not None:
            on_wait.call(claims.Wait(last["wait_s"], last["due_s"]))
    return [row["body"] for row in rows]


def claim_node(conn: db.Connection, claimant: claims.Claimant | None = None, **more: Any) -> Row:
    """Claim the next node job; there must be one."""
    (job,) = claim(conn, claimant, **more)
    return job


def claim_ingest(conn: db.Connection, claimant: claims.Claimant | None = None, **more: Any) -> Row:
    """Claim the next ingest job; there must be one."""
    (job,) = claim(conn, claimant or who("fetch"), **more)
    return job


def renew(
    conn: db.Connection, *jobs: Row, lease_s: float = 600.0, progress: Sequence[str | None] = ()
) -> list[claims.Renewal]:
    """Renew the leases of jobs of one kind; a job without a reply has lost its claim."""
    leases = [*map(lease_of, jobs)]
    return db.run(conn, claims.renew(leases, lease_s=lease_s, progress=progress))


def complete_node(conn: db.Connection, job: Row, **delta: Any) -> None:
    """Complete a claimed node job under its claim; `ClaimLost` when it is held no longer."""
    complete(conn, job, **delta)


def complete_ingest(conn: db.Connection, job: Row, **result: Any) -> None:
    """Complete a claimed ingest job under its claim; `ClaimLost` when it is held no longer."""
    complete(conn, job, **result)


def complete(conn: db.Connection, job: Row, **result: Any) -> None:
    """Complete a claimed job under its claim; `ClaimLost` when it is held no longer."""
    done = claims.Done(lease_of(job), outcomes.Outcome("completed", 0.1, json.dumps(result)))
    claimant = who(job["queue"], worker_id=job["worker_id"])
    _claim(conn, _table_of(job), claimant, 0, [done])


def run_ingest(conn: db.Connection, queue: str = "fetch", seconds: float = 1.5) -> None:
    """Insert an ingest job, claim and complete it, as if its handler had taken that long."""
    factories.ingest(conn, queue=queue)
    record(conn, claim_ingest(conn, who(queue)), seconds=seconds)


def complete_and_claim(
    conn: db.Connection, jobs: Sequence[Row], claimant: claims.Claimant, count: int = 1, **more: Any
) -> list[Row]:
    """Complete jobs of one kind in the statement that claims up to `count` others; return these."""
    done = [claims.Done(lease_of(job), outcomes.Outcome("completed", 0.1)) for job in jobs]
    return _claim(conn, _table_of(jobs[0]), claimant, count, done, **more)


def record(conn: db.Connection, job: Row, kind: str = "completed", **more: Any) -> str:
    """Record an outcome of this kind; return `"completed"`, `"failed"` or `"skipped"`."""
    return recording.record(conn, lease_of(job), outcomes.Outcome(kind, **{"seconds": 0.1} | more))


def fail(conn: db.Connection, job: Row, error: str = "broke", **more: Any) -> Row | None:
    """Fail an attempt, which is retried up to `most` times in all; None: the claim is lost.

    `more`: `most` (1), `retry` (True), `after_s` (None: the back-off), `seconds` (None: unknown).
    """
    given: dict[str, Any] = {"most": 1, "retry": True, "after_s": None, "seconds": None} | more
    wish = "retry" if given["retry"] else "discard"
    outcome = outcomes.Outcome(
        "failed",
        given["seconds"],
        error=error,
        raised=policy.Raised(wish=wish, after_s=given["after_s"]),
        task={"retries": given["most"] - 1},
    )
    found: Any = db.run(conn, recording.end(lease_of(job), outcome))
    return found


def leave(conn: db.Connection, job: Row, error: str) -> str:
    """Record that the worker of a claimed node does not know it, as `record` does."""
    return record(conn, job, "failed", error=error, raised=policy.Raised(wish="elsewhere"))


def park(conn: db.Connection, job: Row) -> Row | None:
    """Let an input node wait for its answer; None: the claim is lost."""
    return db.run(conn, statements.attempts.park.script(**job_tables.fence(lease_of(job))))


def end_by_watchdog(
    conn: db.Connection, job: Row, error: str = "over its budget", seconds: float = 1.0, **more: Any
) -> Row | None:
    """End an attempt as a watchdog does; None: the claim is lost."""
    given = {"error": error, "seconds": seconds} | more
    return db.run(conn, recording.end_by_guard(lease_of(job), recording.BUDGET_TRIP, **given))


def hand_back(conn: db.Connection, job: Row, reason: str = "shutdown", **more: Any) -> Row | None:
    """Give a claim up, without counting anything; None: the claim is lost."""
    return db.run(conn, recording.hand_back(lease_of(job), reason=reason, **more))


def hand_back_all(conn: db.Connection, jobs: Sequence[Row], reason: str = "shutdown") -> list[Row]:
    """Give up claims of one kind; return the changed rows."""
    return db.run(conn, recording.hand_back_all([*map(lease_of, jobs)], reason=reason))


def release_strays(
    conn: db.Connection, kind: Kind, worker_id: str = "w1", known: Sequence[Row] = ()
) -> list[Row]:
    """Hand back what a worker has claimed, without these claims; return the changed rows."""
    held = {*map(lease_of, known)}
    return db.run(conn, recording.release_strays(_TABLES[kind], worker_id, held))


def expire(conn: db.Connection, job: Row) -> None:
    """Let the lease of a job lapse."""
    conn.execute(
        sql.SQL(
            "UPDATE {} SET lease_expires_at = now() - interval '1 second'"
            " WHERE id = %s AND status = 'running'"
        ).format(sql.Identifier(_table_of(job).name)),
        (job["id"],),
    )


def reclaim_lapsed(
    conn: db.Connection, kind: Kind, rows: row_isolation.Isolation | None = None, **more: Any
) -> list[Row]:
    """Take back the jobs of a kind whose leases have lapsed, counting a lapse of each."""
    return recovery.reclaim_lapsed(conn, _TABLES[kind], rows or row_isolation.Isolation(), **more)


def reclaim_gone(
    conn: db.Connection,
    kind: Kind,
    silent_s: float = 0.0,
    rows: row_isolation.Isolation | None = None,
) -> list[Row]:
    """Take back the jobs whose worker's session is gone and that were not renewed `silent_s`."""
    return recovery.reclaim_gone(conn, _TABLES[kind], rows or row_isolation.Isolation(), silent_s)


def reclaim_dead(
    conn: db.Connection, kind: Kind, prefix: str, evidence: str = "killed by SIGKILL"
) -> list[Row]:
    """Take back the jobs of a process that was seen to die; its worker ids start with `prefix`."""
    table = _TABLES[kind]
    held = statements.claims.held_by[table.name](conn, prefix=prefix)
    leases = [job_tables.lease_of(table, row) for row in held]
    return recovery.reclaim_dead(conn, leases, evidence=evidence)


def charge(conn: db.Connection, job: Row, evidence: str = "it died") -> Row | None:
    """Give a claim up and count a crash; None: the claim is lost."""
    return db.run(conn, recovery.charge(lease_of(job), evidence=evidence))


def promote_due(conn: db.Connection) -> int:
    """Admit all delayed jobs and runs whose time has come; return how many."""
    return admission.promote_due(conn)


def stream(conn: db.Connection, job: Row, first: int, *values: Any, name: str = "text") -> bool:
    """Store parts of a job's stream, numbered from `first` on; return whether the claim holds."""
    texts = [json.dumps(value) for value in values]
    request = {"op": "stream", "first": first, "parts": texts, "names": [name] * len(texts)}
    answer = db.run(conn, job_steps.answer(lease_of(job), request))
    assert answer in ({"state": "done"}, {"state": "lost"}), answer
    return answer == {"state": "done"}


def begin_step(conn: db.Connection, job: Row, name: str) -> Row:
    """Begin a step of a claimed job; return the answer to its handler."""
    request = {"op": "begin", "kind": "step", "name": name, "key": "", "arguments_hash": "h"}
    return db.run(conn, job_steps.answer(lease_of(job), request | {"arguments": "a"}))


def end_step(conn: db.Connection, job: Row, name: str, output: Any) -> Row:
    """Record that a step of a claimed job is done; return the answer to its handler."""
    request = {"op": "end", "kind": "step", "name": name, "key": "", "state": "done"}
    return db.run(conn, job_steps.answer(lease_of(job), request | {"output": json.dumps(output)}))


def store_position(conn: db.Connection, job: Row, name: str, position: int) -> None:
    """Store how far the loop `name` of a claimed job is; without a claim, do nothing."""
    db.run(conn, job_steps.store_cursors({lease_of(job): [(name, "", position)]}))


def finish_all(
    conn: db.Connection,
    ends: Sequence[tuple[Row, str]],
    claimant: claims.Claimant | None = None,
    count: int = 0,
) -> list[Row]:
    """Record how jobs of one kind ended, each a kind of outcome; return up to `count` claimed ones.

    `ClaimLost` when a claim is held no longer.
    """
    done = [claims.Done(lease_of(job), outcomes.Outcome(kind, 0.1)) for job, kind in ends]
    for each in done:
        if each.outcome.kind != "completed" and not db.run(conn, recording.end(*each[:2])):
            raise errors.ClaimLost(f"job {each.lease.job_id} has lost its claim")
    completed = [each for each in done if each.outcome.kind == "completed"]
    if not completed:
        return []
    claimant = claimant or who(worker_id=completed[0].lease.worker_id)
    return _claim(conn, completed[0].lease.table, claimant, count, completed)


def is_recorded(conn: db.Connection, job: Row, kind: str) -> bool:
    """Return whether this claim of a job has left an outcome of this kind."""
    return db.run(conn, recording.is_recorded(lease_of(job), outcomes.Outcome(kind, 0.1)))


def plan(
    *node_ids: str, queue: str = "cpu", complete: bool = False, generation: int = 0
) -> claims.Ahead:
    """Return what follows from a node: these nodes are queued, the run is complete, or neither."""
    row = {"node_module": "m", "queue": queue, "status": "queued", "inputs": {},
           "input_template": {}, "ref_heads": []}  # fmt: skip
    rows = json.dumps([{"node_id": node_id} | row for node_id in node_ids]) if node_ids else None
    return claims.Ahead(generation, rows, complete)


def complete_with_plans(
    conn: db.Connection,
    done: Sequence[tuple[Row, claims.Ahead | None]],
    claimant: claims.Claimant | None = None,
    count: int = 0,
    **more: Any,
) -> list[Row]:
    """Complete claimed nodes with what is known to follow from each, as a worker does that plans.

    One node and at most one claim are one statement, several are another. Each result has the
    node's name. Returns up to `count` jobs that were claimed then.
    """
    found = [
        claims.Done(
            lease_of(job),
            outcomes.Outcome(
                "completed",
                0.1,
                json.dumps({"made": job["node_id"]}),
                resolved_inputs=json.dumps({"got": job["node_id"]}),
                vm_rss_mb_peak=7,
            ),
            ahead,
        )
        for job, ahead in done
    ]
    return _claim(conn, job_tables.NODE_JOBS, claimant or who(), count, found, **more)


def wait(
    conn: db.Connection, job: Row, event: str | None = None, after_s: float | None = 3600.0
) -> Row:
    """Let the handler of a claimed job sleep, or wait for an event; return the queued row."""
    assert begin_wait(conn, job, event, after_s) == "waiting"
    row = suspend(conn, job)
    assert row is not None and row["status"] == "queued"
    return row


def begin_wait(
    conn: db.Connection, job: Row, event: str | None = None, after_s: float | None = 3600.0
) -> str:
    """Begin or continue a sleep, or a wait for an event; return `waiting`, `done` or `lost`."""
    request = {
        "kind": "event" if event else "sleep", "name": event or "sleep", "key": "",
        "after_s": after_s, "default": "null",
    }  # fmt: skip
    return db.run(conn, job_steps.wait(lease_of(job), request))["state"]


def suspend(conn: db.Connection, job: Row) -> Row | None:
    """Give up the claim of a job whose handler waits; None: the claim is lost."""
    return db.run(conn, job_steps.suspend(lease_of(job), reason="waits"))


def hand_back_lapsed(conn: db.Connection, kind: Kind, had_s: float) -> list[Row]:
    """Take back, uncounted, jobs that were last renewed before the sweep had the database."""
    return recovery.hand_back_lapsed(conn, _TABLES[kind], row_isolation.Isolation(), had_s=had_s)


def store_sample(
    conn: db.Connection, host: str, every_s: int | None, sample: Row, *, notify: bool = False
) -> None:
    """Store a sample of a machine in its ring; `every_s` None: in none."""
    statements.samples.put(
        conn, host=host, every_s=every_s, sample=json.dumps(sample), notify=notify
    )


def note_death(conn: db.Connection, job: Row, error: str = "killed by SIGKILL") -> None:
    """Record in a job's history that the process of its claim died, as a parent does."""
    db.run(conn, recording.note(_table_of(job), job, "death", detail="{}", error=error))


def session(worker_id: str) -> db.Connection:
    """Return a session that holds the lock of a worker's life; until it ends, the worker lives."""
    conn = db.connect()
    statements.sessions.hold(conn, lock=recovery.LIFE_LOCK + worker_id)
    return conn


def start_run(conn: db.Connection, run_id: str, *node_ids: str) -> None:
    """Start a queued run with these nodes; those that failed or were cancelled are opened again."""
    assert statements.runs.start(conn, run_id=run_id) == 1
    statements.nodes.insert_planned(conn, run_id=run_id, nodes=plan(*node_ids).rows or "[]")


def write_log(
    conn: db.Connection, job: Row, head: str | None, tail: str = "", cut_bytes: int = 0
) -> int:
    """Store what the handler of a claim printed; return 0 if the job was claimed again since.

    `head` None: it is stored already.
    """
    write = statements.logs.write[_table_of(job).name]
    own = lease_of(job)
    return write(
        conn, jobs=[own.job_id], claims=[own.claim_no], heads=[head], tails=[tail], cuts=[cut_bytes]
    )


def claim_apart(conn: db.Connection, claimant: claims.Claimant) -> str | None:
    """Claim the first job that can be, after a row has failed a claim; return its id, if any.

    Rows before it that raise are failed or set aside.
    """
    rows = db.run(conn, claims.claim_apart(job_tables.of_queue(claimant.queue), claimant))
    return rows[0]["id"] if rows else None


def claimed(conn: db.Connection, kind: Kind, **columns: Any) -> Row:
    """Insert a job of this kind and let `w1` claim the next one; return the claimed row."""
    (factories.node if kind == "node" else factories.ingest)(conn, **columns)
    return (claim_node if kind == "node" else claim_ingest)(conn)


def claimed_row(number: int) -> Row:
    """Return an ingest job as a claim returns it, without a database."""
    return {
        "id": str(number), "task_name": "quick", "queue": "load", "reason": "", "args": {},
        "claim_no": 1, "attempts": 0, "worker_id": "w", "crash_count": 0, "timeout_s": None,
        "max_attempts": 1, "policy": None, "seq": number,
    }  # fmt: skip
