"""Check ingest jobs: keys, lock keys, limits, pauses and attempts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.soak import check_claims, evidence, fleet, journal, observer, tasks

SLACK_S = 0.005
"""How exactly the database's time is known on the journal's clock."""
PAUSE_S = 1.0
"""A pause may begin so long before its acknowledgement, and end so long after its request."""
BACK_S = 5.0
"""A job stands in line again so long after its queue is served: a sweep, and a busy machine."""
Found = Iterator[str]
Seen = evidence.Evidence


class Span(NamedTuple):
    """The time of a handler under its claim: by the journal, and no longer than the claim."""

    since: float
    until: float
    job: str
    claim: int


def keyed(seen: Seen) -> Found:
    """Find keys with two jobs, and requests that got a wrong answer about their key."""
    there: dict[str, list[str]] = defaultdict(list)
    for job_id, job in seen.jobs.items():
        if job["key"] is not None:
            there[job["key"]].append(job_id)
    for key, ids in there.items():
        if len(ids) > 1:
            yield f"key {key}: {len(ids)} jobs: {', '.join(ids)}"
    for key, answers in seen.books.keys.items():
        said = {job_id for job_id, _ in answers}
        if said != set(there[key]):
            yield f"key {key}: said to be {', '.join(said)}, found {', '.join(there[key])}"
        new = sum(created for _, created in answers)
        if new > 1 or (new == 0 and key not in seen.books.unheard):
            yield f"key {key}: {new} of {len(answers)} answers said that it is new"
    for key in seen.books.taken:
        yield f"key {key}: accepted for another payload"
    for job_id in seen.books.undone & seen.jobs.keys():
        yield f"ingest job {job_id}: its transaction was rolled back, and it is there"


def locked(seen: Seen) -> Found:
    """Find lock keys with two handlers at once, or with claims out of the queueing order.

    A job in a queue that is paused or without a live worker gives up its turn
    (docs/queue-limit-rules.md), so the ones that were claimed after that may be younger.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    for job_id, job in seen.jobs.items():
        if job["lock_key"] is not None:
            lines[job["lock_key"]].append(job_id)
    for key, ids in lines.items():
        for span, beside in _crowds(seen, ids, 1):
            yield f"lock key {key}: {_named(span)} beside {', '.join(map(_named, beside))}"
        for job_id, other in _overtaken(seen, ids):
            seq, by = seen.jobs[job_id]["seq"], seen.jobs[other]["seq"]
            yield f"lock key {key}: job {job_id} (seq {seq}) was claimed after seq {by}"


