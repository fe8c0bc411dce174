"""Check that hostile rows delay no normal work, and that commands work on every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.soak import backlog_evidence, check_claims, check_recovery, evidence, fleet, tasks

WAIT_S = check_recovery.PROMISED_S[fleet.DEFAULT]
"""The longest that a normal job may wait for its first claim: faults stop some of the workers of
its queue for up to three leases, never all of them for longer than the slowest recovery."""
Found = Iterator[str]
Seen = evidence.Evidence


def waited(seen: Seen) -> Found:
    """Find normal work that waited longer than the bound for its first claim, without pauses.

    A job may wait longer behind earlier jobs, if every worker of its queue was busy with these or
    was hit by a fault: see `backlog`.
    """
    first, queue = _first_claims(seen), backlog_evidence.Backlog(seen, tasks.NOTES)
    for job_id, since, late in _late_jobs(seen, first):
        why = queue.blame(seen.jobs[job_id]["seq"], since, since + late, WAIT_S)
        if why is not None:
            task = seen.books.jobs[job_id]
            yield f"job {job_id} ({task}): its first claim came after {late:.0f} s; {why}"
    by_run: dict[str, float] = {}
    for job_id, job in seen.jobs.items():
        if job["run_id"] in seen.books.runs and job_id in first:
            by_run[job["run_id"]] = min(by_run.get(job["run_id"], first[job_id]), first[job_id])
    for run_id, name in seen.books.runs.items():
        run = seen.runs.get(run_id)
        if run is None or run_id in seen.books.perhaps_cancelled:
            continue
        since = seen.time.at(run["epoch"])
        late = by_run.get(run_id, seen.ended_load) - since
        if late > WAIT_S:
            yield f"run {run_id} ({name}): its first node was claimed after {late:.0f} s"


def _first_claims(seen: Seen) -> dict[str, float]:
    return {
        job: min(c.at for c in claims.values()) for job in seen.jobs if (claims := seen.claims(job))
    }


def _late_jobs(seen: Seen, first: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield each job that waited too long: its id, since when, and the seconds."""
    for job_id in seen.books.jobs:
        job = seen.jobs.get(job_id)
        if job is None or job["reason"] != "load" or job["queue"] != tasks.NOTES or job["key"]:
            continue
        claimed_at = first.get(job_id, seen.ended_load)
        since = max(seen.time.at(job["epoch"]), _turn(seen, job, claimed_at))
        late = claimed_at - since
        if late > WAIT_S and not seen.paused(job["queue"], since, since + late):
            yield job_id, since, late


def figures(seen: Seen) -> list[tuple[str, str]]:
    """Return how many jobs waited longer than the bound, and the longest wait, for the report."""
    waits = [late for _, _, late in _late_jobs(seen, _first_claims(seen))]
    return [
        (
            f"normal jobs that waited over {WAIT_S:g} s, longest",
            f"{len(waits)}, {max(waits, default=0):.0f} s",
        )
    ]


def _turn(seen: Seen, job: dict[str, Any], until: float) -> float:
    """Return when the last earlier job of the same lock key ended before `until`, else 0.0.

    A job waits for all earlier jobs of its lock key, however long their crashes and retries take.
    """
    ends = [
        event.at
        for other, row in seen.jobs.items()
        if job["lock_key"] and row["lock_key"] == job["lock_key"] and row["seq"] < job["seq"]
        for event in seen.events.get(other, [])
        if event.kind in check_claims.ENDED and event.at <= until
    ]
    return max(ends, default=0.0)


def shown(seen: Seen) -> Found:
    """Find commands that failed, raw bytes on a terminal or in a log, and files made elsewhere."""
    yield from dict.fromkeys(seen.shown)


def rights(seen: Seen) -> Found:
    """Find changes by a role without rights, and function calls without a bound."""
    yield from dict.fromkeys(seen.hostile)
