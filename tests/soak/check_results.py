"""Check results: all acknowledged work ended once, in order, with the right outcome."""

from __future__ import annotations

from collections.abc import Iterator

from tests.soak import evidence, tasks, workflows

OVER = ("completed", "failed", "cancelled", "skipped")
Found = Iterator[str]
Seen = evidence.Evidence


def lost(seen: Seen) -> Found:
    """Find acknowledged submits that do not exist."""
    for run_id, name in seen.books.runs.items():
        if run_id not in seen.runs:
            yield f"run {run_id} ({name}) was acknowledged and is gone"
    for job_id, task in seen.books.jobs.items():
        if job_id not in seen.jobs:
            yield f"ingest job {job_id} ({task}) was acknowledged and is gone"


def stuck(seen: Seen) -> Found:
    """Find work that neither ended nor waits for a person once faults have stopped."""
    yield from seen.stuck


def unbacked(seen: Seen) -> Found:
    """Find completed jobs whose result is not what the handler of the finalising claim returned."""
    ends = {(line.job, line.claim) for line in seen.lines if line.word == "end"}
    for job_id, job in seen.jobs.items():
        if job["status"] != "completed" or (job["what"] or "").startswith("__"):
            continue
        final = seen.finals(job_id)[-1:]
        claim = final[0].claim if final else None
        if (job_id, claim) not in ends:
            yield f"job {job_id}: completed by claim {claim}, whose body never ended"
        elif (job["result"] or {}).get("by") != claim:
            yield f"job {job_id}: completed by claim {claim} with the result {job['result']}"


def too_early(seen: Seen) -> Found:
    """Find handlers that started before all dependencies of their node had ended."""
    jobs = {(j["run_id"], j["node_id"]): j for j in seen.jobs.values() if j["run_id"]}
    ends = {(line.job, line.claim): line.at for line in seen.lines if line.word == "end"}
    for run_id in seen.books.runs.keys() & seen.runs.keys():
        run = seen.runs[run_id]
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
    """Find wrong outcomes: poison fails, a cancelled run stays cancelled, the rest completes."""
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
        wanted = "failed" if task in tasks.FAIL else "completed"
        if job["status"] in OVER and job["status"] != wanted and not evidence.is_worn(job):
            yield f"ingest job {job_id} ({task}): {job['status']}, not {wanted}: {job['error']}"
    yield from _values(seen)


def _worn_out(seen: Seen, run_id: str) -> bool:
    return any(
        evidence.is_worn(job) and run_id in (job["run_id"], seen.runs[job["run_id"]]["parent"])
        for job in seen.jobs.values()
        if job["run_id"] in seen.runs
    )


def _values(seen: Seen) -> Found:
    for job in seen.jobs.values():
        if job["what"] == "link" and job["status"] == "completed":
            wanted = int(job["node_id"][1 : job["node_id"].index("/")])
            if job["result"].get("value") != wanted:
                yield f"run {job['run_id']}: {job['node_id']} got {job['result']}, not {wanted}"


def answers(seen: Seen) -> Found:
    """Find wrong answers: the first wins, a second is refused, the node gets the accepted one."""
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
    """Find claims after a cancel, and claims by a worker that is OFF."""
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
    """Find terminal rows whose status changed."""
    yield from seen.books.moved


def broken(seen: Seen) -> Found:
    """Yield what broke an invariant that is a query, at the end and in between."""
    yield from dict.fromkeys(seen.invariants)


def slow(seen: Seen) -> Found:
    """Find engine transactions that were open for too long."""
    yield from seen.slow
