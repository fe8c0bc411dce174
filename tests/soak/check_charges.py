"""Check charges: a crash is counted where somebody saw a process die, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

from tests.soak import check_claims, evidence, fault_plan, faults, fleet, journal, workflows

SEEN_S = 1.0
"""A death is charged so soon, and its worker's last statement may claim so long after it."""
SEERS = (fleet.SUPERVISED, fleet.REAPED)
"""Who sees a worker die; nobody sees it of the others."""
GONE = "its session is gone"
Found = Iterator[str]
Seen = evidence.Evidence


def is_crash(seen: Seen, event: evidence.Event) -> bool:
    """Return whether a claim ended with a crash: an event of a lapse has no evidence of a death."""
    if event.error is None or event.error.startswith(GONE):
        return False
    poison = (seen.jobs[event.job]["error"] or "").startswith("poison: took down ")
    return event.kind == "reclaimed" or (event.kind == "failed" and poison)


def charged(seen: Seen) -> Found:
    """Find crashes that were counted although nobody can have seen a process die.

    A stopped process, a frozen connection and a restarted server end claims too: they count lapses.
    The last crash of a job has to be its own or a fault's, as it runs alone then.
    """
    for job_id, job in seen.jobs.items():
        claims = seen.claims(job_id)
        events = [e for e in seen.events.get(job_id, []) if is_crash(seen, e)]
        for event in events:
            claim = claims.get(event.claim or 0)
            if claim is not None and not _was_seen(seen, claim, event):
                at = event.at - seen.began
                yield f"{at:.1f} s: job {job_id}: claim {event.claim} {event.kind}: {event.error}"
        if job["crash_count"] > len(events) and not seen.books.retried[job["run_id"] or ""]:
            yield f"job {job_id}: {job['crash_count']} crashes charged, {len(events)} recorded"


def _was_seen(seen: Seen, claim: evidence.Event, event: evidence.Event) -> bool:
    """Return whether somebody saw a death that ended this claim."""
    since, until = claim.at - SEEN_S, event.at + SEEN_S
    seat, last = seen.seat(claim), event.kind == "failed"
    seers = seat is None or seat.care in SEERS
    places = {line.runs_in for line in seen.by_job.get(claim.job, []) if line.claim == claim.claim}
    for line in seen.killers:
        if line.pid != claim.pid or not since <= line.at <= until:
            continue
        if (line.job, line.claim) == (claim.job, claim.claim):
            return True
        if not last and (_reaches(line, places) or (seers and _ends_worker(line))):
            return True
    if seen.died_in_executor(claim.job, claim.claim):
        return True
    for fault in seen.faults:
        hit = fault.at <= until and fault.until >= since
        if hit and fault.kind == fault_plan.KILL_LAUNCHER and (not seat or fault.seat == seat.name):
            return True
        own = claim.pid in fault.pids and fault.kind != faults.KILL_PARENT
        if hit and seers and own and fault.hits_worker:
            return True
    return False


def _ends_worker(line: journal.Line) -> bool:
    return line.what == workflows.KILLS_WORKER or line.runs_in == line.pid


def _reaches(line: journal.Line, places: set[int]) -> bool:
    """Return whether a handler kills an executor of these, which may be not known yet."""
    return line.what == workflows.KILLS_LAUNCHER or line.runs_in in places or not places


def missed(seen: Seen) -> Found:
    """Find handlers that killed a process whose death somebody saw, and that were not charged.

    Another fault of the worker, its parent or the server at that time may hide who was at fault.
    """
    for line in seen.killers:
        claim = seen.claims(line.job).get(line.claim)
        seat = seen.seat(claim) if claim else None
        ends = [
            e
            for e in seen.events.get(line.job, [])
            if e.claim == line.claim and e.kind in check_claims.LEFT
        ]
        if seat is None or not ends or ends[0].kind == "cancelled":
            continue
        if is_crash(seen, ends[0]) or (_ends_worker(line) and seat.care not in SEERS):
            continue
        since, until = line.at - check_claims.RECOVERY_S, ends[0].at + SEEN_S
        hidden = any(
            fault.at <= until
            and fault.until >= since
            and (not fault.pids or seat.name == fault.seat or line.pid in fault.pids)
            for fault in seen.faults
        )
        others = any(
            each.pid == line.pid and each != line and since <= each.at <= until
            for each in seen.killers
        )
        retried = seen.jobs[line.job]["run_id"] in seen.books.retried
        if not (hidden or others or retried):
            how = f"{ends[0].kind} after {ends[0].at - line.at:.1f} s"
            yield (
                f"{line.at - seen.began:.1f} s: job {line.job}: {line.what} of claim {line.claim}"
                f" on {seat.name} counted no crash: {how}"
            )
