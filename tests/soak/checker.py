"""The checks: each takes the evidence and gives what is wrong, one line each; none is the proof."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from tests.soak import app, evidence, fleet, journal, workflows

GRACE_S = 1.5
"""A body may be seen to act this long after its claim was taken: a trip is judged each 0.5 s."""
RECOVERY_S = fleet.LEASE_S + fleet.SWEEP_S
DEADLY = ("kill", "kill, unreported", "stop", "freeze", "restart", "stall")
"""Faults after which a claim may count as a crash; the others leave the process and its lease."""
OVER = ("completed", "failed", "cancelled", "skipped")
LEFT = ("reclaimed", "requeued", "retried", "parked", "completed", "failed", "cancelled")
"""Events with which a claim ends."""
Found = Iterator[str]
Seen = evidence.Evidence


def lost(seen: Seen) -> Found:
    """An acknowledged submit exists."""
    for run_id, name in seen.books.runs.items():
        if run_id not in seen.runs:
            yield f"run {run_id} ({name}) was acknowledged and is gone"
    for job_id, task in seen.books.jobs.items():
        if job_id not in seen.jobs:
            yield f"ingest job {job_id} ({task}) was acknowledged and is gone"


def stuck(seen: Seen) -> Found:
    """Once faults stop, everything ends or waits for a person."""
    yield from seen.stuck


def double(seen: Seen) -> Found:
    """One finalisation a job."""
    for job_id in seen.jobs:
        finals = seen.finals(job_id)
        if len(finals) > 1:
            yield f"job {job_id}: {', '.join(f'{e.kind} by claim {e.claim}' for e in finals)}"


def superseded(seen: Seen) -> Found:
    """A finalisation is by the newest claim there was, and by the worker that made it."""
    for job_id in seen.jobs:
        claims = seen.claims(job_id)
        for final in seen.finals(job_id):
            newer = [c for c, e in claims.items() if final.claim is None or c > final.claim]
            if newer:
                by = f"{final.kind} by claim {final.claim}"
                yield f"job {job_id}: {by}, claimed up to {max(newer)}"
            own = claims.get(final.claim or 0)
            if own is not None and final.worker not in (None, own.worker):
                yield f"job {job_id}: claim {final.claim} of {own.worker}, ended by {final.worker}"


def overlapping(seen: Seen) -> Found:
    """Two bodies of one job at once are a fault only if the older one still wrote."""
    for job_id, claim, _, after in _overlaps(seen):
        wrote = [e for e in seen.events[job_id] if e.claim == claim and e.kind in LEFT[4:]]
        if any(e.at >= after.at for e in wrote):
            yield f"job {job_id}: claim {claim} wrote after claim {after.claim} was made"


def _overlaps(seen: Seen) -> Iterator[tuple[str, int, journal.Line, evidence.Event]]:
    """(job, older claim, its last line, the claim that its successor's body ran under)."""
    for job_id, lines in seen.by_job.items():
        starts = sorted((line for line in lines if line.word == "start"), key=lambda s: s.claim)
        for older, newer in pairwise(starts):
            last = [line for line in lines if line.claim == older.claim][-1]
            if newer.claim > older.claim and last.at > newer.at:
                yield job_id, older.claim, last, seen.claims(job_id)[newer.claim]


def overlaps(seen: Seen) -> int:
    """How often two bodies of a job were seen at the same time, most of them harmless."""
    return sum(1 for _ in _overlaps(seen))


def outlived(seen: Seen) -> Found:
    """A body is dead before, or very soon after, its claim is taken away."""
    stops = [fault for fault in seen.faults if fault.kind == "stop"]
    for job_id, lines in seen.by_job.items():
        claims = seen.claims(job_id)
        for line in {line.claim: line for line in lines}.values():
            taken = [e.at for e in seen.events[job_id] if e.claim == line.claim and e.kind in LEFT]
            taken += [e.at for claim, e in claims.items() if claim > line.claim]
            woken = [f.until for f in stops if line.pid in f.pids and f.until <= line.at]
            if taken and line.at > max(min(taken), *woken, 0.0) + GRACE_S:
                late = line.at - min(taken)
                yield f"job {job_id}: {line.what} of claim {line.claim} acts {late:.1f} s after"


def twice(seen: Seen) -> Found:
    """A claim runs its body once, and a body runs under a claim of its own process."""
    starts = [line for line in seen.lines if line.word == "start"]
    for (job_id, claim), count in Counter((s.job, s.claim) for s in starts).items():
        if count > 1:
            yield f"job {job_id}: claim {claim} ran {count} bodies"
    for line in starts:
        claim = seen.claims(line.job).get(line.claim)
        if claim is None or claim.worker != line.worker:
            yield f"job {line.job}: a body ran under claim {line.claim}, which nobody made"


def unbacked(seen: Seen) -> Found:
    """A completed job's result is what the body of the finalising claim returned."""
    ends = {(line.job, line.claim) for line in seen.lines if line.word == "end"}
    for job_id, job in seen.jobs.items():
        if job["status"] != "completed" or (job["what"] or "").startswith("__input__"):
            continue
        final = seen.finals(job_id)[-1:]
        claim = final[0].claim if final else None
        if (job_id, claim) not in ends:
            yield f"job {job_id}: completed by claim {claim}, whose body never ended"
        elif (job["result"] or {}).get("by") != claim:
            yield f"job {job_id}: completed by claim {claim} with the result {job['result']}"


def too_early(seen: Seen) -> Found:
    """A node's body starts when all it depends on has ended."""
    jobs = {(j["run_id"], j["node_id"]): j for j in seen.jobs.values() if j["run_id"]}
    ends = {(line.job, line.claim): line.at for line in seen.lines if line.word == "end"}
    for run_id, run in seen.runs.items():
        for node in run["nodes"] or ():
            job = jobs.get((run_id, node["id"]))
            starts = [s.at for s in seen.by_job.get(job["id"], [])] if job else []
            for dep in node["deps"] if starts else ():
                before = jobs.get((run_id, dep))
                if before is None or before["status"] not in ("completed", "skipped"):
                    yield f"run {run_id}: {node['id']} ran, and {dep} is not done"
                elif (ended := ends.get((before["id"], before["claim_no"]))) and ended > min(
                    starts
                ):
                    yield f"run {run_id}: {node['id']} ran before {dep} had ended"


def outcome(seen: Seen) -> Found:
    """Poison fails, a cancelled run stays cancelled, and everything else completes."""
    for run_id, name in seen.books.runs.items():
        run = seen.runs.get(run_id)
        if run is None or run["status"] not in OVER:
            continue
        allowed = {"failed" if name in workflows.POISON else "completed"}
        if run_id in seen.books.cancelled:
            allowed = {"cancelled"}
        elif run_id in seen.books.perhaps_cancelled:
            allowed.add("cancelled")
        if run["status"] not in allowed and not _worn_out(seen, run_id):
            yield f"run {run_id} ({name}): {run['status']}, not {allowed}: {run['error']}"
    for job_id, task in seen.books.jobs.items():
        job = seen.jobs.get(job_id, {"status": "gone"})
        wanted = "failed" if task == "spoiled" else "completed"
        if job["status"] in OVER and job["status"] != wanted and not _is_worn(job):
            yield f"ingest job {job_id} ({task}): {job['status']}, not {wanted}: {job['error']}"
    yield from _values(seen)


def _is_worn(job: dict[str, Any]) -> bool:
    """Whether faults took its workers down as often as poison does; `crashes` checks each."""
    return job["status"] == "failed" and job["crash_count"] >= fleet.MAX_CRASHES


def _worn_out(seen: Seen, run_id: str) -> bool:
    return any(job["run_id"] == run_id and _is_worn(job) for job in seen.jobs.values())


def _values(seen: Seen) -> Found:
    for job in seen.jobs.values():
        if job["what"] == "link" and job["status"] == "completed":
            wanted = int(job["node_id"][1 : job["node_id"].index("/")])
            if job["result"].get("value") != wanted:
                yield f"run {job['run_id']}: {job['node_id']} got {job['result']}, not {wanted}"


def crashes(seen: Seen) -> Found:
    """A crash is counted only against a process that a fault, or its own body, brought down."""
    bodies = [line for line in seen.lines if line.word == "start" and line.what == "killed"]
    for job_id, job in seen.jobs.items():
        if job["crash_count"] > fleet.MAX_CRASHES:
            yield f"job {job_id}: {job['crash_count']} crashes"
        claims = seen.claims(job_id)
        for event in seen.events.get(job_id, []):
            claim = claims.get(event.claim or 0)
            if event.kind != "reclaimed" or claim is None:
                continue
            since = claim.at - RECOVERY_S
            killed = any(b.pid == claim.pid and since <= b.at <= event.at + 1 for b in bodies)
            if not killed and not seen.hit(DEADLY, claim.pid, since, event.at + 1):
                held = event.at - claim.at
                yield f"job {job_id}: claim {event.claim} reclaimed after {held:.1f} s for no fault"


def executions(seen: Seen) -> Found:
    """A body runs again only for a reason: every claim but the last was taken back."""
    for job_id in seen.jobs:
        claims = sorted(seen.claims(job_id))
        ends = {e.claim for e in seen.events.get(job_id, []) if e.kind in LEFT}
        missing = [claim for claim in claims[:-1] if claim not in ends]
        if missing:
            yield f"job {job_id}: claimed again while claim {missing[0]} had not ended"
        if claims != list(range(1, len(claims) + 1)):
            yield f"job {job_id}: claims {claims}"


def fires(seen: Seen) -> Found:
    """One fire per schedule and instant, each with its one job; none is missed without a fault."""
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
        names = ["every"] if epoch % app.EVERY_S == _PHASE else []
        if epoch % 60 == 0:
            names += [f"minute-{n}-{epoch // 60 % 60:02}" for n in range(app.MINUTELY)]
        at = seen.time.at(epoch)
        excused = any(since <= at <= until for since, until in troubled)
        for name in names if not excused else ():
            if epoch not in fired[name]:
                yield f"{name} did not fire at {epoch}"


_PHASE = int(app._EPOCH.timestamp()) % app.EVERY_S


def answers(seen: Seen) -> Found:
    """The first answer wins, a second is refused, and the node gets what was accepted."""
    jobs = {(j["run_id"], j["node_id"]): j for j in seen.jobs.values() if j["run_id"]}
    for where, accepted in seen.books.answers.items():
        if len(accepted) > 1:
            yield f"run {where[0]}: {len(accepted)} answers were accepted"
        job = jobs.get(where)
        if job is None or job["status"] != "completed":
            continue
        if where not in seen.books.perhaps_answered and job["result"] != {"way": accepted[0]}:
            yield f"run {where[0]}: answered {accepted}, the node got {job['result']}"
        end = jobs.get((where[0], "end/n"))
        heard = end and end["status"] == "completed" and end["result"].get("heard")
        if heard and {"way": heard} != job["result"]:
            yield f"run {where[0]}: the next node heard {heard}, not {job['result']}"


def forbidden(seen: Seen) -> Found:
    """Nothing is claimed after a cancel, nor by a worker that is OFF."""
    for job_id, job in seen.jobs.items():
        cancelled = seen.books.cancelled.get(job["run_id"] or "")
        for claim in seen.claims(job_id).values():
            if cancelled is not None and claim.epoch > cancelled:
                late = claim.epoch - cancelled
                yield f"job {job_id}: claimed {late:.2f} s after its run was cancelled"
            for host, queue, since, until in seen.off:
                if (claim.host, claim.queue) == (host, queue) and since < claim.epoch < until:
                    yield f"job {job_id}: claimed by {host}, whose {queue} was OFF"


def moved(seen: Seen) -> Found:
    """What is over stays so, whoever writes."""
    yield from seen.books.moved


def broken(seen: Seen) -> Found:
    """Every law that is a query, at the end and in between."""
    yield from dict.fromkeys(seen.laws)


def slow(seen: Seen) -> Found:
    """No engine transaction is open for long."""
    yield from seen.slow


CHECKS: dict[str, Callable[[Seen], Found]] = {
    "lost": lost,
    "stuck": stuck,
    "double-finalised": double,
    "finalised by a superseded claim": superseded,
    "overlapping bodies, the older one wrote": overlapping,
    "bodies that outlived their claim": outlived,
    "bodies without a claim of their own": twice,
    "results without their body": unbacked,
    "nodes that ran too early": too_early,
    "wrong outcomes": outcome,
    "crashes counted without a fault": crashes,
    "claimed before the last claim ended": executions,
    "doubled or missed fires": fires,
    "answers": answers,
    "claimed after a cancel or while OFF": forbidden,
    "terminal rows moved": moved,
    "laws": broken,
    "transactions open too long": slow,
}


def check(seen: Seen) -> dict[str, list[str]]:
    """Every check by its name, with what it found."""
    return {name: list(judge(seen)) for name, judge in CHECKS.items()}
