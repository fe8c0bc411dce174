"""Check what readers of streams got: each attempt's parts from the first on, without a gap."""

from __future__ import annotations

from collections.abc import Iterator

from queue_workflows import streams
from tests.soak import evidence, stream_tasks

Found = Iterator[str]
Seen = evidence.Evidence


def read(seen: Seen) -> Found:
    """Find readers that got a part twice, out of order, behind a gap, or without a reset mark."""
    for job_id, parts in seen.streams.items():
        yield from (f"job {job_id}: {wrong}" for wrong in _wrong(parts))
        job = seen.jobs.get(job_id)
        if job is None or job["status"] != "completed":
            continue
        last = [part.value for part in parts if part.claim_no == job["claim_no"] and part.seq]
        whole = [[job["claim_no"], number] for number in range(stream_tasks.COUNT)]
        if last != whole:
            got = f"{len(last)} parts of its last attempt" if last else "nothing of it"
            yield f"job {job_id}: it is completed, and its reader got {got}"


def _wrong(parts: list[streams.Part]) -> Found:
    claim_no, seq = 0, 0
    for part in parts:
        if part.is_reset:
            if part.claim_no <= claim_no:
                yield f"a mark of attempt {part.claim_no} behind one of {claim_no}"
        elif claim_no not in (0, part.claim_no):
            yield f"part {part.id} without a mark behind {claim_no}-{seq}"
        elif part.seq != seq + 1:
            yield f"part {part.id} behind {claim_no}-{seq}"
        elif part.value != [part.claim_no, part.seq - 1]:
            yield f"part {part.id} is {part.value}"
        claim_no, seq = part.claim_no, part.seq
