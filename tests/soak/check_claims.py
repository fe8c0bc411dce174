"""Check claims: one finalisation, by the newest claim, and no handler without a claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tests.soak import evidence, fault_plan, fleet, journal

GRACE_S = 1.5
"""A handler may act for so long after its claim was taken: guards are checked each 0.5 s."""
RECOVERY_S = fleet.LEASE_S + fleet.SWEEP_S
DEADLY = ("stop", "freeze", "restart", "stall")
"""Faults, kills aside, after which a claim may be taken back: the short lease ends meanwhile."""
PATIENT = ("restart", "stall")
"""The same for a worker whose lease outlasts the others."""
LEFT = ("reclaimed", "requeued", "retried", "parked", "completed", "failed", "cancelled")
"""Events with which a claim ends."""
LOST = ("the lease could not be renewed in time", "its worker was silent")
"""Why a worker hands a job back whose lease it is about to lose."""
ENDED = ("completed", "failed", "cancelled")
Found = Iterator[str]
Seen = evidence.Evidence


def double(seen: Seen) -> Found:
    """Find jobs with two finalisations in one generation; a retried run begins a generation."""
    for job_id in seen.jobs:
        finals = seen.finals(job_id)
        if len(finals) > 1 + seen.books.retried[seen.jobs[job_id]["run_id"] or ""]:
            yield f"job {job_id}: {', '.join(f'{e.kind} by claim {e.claim}' for e in finals)}"


def superseded(seen: Seen) -> Found:
    """Find finalisations that are not by the newest claim and by the worker that made it."""
    for job_id in seen.jobs:
        claims = seen.claims(job_id)
        for final in seen.finals(job_id):
            newer = [
                c
                for c, e in claims.items()
                if (final.claim is None or c > final.claim) and e.place < final.place
            ]
            if newer:
                by = f"{final.kind} by claim {final.claim}"
                yield f"job {job_id}: {by}, claimed up to {max(newer)}"
            own = claims.get(final.claim or 0)
            if own is not None and final.worker not in (None, own.worker):
                yield f"job {job_id}: claim {final.claim} of {own.worker}, ended by {final.worker}"


def overlapping(seen: Seen) -> Found:
    """Find handlers of one job that overlap, where the older one still wrote."""
    for job_id, claim, _, after in _overlaps(seen):
        wrote = [e for e in seen.events[job_id] if e.claim == claim and e.kind in ENDED]
        if any(e.at >= after.at for e in wrote):
            yield f"job {job_id}: claim {claim} wrote after claim {after.claim} was made"


def _overlaps(seen: Seen) -> Iterator[tuple[str, int, journal.Line, evidence.Event]]:
    """Yield (job, older claim, its last line, the claim of its successor's handler)."""
    for job_id, lines in seen.by_job.items():
        starts = sorted((line for line in lines if line.word == "start"), key=lambda s: s.claim)
        for older, newer in pairwise(starts):
            last = [line for line in lines if line.claim == older.claim][-1]
            if newer.claim > older.claim and last.at > newer.at:
                yield job_id, older.claim, last, seen.claims(job_id)[newer.claim]


def overlaps(seen: Seen) -> int:
    """Count how often two handlers of a job were seen at the same time, usually harmlessly."""
    return sum(1 for _ in _overlaps(seen))


def outlived(seen: Seen) -> Found:
    """Find handlers that lived on after their claim was taken away.

    Only a handler whose own process was stopped may act again when that ends: an executor may not
    when its worker was.
    """
    stops = [fault for fault in seen.faults if fault.kind in ("stop", fault_plan.STOP_EXECUTOR)]
    for job_id, lines in seen.by_job.items():
        claims = seen.claims(job_id)
        for line in {line.claim: line for line in lines}.values():
            taken = [e.at for e in seen.events[job_id] if e.claim == line.claim and e.kind in LEFT]
            taken += [e.at for claim, e in claims.items() if claim > line.claim]
            process = line.runs_in or line.pid
            woken = [f.until for f in stops if process in f.pids and f.at <= line.at]
            if taken and line.at > max(min(taken), *woken, 0.0) + GRACE_S:
                late = line.at - min(taken)
                yield f"job {job_id}: {line.what} of claim {line.claim} acts {late:.1f} s after"


def twice(seen: Seen) -> Found:
    """Find claims whose handler ran twice, and handlers without a claim of their process."""
    starts = [line for line in seen.lines if line.word == "start"]
    for (job_id, claim), count in Counter((s.job, s.claim) for s in starts).items():
        if count > 1:
            yield f"job {job_id}: claim {claim} ran {count} bodies"
    for line in starts:
        claim = seen.claims(line.job).get(line.claim)
        if claim is None or claim.worker != line.worker:
            yield f"job {line.job}: a body ran under claim {line.claim}, which nobody made"


def executions(seen: Seen) -> Found:
    """Find repeated executions without a reason: every claim but the last was taken back."""
    for job_id in seen.jobs:
        claims = sorted(seen.claims(job_id))
        ends = {e.claim for e in seen.events.get(job_id, []) if e.kind in LEFT}
        missing = [claim for claim in claims[:-1] if claim not in ends]
        if missing:
            yield f"job {job_id}: claimed again while claim {missing[0]} had not ended"
        if claims != list(range(1, len(claims) + 1)):
            yield f"job {job_id}: claims {claims}"


def crashes(seen: Seen) -> Found:
    """Find claims taken back, or given up, that neither a fault nor their own handler ended."""
    for job_id, job in seen.jobs.items():
        if job["crash_count"] > fleet.MAX_CRASHES:
            yield f"job {job_id}: {job['crash_count']} crashes"
        claims = seen.claims(job_id)
        for event in seen.events.get(job_id, []):
            claim = claims.get(event.claim or 0)
            taken = event.kind == "reclaimed" or event.reason in LOST
            if not taken or claim is None:
                continue
            since = claim.at - RECOVERY_S
            killed = any(b.pid == claim.pid and since <= b.at <= event.at + 1 for b in seen.killers)
            seat = seen.seat(claim)
            deadly = PATIENT if seat and seat.care == fleet.DEFAULT else DEADLY
            hit = seen.hit(deadly, claim.pid, since, event.at + 1)
            # A worker that shall end, and cannot reach the database, ends without it.
            hit = hit or (
                seen.hit(("term",), claim.pid, since, event.at + 1)
                and seen.hit(DEADLY, claim.pid, since, event.at + 1)
            )
            launched = seat and seen.hit_seat(fault_plan.KILL_LAUNCHER, seat, since, event.at + 1)
            locked = seen.was_locked(job_id, since, event.at + 1)
            dead = launched or seen.died_in_executor(job_id, event.claim)
            if not (killed or hit or dead or locked):
                held = event.at - claim.at
                at, who = event.at - seen.began, seat.name if seat else claim.pid
                yield (
                    f"{at:.1f} s: job {job_id}: claim {event.claim} of {who} {event.kind} after"
                    f" {held:.1f} s for no fault"
                )
