"""A worker with batches in this process, and a task that reports and waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from queue_workflows import claim_worker, config, db, jobs
from queue_workflows.types import Row
from tests.support import factories

QUEUE = "load"


class Bodies:
    """A task: job `i` reports that it runs; one of `stay` then waits until it is released."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.stay: set[int] = set()
        self.started = threading.Event()
        self.release = threading.Event()
        self.pause_s = 0.0
        self.tell: Callable[[int], object] = lambda _: None
        config.register_ingest_task("t", self)

    def __call__(self, reason: str, args: Row) -> Row:
        self.ran.append(args["i"])
        self.tell(args["i"])
        self.release.wait(self.pause_s)
        if args["i"] in self.stay:
            self.started.set()
            assert self.release.wait(60)
        return {"i": args["i"]}


def enqueue(count: int) -> list[str]:
    """Queue so many jobs of the task, numbered from 0; return their ids."""
    args = [{"i": i} for i in range(count)]
    return jobs.enqueue_many(task_name="t", queue=QUEUE, args=args)


def worker(size: int = 4, host: str = "box", **more: Any) -> claim_worker.ClaimWorker:
    """Return a worker that claims batches of this size."""
    return claim_worker.ClaimWorker(queue=QUEUE, host=host, batch=size, **more)


@contextmanager
def running(subject: claim_worker.ClaimWorker, bodies: Bodies) -> Generator[threading.Thread]:
    """It works; at the end the handlers are let go, as it would leave the process for one."""
    thread = threading.Thread(target=subject.run_forever, name="test-worker")
    thread.start()
    try:
        yield thread
    finally:
        bodies.release.set()
        subject.stop()
        thread.join(30)
        assert not thread.is_alive()


def rows(conn: db.Connection) -> list[Row]:
    """Return the jobs in their order."""
    return conn.execute("SELECT * FROM ingest_jobs ORDER BY seq").fetchall()


def states(conn: db.Connection) -> list[str]:
    """Return the statuses of the jobs in their order."""
    return [row["status"] for row in rows(conn)]


def are(conn: db.Connection, *wanted: str) -> Callable[[], bool]:
    """Return what returns whether the jobs have these statuses."""
    return lambda: states(conn) == [*wanted]


def events(conn: db.Connection, job_id: str) -> list[str]:
    """Return the types of a job's events."""
    query = "SELECT event_type FROM ingest_job_events WHERE job_id = %s ORDER BY id"
    return factories.column(conn, query, job_id)
