"""Check that hostile rows delay no normal work, and that commands work on every row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.soak import backlog_evidence, check_claims, check_recovery, evidence, fleet, tasks

WAIT_S = check_recovery.PROMISED_S[fleet.DEFAULT]
"""The longest that a normal job may wait for its first claim: faults stop some of the workers of
its queue for up to three leases, never all of them for longer than the slowest recovery."""
NODES = "cpu"
"""The queue of nodes whose workers claim in the order of the rows, and are observed."""
Found = Iterator[str]
Seen = evidence.Evidence


def waited(seen: Seen) -> Found:
    """Find normal work that waited longer than the bound for its first claim, without pauses.

    A job may wait longer behind earlier jobs, if every worker of its queue was busy with these or
    was hit by a fault: see `backlog_evidence`. So may the first node of a run, which the
    orchestrators insert within the bound, on the queue `cpu`.
    """
    first, queue = _first_claims(seen), backlog_evidence.Backlog(seen, tasks.NOTES)
    for job_id, since, late in _late_jobs(seen, first):
        why = queue.blame(seen.jobs[job_id]["seq"], since, since + late, WAIT_S)
        if why is not None:
            task = seen.books.jobs[job_id]
            yield f"job {job_id} ({task}): its first claim came after {late:.0f} s; {why}"
    nodes = backlog_evidence.Backlog(seen, NODES)
    for late in _late_runs(seen, first):
        why = late.blame(nodes)
        if why is not None:
            name = seen.books.runs[late.run]
            text = f"run {late.run} ({name}): its first node was claimed after {late.wait_s:.0f} s"
            yield f"{text}; {why}"


class LateRun(NamedTuple):
    """A run of the load whose first node waited too long; instants in monotonic seconds."""

    run: str
    since: float
    wait_s: float
    node: dict[str, Any] | None
    """The row of the first node, None if there is none."""
    inserted_at: float

    def blame(self, nodes: backlog_evidence.Backlog) -> str | None:
        """Return why the wait is the engine's fault, or None: all workers were busy."""
        if self.node is None:
            return "no node was inserted"
        if (start_s := self.inserted_at - self.since) > WAIT_S:
            return f"it was inserted after {start_s:.0f} s"
        if self.node["queue"] != NODES:
            return f"its queue is {self.node['queue']}"
        return nodes.blame(self.node["seq"], self.inserted_at, self.since + self.wait_s, WAIT_S)


def _late_runs(seen: Seen, first: dict[str, float]) -> Iterator[LateRun]:
    by_run: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for job_id, job in seen.jobs.items():
        if job["run_id"] in seen.books.runs:
            claimed_at = first.get(job_id, seen.ended_load)
            by_run[job["run_id"]].append((claimed_at, job["seq"], job_id))
    for run_id in seen.books.runs:
        run = seen.runs.get(run_id)
        if run is None or run_id in seen.books.perhaps_cancelled:
            continue
        since = seen.time.at(run["epoch"])
        claimed_at, _, node_id = min(by_run[run_id], default=(seen.ended_load, 0, None))
        if claimed_at - since > WAIT_S:
            node = seen.jobs[node_id] if node_id else None
            inserted_at = seen.time.at(node["epoch"]) if node else claimed_at
            yield LateRun(run_id, since, claimed_at - since, node, inserted_at)


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
    """Return how many jobs and runs waited longer than the bound, and the longest wait of each."""
    first = _first_claims(seen)
    waits = {
        "jobs": [late for _, _, late in _late_jobs(seen, first)],
        "runs": [late.wait_s for late in _late_runs(seen, first)],
    }
    return [
        (
            f"normal {what} that waited over {WAIT_S:g} s, longest",
            f"{len(each)}, {max(each, default=0):.0f} s",
        )
        for what, each in waits.items()
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


def blocked(seen: Seen) -> Found:
    """Find sessions of the fleet that a stranger's open transaction held up, and failed cancels."""
    yield from seen.blocked


def changed(seen: Seen) -> Found:
    """Find texts that did not come back to a client with another encoding."""
    yield from seen.changed


def rights(seen: Seen) -> Found:
    """Find changes by a role without rights, and function calls without a bound."""
    yield from dict.fromkeys(seen.hostile)
