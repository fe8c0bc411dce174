"""Retry, cancel or delete many ingest jobs, and report the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import ingest_jobs, job_tables
from queue_workflows.types import JsonDict, Row

BATCH = 500
"""Jobs that one transaction changes, so that it stays far below the engine's 5 s."""
NO_SUCH_JOB = "there is no such job"
_Outcome = tuple[str, str | None]
"""An outcome and the reason of a refusal."""
_Change = Callable[[db.Connection, Mapping[str, Row]], Mapping[str, _Outcome]]
"""Takes the locked rows by id; returns the outcome of each id."""


def retry(ids: str | Iterable[str], by: str | None, conn: db.Connection | None) -> list[JsonDict]:
    """Queue failed and cancelled jobs again; return the outcome of each."""
    return _each(ids, _retry, by, conn)


def cancel(
    ids: str | Iterable[str], by: str | None, conn: db.Connection | None, *, running: bool
) -> list[JsonDict]:
    """Cancel queued jobs and, if `running`, request the end of running ones."""
    return _each(ids, _cancel if running else _cancel_queued, by, conn)


def delete(ids: str | Iterable[str], by: str | None, conn: db.Connection | None) -> list[JsonDict]:
    """Delete jobs that do not run; return the outcome of each."""
    return _each(ids, _delete, by, conn)


def _each(
    ids: str | Iterable[str], change: _Change, by: str | None, conn: db.Connection | None
) -> list[JsonDict]:
    done: list[JsonDict] = []
    wanted = list(dict.fromkeys([ids] if isinstance(ids, str) else ids))
    for one in wanted:
        if not isinstance(one, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidConfig(f"job {one!r:.80}: an id is a text")
    for some in _batches(wanted):
        with db.transaction(conn) as own:
            if by is not None:
                statements.ingest_jobs.name_actor(own, actor=payload.error_text(by))
            known = [one for one in some if payload.is_storable(one)]
            rows = {row["id"]: row for row in statements.ingest_jobs.lock(own, ids=list(known))}
            outcomes = change(own, rows)
            nodes = {
                row["id"]: row["run_id"]
                for row in statements.ingest_jobs.find_node_jobs(
                    own, ids=[one for one in known if one not in rows]
                )
            }
            done += [_report(one, rows.get(one), outcomes, nodes) for one in some]
    return done


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(ids), BATCH):
        yield ids[at : at + BATCH]


def _report(
    job_id: str, row: Row | None, outcomes: Mapping[str, _Outcome], nodes: Mapping[str, str]
) -> JsonDict:
    if row is None:
        reason = f"it is a node of run {nodes[job_id]}" if job_id in nodes else NO_SUCH_JOB
        outcome, status = "unknown", None
    else:
        (outcome, reason), status = outcomes[job_id], row["status"]
    return {"id": job_id, "outcome": outcome, "status": status, "reason": reason}


def _having(rows: Mapping[str, Row], *statuses: str) -> list[str]:
    return [job_id for job_id, row in rows.items() if row["status"] in statuses]


def _refused(rows: Mapping[str, Row], rule: str = "") -> dict[str, _Outcome]:
    return {job_id: ("refused", f"it is {row['status']}{rule}") for job_id, row in rows.items()}


def _retry(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    ended = _having(rows, "failed", "cancelled")
    chosen = [one for one in ended if rows[one]["generation"] < job_tables.LAST_GENERATION]
    key_taken = ingest_jobs.retry(conn, chosen) if chosen else set[str]()
    outcomes = _refused(rows, ": only a failed or cancelled one is retried")
    outcomes |= dict.fromkeys(ended, ("refused", "it is in its last generation: queue a new job"))
    outcomes |= dict.fromkeys(chosen, ("queued", None))
    reason = "another job has its idempotency key by now"
    return outcomes | dict.fromkeys(key_taken, ("refused", reason))


def _cancel_queued(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = _having(rows, "queued")
    statements.ingest_jobs.cancel_queued(conn, ids=list(chosen))
    return _refused(rows) | dict.fromkeys(chosen, ("cancelled", None))


def _cancel(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = _having(rows, "running")
    statements.ingest_jobs.request_cancel(conn, ids=list(chosen))
    return _cancel_queued(conn, rows) | dict.fromkeys(chosen, ("asked to stop", None))


def _delete(conn: db.Connection, rows: Mapping[str, Row]) -> dict[str, _Outcome]:
    chosen = [job_id for job_id, row in rows.items() if row["status"] != "running"]
    statements.ingest_jobs.delete(conn, ids=list(chosen))
    outcomes = _refused(rows, ": cancel it first")
    return outcomes | dict.fromkeys(chosen, ("deleted", None))
