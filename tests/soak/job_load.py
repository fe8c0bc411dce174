"""Submit the load of ingest jobs: keys, limits, retries, pauses and repeated requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import psycopg

from queue_workflows import db, errors, events, jobs, queues
from queue_workflows.types import JobId, NewIngestJob
from tests.soak import acknowledgements, step_tasks, stream_tasks, tasks, workflows

LOCK_KEYS, PARTITIONS = 4, ("red", "green", "blue")
BURST, BULK = 6, 8
POISON, NAPS = 0.03, 0.05
PAUSE_GAP_S = 6.0
UNHEARD_S = 10.0
"""How much later than requested a pause may end if the reply was lost."""
_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8 AS t"
_SQL = (
    "INSERT INTO ingest_jobs (task_name, queue, reason, idempotency_key)"
    " VALUES (%(task_name)s, %(queue)s, 'load', %(idempotency_key)s)"
    " ON CONFLICT DO NOTHING RETURNING id"
)
Order = dict[str, Any]
"""Keywords of `jobs.enqueue`."""


class _Undone(Exception):
    """Takes a transaction of the load back."""


class JobLoad:
    """`place` makes one order, of one job or several; `pause` pauses a queue for a moment."""

    def __init__(
        self,
        seed: int,
        known: acknowledgements.Acknowledgements,
        plan: Callable[[float, Callable[[], None]], None],
        is_open: Callable[[], bool],
        weights: Mapping[str, int],
        *,
        slow: bool,
    ) -> None:
        self._rng = random.Random(seed * 7919 + 1)
        self._is_open, self.slow = is_open, slow
        self._books = known
        self._plan = plan
        self._number = 0
        self._last_keyed: Order | None = None
        self._kinds: dict[Callable[[], None], int] = {
            self._keyed: 8, self._locked: 8, self._limited: 4, self._metered: 2, self._bulk: 2,
            self._retried: 6, self._pooled: 12, self._undone: 2, self._mixed: 1,
            self._stepped: 4, self._waits: 4, self._streams: 3,
        }  # fmt: skip
        for kind in self._kinds:
            self._kinds[kind] = weights.get(kind.__name__.strip("_"), self._kinds[kind])

    def place(self) -> None:
        """Place one order of a kind drawn by weight."""
        self._rng.choices([*self._kinds], [*self._kinds.values()])[0]()

    def _order(self, task: str, queue: str, **more: Any) -> Order:
        self._number += 1
        args = {"number": self._number, **more.pop("args", {})}
        return {"task_name": task, "queue": queue, "reason": "load", "args": args, **more}

    def _send(self, order: Order) -> None:
        self._enter(order, jobs.enqueue(**order))

    def _enter(self, order: Order, job_id: JobId) -> None:
        self._books.jobs[job_id] = order["task_name"]
        if key := order.get("idempotency_key"):
            self._books.keys[key].append((str(job_id), job_id.created))

    def _pooled(self) -> None:
        rng = self._rng
        for _ in range(rng.randint(1, 4)):
            task = rng.choice(["fetch", "fetch", "crawl", "parse", "note"])
            args = {"kind": workflows.poison(rng, slow=self.slow)}
            drawn = rng.random()
            if drawn < POISON:
                task = "spoiled"
            elif drawn < POISON + NAPS:
                task = "nap"
            self._send(self._order(task, tasks.FEEDS, args=args))

    def _retried(self) -> None:
        rng = self._rng
        how = rng.choice(["raise", "retry", "snooze", "snooze"])
        args = {"how": how, "fails": rng.randint(1, 3)}
        task, most = rng.choice([("flaky", 4), ("shaky", 4), ("shaky", 4), ("hopeless", 3)])
        queue = rng.choice([tasks.NOTES, tasks.FEEDS, tasks.CALLS])
        self._send(self._order(task, queue, args=args, max_attempts=most, backoff=tasks.AGAIN_S))

    def _locked(self) -> None:
        rng = self._rng
        key = f"lock-{rng.randrange(LOCK_KEYS)}"
        for _ in range(rng.randint(1, 3)):
            queue = rng.choice(tasks.QUEUES)
            if rng.random() < 0.2:
                more = {"args": {"how": "retry", "fails": 1}, "max_attempts": 4}
                self._send(self._order("shaky", queue, lock_key=key, **more))
            else:
                task = rng.choice(["note", "fetch", "parse"])
                self._send(self._order(task, queue, lock_key=key))

    def _limited(self) -> None:
        partition = self._rng.choice(PARTITIONS)
        for _ in range(BURST):
            task = self._rng.choice(["fetch", "crawl", "note"])
            self._send(self._order(task, tasks.CALLS, partition_key=partition))

    def _metered(self) -> None:
        sent = [self._order("note", tasks.CALLS, partition_key=tasks.METERED) for _ in range(BURST)]
        for order, job_id in zip(sent, _enqueue_all(sent), strict=True):
            self._enter(order, job_id)

    def _bulk(self) -> None:
        """Queue jobs in bulk; the last repeats the first, and one may repeat an earlier order."""
        sent = [self._order("note", self._rng.choice(tasks.QUEUES)) for _ in range(BULK)]
        sent[0]["idempotency_key"] = f"bulk-{self._number}"
        sent += [sent[0], *([self._last_keyed] if self._last_keyed else ())]
        keys = {order["idempotency_key"] for order in sent if "idempotency_key" in order}
        try:
            ids = _enqueue_all(sent)
        except db.Error:
            self._books.unheard |= keys
            raise
        for order, job_id in zip(sent, ids, strict=True):
            self._enter(order, job_id)

    def _mixed(self) -> None:
        """Queue a job that kills a process, among others that are claimed with it."""
        queue = self._rng.choice([tasks.NOTES, tasks.NOTES, tasks.FEEDS])
        sent = [self._order("note", queue, args={"lasts_s": 0.5}) for _ in range(BURST)]
        kind = self._rng.choice(workflows.KILLERS if self.slow else workflows.KILLERS[:1])
        sent[2] = self._order("spoiled", queue, args={"kind": kind})
        for order, job_id in zip(sent, _enqueue_all(sent), strict=True):
            self._enter(order, job_id)

    def _stepped(self) -> None:
        self._send(self._order("stepped", self._rng.choice([tasks.NOTES, tasks.FEEDS])))

    def _streams(self) -> None:
        task = self._rng.choice([*stream_tasks.TASKS])
        self._send(self._order(task, self._rng.choice([tasks.NOTES, tasks.FEEDS])))

    def _waits(self) -> None:
        """Queue a job that waits for an event; send it two, before it waits or later."""
        order = self._order("waits", self._rng.choice([tasks.NOTES, tasks.FEEDS]))
        job_id = str(jobs.enqueue(**order))
        self._books.jobs[job_id] = order["task_name"]
        at = time.monotonic()
        for value in ("first", "second"):
            at += self._rng.uniform(0.0, 2.5)
            self._plan(at, lambda value=value: self._tell(job_id, order["args"]["number"], value))

    def _tell(self, job_id: str, number: int, value: str) -> None:
        """Repeat an event until a reply arrives."""
        try:
            if self._send_event(number, value):
                self._books.events[job_id].append(value)
        except db.Error:
            self._books.perhaps_sent.add(job_id)
            self._plan(time.monotonic() + 0.5, lambda: self._tell(job_id, number, value))

    def _send_event(self, number: int, value: str) -> bool:
        """Send an event, half of them in a transaction of the app."""
        if self._rng.random() < 0.5:
            return events.send(step_tasks.EVENT, key=number, value=value)
        with db.transaction() as conn:
            # A stranger may hold the same event.
            conn.execute("SET LOCAL lock_timeout = '0.3s'")
            return events.send(step_tasks.EVENT, key=number, value=value, conn=conn)

    def _undone(self) -> None:
        order = self._order("note", tasks.NOTES)
        with suppress(_Undone), db.transaction() as conn:
            self._books.undone.add(str(jobs.enqueue(**order, conn=conn)))
            raise _Undone

    def _keyed(self) -> None:
        """Request a job twice: at once on two connections, one after the other, or in plain SQL."""
        queue = self._rng.choice(tasks.QUEUES)
        order = self._order("note", queue, idempotency_key=f"key-{self._number}")
        how = self._rng.choice(["at once", "at once", "threads", "later", "sql"])
        if how == "sql":
            order["args"] = {}
        self._last_keyed = order
        if how in ("at once", "threads"):
            asyncio.run(self._ask_at_once(order, own=how == "at once"))
        elif how == "sql":
            self._ask_in_sql(order)
        again_s = self._rng.uniform(0.0, 3.0)
        self._plan(time.monotonic() + again_s, lambda: self._ask(order))
        if how == "later":
            self._plan(time.monotonic(), lambda: self._ask(order))
            self._plan(time.monotonic() + again_s, lambda: self._ask_for_another(order))

    def _ask(self, order: Order) -> None:
        """Repeat a request until a reply arrives."""
        try:
            self._send(order)
        except db.Error:
            self._books.unheard.add(order["idempotency_key"])
            self._plan(time.monotonic() + 0.5, lambda: self._ask(order))

    async def _ask_at_once(self, order: Order, *, own: bool) -> None:
        ask = self._ask_on_own if own else jobs.enqueue_async
        answers = await asyncio.gather(ask(**order), ask(**order), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, JobId):
                self._enter(order, answer)
            elif isinstance(answer, db.Error):
                self._books.unheard.add(order["idempotency_key"])
            else:
                assert isinstance(answer, BaseException)
                raise answer

    @staticmethod
    async def _ask_on_own(**order: Any) -> JobId:
        async with await psycopg.AsyncConnection.connect(db.db_url()) as conn:
            return await jobs.enqueue_async(**order, conn=conn)

    def _ask_in_sql(self, order: Order) -> None:
        key = order["idempotency_key"]
        self._books.unheard.add(key)  # until the reply to the commit
        with db.connection() as conn:
            row = conn.execute(_SQL, order).fetchone()
        self._books.unheard.discard(key)
        if row is not None:
            self._books.jobs[row["id"]] = order["task_name"]
            self._books.keys[key].append((row["id"], True))

    def _ask_for_another(self, order: Order) -> None:
        if order["idempotency_key"] not in self._books.keys:
            return
        try:
            jobs.enqueue(**{**order, "args": {"another": self._number}})
        except errors.IdempotencyClash:
            self._books.clashes += 1
        else:
            self._books.taken.append(order["idempotency_key"])

    def pause(self) -> None:
        """Pause a queue or a partition for a moment, and plan the next pause."""
        if not self._is_open():
            return
        rng = self._rng
        queue, partition = rng.choice(
            [(tasks.FEEDS, None), (tasks.CALLS, None), (tasks.CALLS, rng.choice(PARTITIONS))]
        )
        lasts_s = rng.uniform(0.5, 3.0)
        at = time.monotonic() + lasts_s
        place, asked = len(self._books.pauses), _database_now()
        until = asked + lasts_s + UNHEARD_S
        self._books.pauses.append(
            acknowledgements.Pause(queue, partition, asked, until, sure=False)
        )
        if rng.random() < 0.5:
            self._plan(at, lambda: self._resume(place))
            queues.pause(queue, partition=partition, by="soak")
            ends = float("inf")
        else:
            self._plan(at + rng.uniform(0.5, 1.5) * PAUSE_GAP_S, self.pause)
            lasts = timedelta(seconds=lasts_s)
            row = queues.pause(queue, partition=partition, until=lasts, by="soak")
            ends = row["paused_until"].timestamp()
        self._books.pauses[place] = acknowledgements.Pause(queue, partition, _database_now(), ends)

    def _resume(self, place: int) -> None:
        """Repeat until the database, which may be restarting, accepts it."""
        paused = self._books.pauses[place]
        try:
            if paused.until == float("inf"):
                paused = paused._replace(until=_database_now())
                self._books.pauses[place] = paused
            queues.resume(paused.queue, partition=paused.partition)
        except db.Error:
            self._plan(time.monotonic() + 0.3, lambda: self._resume(place))
            return
        gap_s = self._rng.uniform(0.5, 1.5) * PAUSE_GAP_S
        self._plan(time.monotonic() + gap_s, self.pause)


def _enqueue_all(sent: list[Order]) -> list[JobId]:
    return jobs.enqueue_many(cast("list[NewIngestJob]", sent))


def _database_now() -> float:
    with db.connection() as conn:
        row = conn.execute(_NOW).fetchone()
        assert row is not None
        return row["t"]
