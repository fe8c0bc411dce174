"""Renew the leases of claims in flight, record their results, and hand jobs back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from queue_workflows import db
from queue_workflows.engine import (
    claim_isolation,
    claims,
    finish,
    handback,
    job_steps,
    job_tables,
)
from queue_workflows.worker import claims_in_flight, current_job, guards

_log = logging.getLogger(__name__)


def renew(
    conn: db.Connection,
    ends: Mapping[job_tables.Lease, guards.LeaseEnd],
    reports: Mapping[job_tables.Lease, str | None],
    *,
    lease_s: float,
    sent: float,
) -> claims_in_flight.RenewalResult:
    """Renew the claims as of `sent` and store progress (JSON texts)."""
    progress = [reports.get(lease) for lease in ends]
    refused: set[job_tables.Lease] = set()
    try:
        rows = claims.renew(conn, [*ends], lease_s=lease_s, progress=progress)
    except db.Error as error:
        if not claim_isolation.is_about_rows(error):
            raise
        rows = _renew_apart(conn, [*ends], reports, lease_s, refused)
    rows_by_claim = {(row.job_id, row.claim_no): row for row in rows}
    found = claims_in_flight.RenewalResult([], [])
    for lease, end in ends.items():
        row = rows_by_claim.get((lease.job_id, lease.claim_no))
        if row is None:
            if lease not in refused:
                found.lost.append(lease)
            continue
        end.beat(sent)
        if row.cancel:
            found.cancelled.append(lease)
    return found


def _renew_apart(
    conn: db.Connection,
    leases: Sequence[job_tables.Lease],
    reports: Mapping[job_tables.Lease, str | None],
    lease_s: float,
    refused: set[job_tables.Lease],
) -> list[claims.Renewal]:
    """Renew claim by claim, so that a row that cannot be written costs no other job its lease."""
    rows: list[claims.Renewal] = []
    for lease in leases:
        try:
            rows += claims.renew(conn, [lease], lease_s=lease_s, progress=[reports.get(lease)])
        except db.Error as error:
            if not claim_isolation.is_about_rows(error):
                raise
            _log.warning(
                "job %r cannot be renewed: %s",
                lease.job_id,
                str(error).strip(),
                extra={"job_id": lease.job_id},
            )
            refused.add(lease)
    return rows


def store_cursors(conn: db.Connection, works: Iterable[current_job.Work]) -> None:
    """Store how far the cursors of running handlers are, if one has moved.

    What the database refuses is only logged: a cursor must not cost a job its lease.
    """
    moved = {work.lease: cursors for work in works if (cursors := work.take_cursors())}
    if not moved:
        return
    try:
        job_steps.store_cursors(conn, moved)
    except db.Error as error:
        if conn.closed:
            raise
        _log.warning("the cursors of %d jobs are not stored: %s", len(moved), str(error).strip())


def write_back(conn: db.Connection, held: claims_in_flight.ClaimsInFlight) -> None:
    """Record the results and hand back, in their place and uncounted, the jobs marked for it.

    One transaction each. What the database refuses stays for the next try; database errors are
    raised.
    """
    with held.writing():
        write(conn, held)


def write(conn: db.Connection, held: claims_in_flight.ClaimsInFlight) -> None:
    """Do the same as `write_back`, for a caller that is inside `writing`."""
    done = held.take_done()
    unwritten = [*done]
    try:
        _record(conn, held, unwritten)
    finally:
        left = {work.lease for work, _ in unwritten}
        held.remove(work.lease for work, _ in done if work.lease not in left)
        if unwritten:
            held.put_back(unwritten)
    for reason, leases in held.returning().items():
        handback.hand_back_all(conn, leases, reason=reason)
        held.remove(leases)


def completed(done: Iterable[claims_in_flight.Done]) -> list[finish.Done]:
    """Return the completed jobs as `finish` takes them."""
    return [
        finish.Done(work.lease, outcome) for work, outcome in done if outcome.kind == "completed"
    ]


def _record(
    conn: db.Connection,
    held: claims_in_flight.ClaimsInFlight,
    unwritten: list[claims_in_flight.Done],
) -> None:
    """Record results in one statement, or one by one; remove what is recorded from the list."""
    if results := completed(unwritten):
        try:
            finish.finish(conn, results)
        except Exception as error:
            if conn.closed:
                raise
            _log.debug("a batch is recorded job by job: %s", error)
        else:
            unwritten[:] = [each for each in unwritten if each[1].kind != "completed"]
    for work, outcome in [*unwritten]:
        try:
            found = finish.record(conn, work.lease, outcome)
        except Exception as error:
            if conn.closed:
                raise
            _log.warning("the result of job %s waits: %s", work.job["id"], error, extra=work.ids)
            continue
        unwritten.remove((work, outcome))
        if found == "skipped" and not finish.is_recorded(conn, work.lease, outcome):
            _log.warning(
                "nothing was written: the claim of job %s was lost", work.job["id"], extra=work.ids
            )
            held.on_lost(work.lease)
