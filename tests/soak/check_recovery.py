"""Check how soon jobs of a dead worker are claimed again, against the promised times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from queue_workflows import config
from tests.soak import check_claims, evidence, faults, fleet

LAPSE_S = fleet.LEASE_S + fleet.SWEEP_S
PROMISED_S = {
    fleet.SUPERVISED: 3.0,
    fleet.REAPED: 3.0,
    fleet.DEFAULT: 45.0,
    fleet.UNSEEN: LAPSE_S,
}
SLACK_S = {fleet.UNSEEN: 2.0}
"""What the sweep itself, and its wake-up on a busy machine, may take where lease and sweep are
scaled down and they are not."""
BOOT_S = 5.0
"""What a process that was started again may take before it does its duties."""
RECOVERY_DELAY_S = 1.0
"""A parent that died so soon after its child recovered no claim."""
Found = Iterator[str]
Seen = evidence.Evidence
Holdings = dict[str, list[tuple[evidence.Event, float]]]
"""Worker → each of its claims with its end. Not by process: a pid is used again."""


class Death(NamedTuple):
    """A claim whose process was killed; instants in monotonic seconds.

    `since`: the promise runs from then: the death, or the end of what held recovery up as well.
    `again`: when it was claimed again, if that could be at once: the first crash, a worker idle.
    """

    care: str
    job: str
    claim: int
    at: float
    since: float
    taken: float
    again: float | None

    @property
    def excused(self) -> bool:
        """Return whether it took longer than promised because of another fault."""
        took_s = (self.again or self.taken) - self.at
        return took_s > limit_s(self.care) and self.since > self.at


def limit_s(care: str) -> float:
    """Return the seconds beyond which a recovery is a violation."""
    return PROMISED_S[care] + SLACK_S.get(care, 0.0)


def deaths(seen: Seen) -> list[Death]:
    """Return every claim that ended because its process was killed, or killed itself."""
    died: dict[tuple[str, int], float] = {}
    for fault in seen.faults:
        if fault.is_kill and fault.kind != faults.KILL_PARENT:
            died |= {(held.id, held.claim_no): fault.at for held in fault.held}
    for line in seen.killers:
        died.setdefault((line.job, line.claim), line.at)
    held = _holdings(seen)
    found = (_death(seen, held, job, claim, at) for (job, claim), at in died.items())
    return [death for death in found if death is not None]


def _death(seen: Seen, held: Holdings, job: str, claim_no: int, at: float) -> Death | None:
    claim = seen.claims(job).get(claim_no)
    seat = seen.seat(claim) if claim else None
    ends = [
        e for e in seen.events.get(job, []) if e.claim == claim_no and e.kind in check_claims.LEFT
    ]
    if claim is None or seat is None or not ends or ends[0].kind == "completed":
        return None
    taken, care = ends[0].at, seat.care
    own = [f for f in seen.faults if f.seat == seat.name and f.at != at]
    if any(f.kind == faults.KILL_PARENT and at - RECOVERY_DELAY_S < f.at < taken for f in own):
        care = fleet.UNSEEN
    since = _since(seen, care, own, at, taken)
    return Death(care, job, claim_no, at, since, taken, _again(seen, held, claim, taken))


def _since(seen: Seen, care: str, own: list[faults.Fault], at: float, taken: float) -> float:
    everybody = [f for f in seen.faults if not f.pids]
    reaped = care in (fleet.SUPERVISED, fleet.REAPED)
    held_up = [f.until for f in everybody + own * reaped if f.at <= taken and f.until >= at]
    since = max([at, *held_up])
    return since if reaped else max(since, _swept_from(seen, at, taken))


def _swept_from(seen: Seen, at: float, taken: float) -> float:
    """Return from when on an orchestrator ran without a break, up to the recovery."""
    last = {seat.name: at for seat in fleet.SEATS if seat.role == "orchestrator"}
    for fault in seen.faults:
        if fault.seat in last and at - BOOT_S <= fault.until and fault.at <= taken:
            last[fault.seat] = max(last[fault.seat], fault.until + BOOT_S)
    return min(last.values())


def _again(seen: Seen, held: Holdings, claim: evidence.Event, taken: float) -> float | None:
    crashes = [e for e in seen.events[claim.job] if e.kind == "reclaimed"]
    following = seen.claims(claim.job).get((claim.claim or 0) + 1)
    if following is None or (crashes and crashes[0].claim != claim.claim):
        return None
    at = (taken, following.at)
    if _may_wait(seen, claim.job, *at):
        return None
    return following.at if _is_free(seen, held, claim, *at) else None


def _may_wait(seen: Seen, job_id: str, at: float, until: float) -> bool:
    """Return whether anything but the workers decides when a job is claimed again."""
    job = seen.jobs[job_id]
    return bool(job["lock_key"] or job["partition"]) or seen.paused(job["queue"], at, until)


def _is_free(seen: Seen, held: Holdings, claim: evidence.Event, at: float, until: float) -> bool:
    """Return whether a worker of this queue had nothing to do during the whole wait."""
    for worker, claims in held.items():
        served = [mine.at for mine, _ in claims if mine.queue == claim.queue]
        if not served or worker == claim.worker:
            continue
        before, after = min(served) < at, max(served) >= until
        busy = any(mine.at < until and end > at for mine, end in claims)
        if not before or not after or busy:
            continue
        pid = claims[0][0].pid
        if not any(f.hits(pid, at - LAPSE_S, until) for f in seen.faults):
            return True
    return False


def _holdings(seen: Seen) -> Holdings:
    found: Holdings = defaultdict(list)
    for events in seen.events.values():
        ends = {e.claim: e.at for e in reversed(events) if e.kind in check_claims.LEFT}
        for event in events:
            if event.kind == "claimed":
                found[event.worker or ""].append((event, ends.get(event.claim, float("inf"))))
    return found


def late(seen: Seen) -> Found:
    """Find claims of dead workers that were taken back or claimed again too late."""
    for death in deaths(seen):
        most = limit_s(death.care)
        what = (
            f"{death.at - seen.began:.1f} s: job {death.job}: claim {death.claim} of a worker"
            f" that was killed ({death.care})"
        )
        if death.taken - death.since > most:
            took = death.taken - death.since
            yield f"{what} was taken back after {took:.1f} s, not {most:g} s"
        elif death.again is not None and death.again - death.since > most:
            took = death.again - death.since
            yield f"{what} was claimed again after {took:.1f} s, not {most:g} s"


def knobs() -> str:
    """Return the settings with which the recovery was measured."""
    scaled = ", ".join(
        f"{name} {value:g} ({config.KNOBS[name].default:g})"
        for name, value in fleet.KNOBS.items()
        if value != config.KNOBS[name].default
    )
    return f"scaled (default): {scaled}"
