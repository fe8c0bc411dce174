"""Drive procrastinate in its own environment: `drive_procrastinate.py ROLE COUNT ANSWER`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import procrastinate

DSN = os.environ["QUEUE_WORKFLOWS_DB_URL"]
SLOTS = 4
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=DSN))
starts: list[tuple[int, int]] = []


@app.task(name="noop", queue="load")
async def noop(number: int) -> None:
    starts.append((number, time.monotonic_ns()))


async def work(count: int, at_once: int = 1) -> None:
    """Run jobs until so many handlers have started; 0: for ever, telling of each."""
    async with app.open_async():
        task = asyncio.create_task(
            app.run_worker_async(
                queues=["load"], concurrency=at_once, install_signal_handlers=False
            )
        )
        reported = 0
        while count == 0 or len(starts) < count:
            await asyncio.sleep(0.05)
            for number, begun in starts[reported:] if count == 0 else ():
                print(number, begun, flush=True)
                reported += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def rate(count: int, begun: float) -> dict[str, float]:
    return {"rate": count / (time.perf_counter() - begun)}


def drain(count: int, at_once: int) -> dict[str, float]:
    noop.batch_defer(*({"number": number} for number in range(count)))
    asyncio.run(work(count, at_once))
    return {"rate": (count - 1) / (starts[-1][1] - starts[0][1]) * 1e9}


def pickup(count: int) -> dict[str, list[float]]:
    worker = subprocess.Popen(
        [sys.executable, __file__, "work", "0", "-"], stdout=subprocess.PIPE, text=True
    )
    try:
        time.sleep(3.0)
        sent: dict[int, int] = {}
        for number in range(count + 15):
            noop.defer(number=number)
            sent[number] = time.monotonic_ns()
            time.sleep(random.uniform(0.010, 0.030))
        assert worker.stdout is not None
        found: dict[int, float] = {}
        while len(found) < len(sent):
            number, begun = map(int, worker.stdout.readline().split())
            found[number] = (begun - sent[number]) / 1e6
    finally:
        worker.kill()
        worker.wait()
    return {"samples_ms": [found[number] for number in sorted(found)][15:]}


def main() -> int:
    role, count, answer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if role == "work":
        asyncio.run(work(0))
        return 0
    with app.open():
        app.schema_manager.apply_schema()
        begun = time.perf_counter()
        if role == "enqueue":
            for number in range(count):
                noop.defer(number=number)
            found: dict[str, object] = {**rate(count, begun)}
        elif role == "bulk":
            noop.batch_defer(*({"number": number} for number in range(count)))
            found = {**rate(count, begun)}
        else:
            at_once = SLOTS if role == "slots" else 1
            found = {**(pickup(count) if role == "pickup" else drain(count, at_once))}
    Path(answer).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
