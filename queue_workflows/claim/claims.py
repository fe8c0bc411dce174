"""Claim jobs and renew their leases; the statement that claims also records completed jobs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from queue_workflows import db
from queue_workflows.claim import job_tables, outcomes, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements

_log = logging.getLogger(__name__)
CLAIM_LOST = "QW001"
"""The SQLSTATE if the claim of a completed job is lost; then nothing was written or claimed."""
_quoted: Final = json.encoder.encode_basestring_ascii


class Claimant(NamedTuple):
    """The worker that claims, with its machine, queue and lease."""

    worker_id: str
    host: str
    queue: str
    lease_s: float = 600
    newest: bool = False
    """Whether to take the newest job of the best priority, for a machine that takes overflow."""
    lane: int | None = None
    model: str | None = None
    """The loaded model."""
    models: list[str] | None = None
    """The models that this worker can load; None means any."""
    obey: bool = True
    """Whether the claim returns no job while this host and queue are OFF."""
    policy: str = "strict"
    """How gpu jobs are chosen: `strict` or `balanced`."""
    grace_s: float = 300.0
    bound_s: float = 2400.0
    versions: list[str] | None = None
    """The node versions that the worker has, as `<module>@<version>`; None if it has none."""


class Ahead(NamedTuple):
    """The plan that follows from a completed node, for the transaction that records the node."""

    generation: int
    rows: str | None
    """The rows of the plan as JSON text, or None if it has none."""
    complete: bool
    revision: int = 0


class Done(NamedTuple):
    """One job whose handler has ended."""

    lease: job_tables.Lease
    outcome: outcomes.Outcome
    ahead: Ahead | None = None
    """The plan after a completed node. Without one, the orchestrator plans."""


class Wait(NamedTuple):
    """When to claim again after a claim that returned fewer jobs than it may; None if unknown."""

    limit_s: float | None = None
    """Seconds until a limit of an ingest queue admits the next job; None if a job was claimed."""
    due_s: float | None = None
    """Seconds until the next delayed job of the queue is due."""


def claim(
    table: job_tables.JobTable,
    who: Claimant,
    *,
    count: int = 1,
    done: Sequence[Done] = (),
    promote: bool = False,
    ahead_s: float | None = None,
    only: str | None = None,
) -> db.Script[list[Any]]:
    """Record completed jobs of this table, and claim up to `count` jobs of the worker's queue.

    Returns the rows that `claims:ingest_rows` and `claims:node_rows` describe, one for each job,
    and perhaps one without an id, which has the seconds of a `Wait`. A link returns raw rows. With
    `promote`, first admits jobs that have become due. `ahead_s` is how far ahead delayed jobs count
    for `Wait`. With `only`, claims this job or none, wherever it is in the queue. All is one
    transaction, but errors that ingest handlers logged are stored before it. Raises CLAIM_LOST if
    any claim to record is lost. A worker of a gpu queue claims and records one job at a time.
    """
    given: dict[str, Any] = {
        "worker": who.worker_id,
        "host": who.host,
        "queue": who.queue,
        "lease_s": who.lease_s,
        "obey": who.obey,
        "promote": promote,
        "look_ahead_s": ahead_s if count else None,
    }
    if not table.in_run:
        for lease, outcome, _ in done:
            if outcome.error:
                yield from statements.job_events.note_logged_error.script(
                    job=lease.job_id,
                    worker=lease.worker_id,
                    claim_no=lease.claim_no,
                    error=outcome.error,
                )
        texts = _ingest_array(done) if done else None
        given |= {"claim": count, "done": texts, "only": only}
        return (yield db.Statement(statements.claims.ingest_rows.text, given, is_raw=True))
    given |= {"newest": who.newest, "versions": who.versions}
    single = len(done) <= 1 and count <= 1
    if who.queue == "gpu" or (single and not (done and _queues_many(done[0].ahead))):
        names = ("model", "models", "lane", "policy", "grace_s", "bound_s")
        given |= {name: getattr(who, name) for name in names}
        given |= _columns(done[0]) if done else _NOTHING
        given |= {"claim": count > 0, "only": only}
        return (yield db.Statement(statements.claims.node_rows.text, given, is_raw=True))
    texts = f"[{','.join(map(_node_json, done))}]" if done else None
    given |= {"claim": count, "done": texts}
    return (yield db.Statement(statements.claims.nodes_rows.text, given, is_raw=True))


def _queues_many(ahead: Ahead | None) -> bool:
    """Return whether a plan queues several nodes, so that other workers have to be notified."""
    return ahead is not None and ahead.rows is not None and len(json.loads(ahead.rows)) > 1


def _columns(done: Done) -> dict[str, Any]:
    """Return the statement's parameters for one completed node and the plan after it."""
    lease, outcome, ahead = done
    generation, rows, complete, revision = ahead or (None, None, None, 0)
    return {
        "job": lease.job_id,
        "claim_no": lease.claim_no,
        "result": outcome.result,
        "seconds": outcome.seconds,
        "rss_mb": outcome.vm_rss_mb_peak,
        "detail": outcome.detail,
        "received": outcome.resolved_inputs,
        "generation": generation,
        "revision": revision,
        "rows": rows,
        "complete": complete,
    }


