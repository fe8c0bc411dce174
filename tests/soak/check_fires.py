"""Check the schedule: each time fires once, with one job, and none is missed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.soak import app, evidence, fleet
from tests.support import frequent_schedule

RECOVERY_S = fleet.LEASE_S + fleet.SWEEP_S
HELD_S = 60.0
"""A schedule whose key is taken is tried again in intervals that grow."""
PHASE = int(frequent_schedule.EPOCH.timestamp()) % app.EVERY_S
Found = Iterator[str]
Seen = evidence.Evidence


def fires(seen: Seen) -> Found:
    """Find instants that fired twice, without their one job, or not at all without a fault."""
    for (name, at), count in Counter((f["name"], f["at"]) for f in seen.fires).items():
        if count > 1:
            yield f"{name} fired {count} times at {at:.0f}"
    known = {fire["job_id"] for fire in seen.fires}
    for fire in seen.fires:
        if not fire["there"]:
            yield f"{fire['name']}: the fire at {fire['at']:.0f} has no job"
    for job in seen.jobs.values():
        if job["reason"] == "tick" and job["id"] not in known:
            yield f"ingest job {job['id']} was queued by a schedule without its fire"
    yield from _missed(seen)
    yield from _never(seen)


def _missed(seen: Seen) -> Found:
    fired: dict[str, set[int]] = defaultdict(set)
    for fire in seen.fires:
        fired[fire["name"]].add(round(fire["at"]))
    first = int(seen.began + seen.time.offset) + app.EVERY_S
    last = int(seen.ended_load + seen.time.offset) - app.EVERY_S
    troubled = [
        (f.at - app.EVERY_S, f.until + RECOVERY_S)
        for f in seen.faults
        if not f.pids or f.seat.startswith("scheduler") or f.kind == "stall"
    ]
    for epoch in range(first, last):
        names = ["every"] if epoch % app.EVERY_S == PHASE else []
        if epoch % 60 == 0:
            names += [f"minute-{n}-{epoch // 60 % 60:02}" for n in range(app.MINUTELY)]
        at = seen.time.at(epoch)
        excused = any(since <= at <= until for since, until in troubled)
        for name in names if not excused else ():
            if epoch not in fired[name]:
                yield f"{name} did not fire at {epoch}"


def _never(seen: Seen) -> Found:
    """Find instants left out by the schedules whose idempotency keys strangers took for a time."""
    for name in app.held_names():
        fired = sorted({round(fire["at"]) for fire in seen.fires if fire["name"] == name})
        for before, after in pairwise(fired):
            if after - before != app.HELD_EVERY_S:
                yield f"{name} did not fire between {before} and {after}"
        last = seen.time.at(fired[-1]) if fired else seen.began
        if seen.ended_load - last > HELD_S:
            yield f"{name} did not fire after {last - seen.began:.0f} s"
