"""Drive pgqueuer in its own environment: `drive_pgqueuer.py ROLE COUNT ANSWER`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries

DSN = os.environ["QUEUE_WORKFLOWS_DB_URL"]
starts: list[tuple[int, int]] = []


def payload(number: int) -> bytes:
    return json.dumps({"number": number}).encode()


async def work(count: int, batch_size: int) -> None:
    """Run jobs until so many handlers have started; 0: for ever, telling of each."""
    queue = PgQueuer.from_asyncpg_connection(await asyncpg.connect(DSN))

    @queue.entrypoint("noop")
    async def noop(job: Job) -> None:
        begun = time.monotonic_ns()
        starts.append((json.loads(job.payload or b"{}")["number"], begun))

    task = asyncio.create_task(
        queue.run(batch_size=batch_size, dequeue_timeout=timedelta(seconds=1))
    )
    reported = 0
    while count == 0 or len(starts) < count:
        await asyncio.sleep(0.05)
        for number, begun in starts[reported:] if count == 0 else ():
            print(number, begun, flush=True)
            reported += 1
    queue.shutdown.set()
    await asyncio.wait([task], timeout=5)


async def enqueue_all(queries: Queries, count: int) -> None:
    await queries.enqueue(
        ["noop"] * count, [payload(number) for number in range(count)], [0] * count
    )


async def pickup(queries: Queries, count: int) -> dict[str, object]:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "work", "0", "-", stdout=asyncio.subprocess.PIPE
    )
    try:
        await asyncio.sleep(3.0)
        sent: dict[int, int] = {}
        for number in range(count + 15):
            await queries.enqueue("noop", payload(number))
            sent[number] = time.monotonic_ns()
            time.sleep(random.uniform(0.010, 0.030))
        assert worker.stdout is not None
        found: dict[int, float] = {}
        while len(found) < len(sent):
            number, begun = map(int, (await worker.stdout.readline()).split())
            found[number] = (begun - sent[number]) / 1e6
    finally:
        worker.kill()
        await worker.wait()
    return {"samples_ms": [found[number] for number in sorted(found)][15:]}


async def answer(role: str, count: int) -> dict[str, object]:
    conn = await asyncpg.connect(DSN)
    queries = Queries.from_asyncpg_connection(conn)
    await queries.install()
    if role == "pickup":
        return await pickup(queries, count)
    begun = time.perf_counter()
    if role == "enqueue":
        for number in range(count):
            await queries.enqueue("noop", payload(number))
    else:
        await enqueue_all(queries, count)
    if role in ("enqueue", "bulk"):
        return {"rate": count / (time.perf_counter() - begun)}
    await work(count, 100 if role == "batch" else 1)
    return {"rate": (count - 1) / (starts[-1][1] - starts[0][1]) * 1e9}


def main() -> int:
    role, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if role == "work":
        asyncio.run(work(0, 10))
        return 0
    Path(path).write_text(json.dumps(asyncio.run(answer(role, count))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