_NOTHING: Final[dict[str, Any]] = {
    "job": None, "claim_no": None, "result": None, "seconds": None, "rss_mb": None,
    "detail": None, "received": None, "generation": None, "revision": 0, "rows": None,
    "complete": None,
}  # fmt: skip
"""The parameters of a claim that records no completed node."""


def _node_json(done: Done) -> str:
    """Return a completed node and the plan after it as an element of a JSON array."""
    # The JSON texts are checked already, so they are inserted as text instead of encoded again.
    given = _columns(done)
    texts = {name: given.pop(name) for name in ("result", "received", "rows", "detail")}
    given["id"] = given.pop("job")
    more = "".join(f',"{name}":{text}' for name, text in texts.items() if text is not None)
    return f"{json.dumps(given)[:-1]}{more}}}"


def _ingest_array(done: Sequence[Done]) -> str:
    texts = [
        f'{{"id":{_quoted(lease.job_id)},"claim_no":{lease.claim_no},'
        f'"seconds":{outcome.seconds!r},"detail":{outcome.detail or "null"},'
        f'"result":{outcome.result}}}'
        for lease, outcome, _ in done
    ]
    return f"[{','.join(texts)}]"


# --- One row at a time.


APART_CAUSE: Final = "the database refuses its claim: "
_BECAME: Final = {
    "failed": "it has failed",
    "set_aside": "it is blocked as set_aside, since it cannot be failed either",
    "postponed": "it is tried again in a minute",
    None: "no change of it is accepted, so that every claim skips it",
}


def claim_apart(table: job_tables.JobTable, who: Claimant) -> db.Script[list[Any]]:
    """Claim one job after a row has made the usual claim raise; return its row, as `claim` does.

    One transaction. First admits the jobs that have become due, or that are kept for the host, as
    one of them may have raised. Then tries the first 100 jobs in order, each in a savepoint. Moves
    jobs that raise aside, and logs for each a warning with the command that removes it. If one
    takes too long, tries no other, postpones it, and raises its error after the commit.
    """
    claimed, slow, refused = list[Any](), list[db.Error](), dict[str, db.Error]()
    given: dict[str, Any] = who._asdict() | {"worker": who.worker_id}

    def tried(job: str, change: db.Script[list[Any]]) -> db.Script[list[Any]]:
        found = [] if slow else (yield from row_isolation.attempted(change, or_slow=True))
        if not isinstance(found, db.Error):
            return found
        refused[job] = found
        if found.sqlstate == row_isolation.TIMED_OUT:
            slow.append(found)
        return []

    promote = statements.promotion.promote_jobs[table.name]
    yield db.BEGIN
    for job in (yield from statements.claim_isolation.delayed[table.name].script(**given)):
        yield from tried(job, promote.script(ids=[job]))
    for job in (yield from statements.claim_isolation.claimable[table.name].script(**given)):
        if claimed := (yield from tried(job, claim(table, who, only=job))):
            break
    for job, error in refused.items():
        yield from _move_aside(table, job, error, may_pass=not claimed)
    yield db.COMMIT
    if slow:
        raise slow[0]
    return claimed


def _move_aside(
    table: job_tables.JobTable, job: str, error: db.Error, *, may_pass: bool
) -> db.Script[None]:
    """Fail, block or delay a queued job that raised, so that claims pass it, and log that.

    `may_pass` is whether no other job could be claimed, so that the cause may concern all jobs and
    be temporary. Then the job fails only if its own values are the cause, else it is delayed.
    """
    message = payload.error_text(error).partition("\n")[0]
    if may_pass and not row_isolation.is_about_data(error):
        postponed = statements.claim_isolation.postpone[table.name].script(job=job)
        found = yield from row_isolation.attempted(postponed)
        became = "postponed" if isinstance(found, str) else None
    else:
        why = f"{APART_CAUSE}{message}"[: payload.ERROR_LIMIT]
        became = yield from row_isolation.set_aside(table, job, error=why)
    remove = f"queue-workflows jobs delete {job!r}"
    for row in (yield from statements.ingest_jobs.find_node_jobs.script(ids=[job])):
        remove = f"queue-workflows cancel {row['run_id']!r}"
    _log.warning(
        "job %r cannot be claimed: %s. The error of the database: %.1000r. To remove it: %s",
        job, _BECAME[became], message, remove,
    )  # fmt: skip


# --- Renewals.


class Renewal(NamedTuple):
    """The reply to the renewal of a lease."""

    job_id: str
    claim_no: int
    cancel: bool
    """Whether the job or its run was cancelled, or the run has ended."""
    renewed: bool = True
    """False if another session has locked the row, so that the lease was not extended."""


def renew(
    leases: Sequence[job_tables.Lease],
    *,
    lease_s: float,
    progress: Sequence[str | None] = (),
) -> db.Script[list[Renewal]]:
    """Extend the leases of one worker by `lease_s` and store progress (JSON texts).

    If the result has no `Renewal` for a lease, that claim is lost.
    """
    if not leases:
        return []
    rows = yield from statements.claims.renew[leases[0].table.name].script(
        worker=leases[0].worker_id,
        lease_s=lease_s,
        jobs=[lease.job_id for lease in leases],
        claims=[lease.claim_no for lease in leases],
        progress=[*progress] if progress else list[str | None]([None] * len(leases)),
    )
    return [Renewal(row["id"], row["claim_no"], row["cancel"], row["renewed"]) for row in rows]
