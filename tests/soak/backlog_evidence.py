"""Decide whether a job waited behind busy workers only, from what the observer saw of them."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.soak import evidence, fleet, observer

SHARE = 4.0
"""A wait of so many times the bound is a finding, whatever the workers did."""
SEEN = 0.75
"""The share of a wait that the observer must have seen."""
IDLE_S = 5.0
"""For so long workers may be seen idle while a job waits: reconnects, and polls between claims."""
START_S = 5.0
"""A worker may take so long from its first heartbeat to its first claim."""
AWAY_S = 20.0
"""For so long a seat may be without a live worker after the end of the last fault that hit it."""
SETTLE_S = 10.0
"""So long after a fault it still explains why a worker claims nothing, or is not there yet."""
CLAIMS = 10
"""No job is claimed more often while another waits: its attempts and crashes are limited."""
AHEAD_S = 5.0
"""By so much a job may be claimed before an earlier one: batches, and commits side by side."""
Seen = evidence.Evidence


class Backlog:
    """What the workers of one queue did, prepared for questions about many of its jobs."""

    def __init__(self, seen: Seen, queue: str) -> None:
        self._seen = seen
        self._queue = queue
        of_queue = [each for each in seen.served if each.queue == queue]
        self._served = sorted(of_queue, key=lambda each: each.at)
        self._at = [each.at for each in self._served]
        self._polls = sorted(seen.polls)
        self._alive_until: dict[str, float] = defaultdict(float)
        self._since: dict[str, float] = {}
        for each in self._served:
            known = self._alive_until[each.worker]
            self._alive_until[each.worker] = max(known, each.last_seen)
            self._since.setdefault(each.worker, each.at)
        self._killed: dict[int, list[float]] = defaultdict(list)
        for line in seen.killers:
            self._killed[line.pid].append(line.at)
        self._claims = sorted(
            (event.at, job)
            for job, events in seen.events.items()
            for event in events
            if event.kind == "claimed" and event.queue == queue
        )
        self._next_first = self._first_claims()

    def _first_claims(self) -> list[tuple[int, float]]:
        """Return (seq, first claim of any job of the load from this seq on), by seq."""
        runs = self._seen.books.runs
        ordered = sorted(
            (job["seq"], claims[1].at)
            for job_id, job in self._seen.jobs.items()
            if job["queue"] == self._queue
            and (job["reason"] == "load" or job["run_id"] in runs)
            and 1 in (claims := self._seen.claims(job_id))
        )
        earliest = itertools.accumulate((at for _, at in reversed(ordered)), min)
        return [(seq, at) for (seq, _), at in zip(reversed(ordered), earliest, strict=True)][::-1]

    def blame(self, seq: int, since: float, until: float, bound_s: float) -> str | None:
        """Return why the wait of a job is the engine's fault, or None: all workers were busy."""
        if until - since > SHARE * bound_s:
            return f"that is over {SHARE:g} times the bound"
        if self._seen_share(since, until) < SEEN:
            return "the observer did not see enough of it"
        later = bisect.bisect_right(self._next_first, (seq, float("inf")))
        if later < len(self._next_first) and self._next_first[later][1] < until - AHEAD_S:
            return "a later job was claimed before it"
        claims = self._claims[
            bisect.bisect_left(self._claims, (since, "")) : bisect.bisect_left(
                self._claims, (until, "")
            )
        ]
        for job, count in Counter(job for _, job in claims).most_common(1):
            if count > CLAIMS:
                return f"job {job} was claimed {count} times meanwhile"
        return next(self._idle(since, until), None) or next(self._away(since, until), None)

    def _between(self, since: float, until: float) -> list[observer.Served]:
        first, last = bisect.bisect_left(self._at, since), bisect.bisect_right(self._at, until)
        return self._served[first:last]

    def _seen_share(self, since: float, until: float) -> float:
        polls = [at for at in self._polls if since <= at <= until]
        steps = itertools.pairwise([since, *polls, until])
        return sum(min(b - a, observer.BLIND_S) for a, b in steps) / (until - since)

    def _idle(self, since: float, until: float) -> Iterator[str]:
        """Yield which worker was idle most, if all were idle for longer than `IDLE_S`."""
        idle = Counter(each.worker for each in self._between(since, until) if self._is_idle(each))
        idle_s = sum(idle.values()) * observer.LOOK_EVERY_S
        if idle_s > IDLE_S:
            most = idle.most_common(1)[0][0]
            yield f"workers were idle for {idle_s:.0f} s meanwhile, most of it {most}"

    def _is_idle(self, one: observer.Served) -> bool:
        if one.is_off or one.running >= slots(one.host, one.queue):
            return False
        if one.at > self._alive_until[one.worker] or one.at < self._since[one.worker] + START_S:
            return False
        if any(at <= one.at for at in self._killed.get(one.pid, ())):
            return False
        return not any(f.hits(one.pid, one.at - SETTLE_S, one.at) for f in self._seen.faults)

    def _away(self, since: float, until: float) -> Iterator[str]:
        """Yield the seats that had no live worker for longer than `AWAY_S` without a fault."""
        present: dict[str, set[float]] = defaultdict(set)
        for each in self._between(since, until):
            present[each.host].add(each.at)
        for seat in fleet.SEATS:
            if self._queue not in seat.queues:
                continue
            hits = [f for f in self._seen.faults if not f.pids or f.seat == seat.name]
            last = since
            for at in (at for at in self._polls if since <= at <= until):
                if at in present[seat.label] or any(
                    f.at <= at and f.until >= at - SETTLE_S for f in hits
                ):
                    last = at
                elif at - last > AWAY_S:
                    yield f"{seat.name} had no worker for over {AWAY_S:g} s without a fault"
                    break


def slots(host: str, queue: str) -> int:
    """Return how many jobs a worker of this queue runs at once; one batch counts as one."""
    seats = (seat for seat in fleet.SEATS if seat.label == host and queue in seat.queues)
    return max((dict(seat.pool).get(queue, seat.slots or 1) for seat in seats), default=1)