def _overtaken(seen: Seen, ids: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each job of a lock key that a younger one overtook while it waited, and that one.

    Hostile rows have priorities of their own and are left out.
    """
    firsts = [
        claims[1]
        for i in ids
        if seen.jobs[i]["reason"] != "hostile" and 1 in (claims := seen.claims(i))
    ]
    firsts.sort(key=lambda each: each.place)
    for place, claim in enumerate(firsts):
        job = seen.jobs[claim.job]
        for at, other in enumerate(firsts[:place]):
            if seen.jobs[other.job]["seq"] < job["seq"]:
                continue
            # The other one got its turn after the claim before its own.
            since = firsts[at - 1].epoch - BACK_S if at else 0.0
            if not _gave_up(seen, job["queue"], max(since, job["epoch"]), other.epoch):
                yield claim.job, other.job
                break


def _gave_up(seen: Seen, queue: str, since: float, until: float) -> bool:
    """Return whether the queue may have been paused or unserved between the two instants.

    A time in which the observer saw nothing counts for every queue. The sweep that lets a job give
    up its turn may have run just then, on a machine too busy for heartbeats.
    """
    if any(a <= until and b >= since for a, b in seen.blind):
        return True
    unserved = [at for each, at in seen.unserved if each == queue]
    # A wait that is shorter than the time between two polls lies between two that say so.
    before = any(since - observer.BLIND_S <= at <= since for at in unserved)
    after = any(until <= at <= until + observer.BLIND_S for at in unserved)
    if (before and after) or any(since <= at <= until for at in unserved):
        return True
    # It may have been unserved up to the polls before and after the one that found no worker.
    if any(at - observer.BLIND_S <= since and until <= at + observer.BLIND_S for at in unserved):
        return True
    return any(
        pause.queue == queue
        and pause.partition is None
        and pause.since - PAUSE_S <= until
        and pause.until + PAUSE_S >= since
        for pause in seen.books.pauses
    )


def crowded(seen: Seen) -> Found:
    """Find partitions with more handlers at once than their limit allows."""
    for partition, ids in _partitions(seen).items():
        for span, beside in _crowds(seen, ids, tasks.MOST):
            others = ", ".join(map(_named, beside))
            yield f"partition {partition}: {_named(span)} beside {others}"


def hurried(seen: Seen) -> Found:
    """Find periods with more starts than the rate allows, by the database's times."""
    ids = _partitions(seen).get(tasks.METERED, [])
    starts = sorted((e.epoch, e.job) for i in ids for e in seen.claims(i).values())
    for (first, _), (last, job_id) in zip(starts, starts[tasks.METER :], strict=False):
        if last - first < tasks.PERIOD_S - 1e-4:
            took = last - first
            yield f"job {job_id}: start {tasks.METER + 1} within {took:.3f} s"


def paused(seen: Seen) -> Found:
    """Find claims from a queue or partition while it was paused."""
    for job_id, job in seen.jobs.items():
        claims = seen.claims(job_id).values() if job["queue"] in tasks.QUEUES else ()
        for pause in seen.books.pauses if claims else ():
            if not pause.sure or pause.queue != job["queue"]:
                continue
            if pause.partition not in (None, job["partition"]):
                continue
            for claim in claims:
                if pause.since < claim.epoch < pause.until:
                    late = claim.epoch - pause.since
                    yield f"job {job_id}: claimed {late:.2f} s after {pause.queue} was paused"


def attempts(seen: Seen) -> Found:
    """Find attempts that were counted wrongly, that did not wait, or that exceed the limit.

    A timeout fails an ingest job at once and counts in `watchdog_retries`.
    """
    for job_id, job in seen.jobs.items():
        if job["family"] != "ingest":
            continue
        again = [e for e in seen.events.get(job_id, []) if e.kind == "retried"]
        most, worn = max(job["max_attempts"], 1), evidence.is_worn(job)
        timed_out = any(e.kind.endswith("_trip") for e in seen.events.get(job_id, []))
        ended = job["status"] == "failed" and not worn and not timed_out
        failed = len(again) + ended
        if job["attempts"] != failed:
            yield f"job {job_id}: {job['attempts']} attempts counted, {failed} failed"
        if failed > most:
            yield f"job {job_id}: {failed} of {most} attempts failed"
        if job["what"] == "hopeless" and ended and failed < most:
            yield f"job {job_id}: given up after {failed} of {most} attempts"
        yield from _impatient(seen, job_id, job, again)


def _impatient(seen: Seen, job_id: str, job: dict[str, Any], again: list[evidence.Event]) -> Found:
    starts = [line for line in seen.by_job.get(job_id, []) if line.word == "start"]
    for event in again:
        for start in starts:
            waited = start.at - event.at
            if start.claim == (event.claim or 0) + 1 and waited < tasks.AGAIN_S - SLACK_S:
                yield f"job {job_id}: claim {start.claim} of {job['what']} ran after {waited:.2f} s"


def figures(seen: Seen) -> list[tuple[str, str]]:
    """Return how much there was to check, for the report."""
    pools = {seat.label for seat in fleet.SEATS if seat.pool}
    claimed = Counter(e.host in pools for i in seen.jobs for e in seen.claims(i).values())
    locked_, parts = [j for j in seen.jobs.values() if j["lock_key"]], _partitions(seen)
    answers = [len(answers) for answers in seen.books.keys.values()]
    again = Counter(e.kind for events in seen.events.values() for e in events)["retried"]
    snoozed = sum(line.word == "snooze" for line in seen.lines)
    limited, metered = sum(map(len, parts.values())), len(parts.get(tasks.METERED, ()))
    return [
        ("claims by pools", str(claimed[True])),
        ("keys, and answers to who asked for them", f"{len(answers)}, {sum(answers)}"),
        ("keys refused for another payload", str(seen.books.clashes)),
        ("jobs with a lock key", str(len(locked_))),
        ("jobs of limited partitions, of these under a rate", f"{limited}, {metered}"),
        ("pauses of a queue or partition", str(len(seen.books.pauses))),
        ("attempts that failed with one left, snoozes", f"{again}, {snoozed}"),
    ]


def _partitions(seen: Seen) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for job_id, job in seen.jobs.items():
        if job["partition"] is not None and job["queue"] == tasks.CALLS:
            found[job["partition"]].append(job_id)
    return found


def _spans(seen: Seen, job_id: str) -> Iterator[Span]:
    """Return each handler's span, up to the end of its claim; `outlived` checks what follows."""
    last: dict[int, journal.Line] = {}
    first: dict[int, float] = {}
    for line in seen.by_job.get(job_id, []):
        last[line.claim] = line
        first.setdefault(line.claim, line.at)
    taken = {
        event.claim: event.at - SLACK_S
        for event in reversed(seen.events.get(job_id, []))
        if event.kind in check_claims.LEFT
    }
    for claim, since in first.items():
        until = min(last[claim].at, taken.get(claim, float("inf")))
        yield Span(since, max(since, until), job_id, claim)


def _crowds(seen: Seen, ids: list[str], most: int) -> Iterator[tuple[Span, list[Span]]]:
    """Yield each handler that starts while `most` others or more run, and these."""
    running: list[Span] = []
    for span in sorted(span for job_id in ids for span in _spans(seen, job_id)):
        running = [other for other in running if other.until > span.since]
        if len(running) >= most:
            yield span, running
        running.append(span)


def _named(span: Span) -> str:
    return f"job {span.job} (claim {span.claim})"
