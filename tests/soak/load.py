"""Submit the load as apps and people do, at a rate that does not wait for the fleet."""

from __future__ import annotations

import heapq
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

from queue_workflows import db, errors, jobs, run_store, runs
from tests.soak import (
    acknowledgements,
    background,
    growing_workflows,
    job_load,
    rare_load,
    tasks,
    workflows,
)

NEVER_ANSWERED = 0.03
POISON = 0.05
_WAITING = """
SELECT run_id, node_id FROM workflow_node_jobs WHERE status = 'awaiting_input' AND run_id = ANY (%s)
"""
_LATE = (
    "UPDATE workflow_node_jobs SET status = 'queued' WHERE id = (SELECT id FROM workflow_node_jobs"
    " WHERE status IN ('completed', 'failed', 'cancelled') ORDER BY random() LIMIT 1)"
    " RETURNING id || ': a job that was over is queued again' AS moved",
    "UPDATE workflow_runs SET status = 'running' WHERE id = (SELECT id FROM workflow_runs"
    " WHERE status IN ('completed', 'cancelled', 'failed') ORDER BY random() LIMIT 1)"
    " RETURNING id || ': a run that was over runs again' AS moved",
    "UPDATE ingest_jobs SET status = 'completed' WHERE id = (SELECT id FROM ingest_jobs"
    " WHERE status = 'failed' ORDER BY random() LIMIT 1)"
    " RETURNING id || ': a job that had failed is completed' AS moved",
)
_CANCEL = (
    "UPDATE workflow_runs SET status = 'cancelled', finished_at = now()"
    " WHERE id = %s AND status IN ('queued', 'running') RETURNING id"
)


class Load(background.BackgroundThread):
    """Submits until `close`; the bot that answers, and the late writers, go on until the end."""

    def __init__(
        self,
        seed: int,
        *,
        runs_s: float,
        jobs_s: float,
        orders_s: float,
        twice: float = 0.5,
        weights: Mapping[str, int] | None = None,
        kinds: Mapping[str, int] | None = None,
        slow: bool = True,
    ) -> None:
        super().__init__("load")
        self.books = acknowledgements.Acknowledgements()
        self.problems: list[str] = []
        self._rng = random.Random(seed)
        self._twice, self._slow = twice, slow
        self._weights = workflows.WEIGHTS | dict(weights or {})
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._open = True
        self._orders = job_load.JobLoad(
            seed, self.books, self._plan, lambda: self._open, kinds or {}, slow=slow
        )
        self._rare = rare_load.RareLoad(seed, self.books)
        self._rates: list[tuple[float, Callable[[], None]]] = [
            (runs_s, self._submit_run),
            (jobs_s, self._submit_job),
            (orders_s, self._orders.place),
        ]

    def go(self, stop: threading.Event) -> None:
        now = time.monotonic()
        for rate, submit in self._rates:
            self._plan(now, lambda rate=rate, submit=submit: self._again(rate, submit))
        self._plan(now, self._answer)
        self._plan(now, self._write_late)
        self._plan(now + job_load.PAUSE_GAP_S, self._orders.pause)
        for gap_s, act in (
            (rare_load.CROWD_GAP_S, self._rare.crowd),
            (rare_load.RETRY_GAP_S, self._rare.retry),
            (rare_load.LARGE_GAP_S, self._rare.large),
        ):
            self._plan(now + gap_s / 4, lambda gap_s=gap_s, act=act: self._each(gap_s, act))
        while not stop.is_set():
            at, _, act = self._agenda[0]
            if stop.wait(max(0.0, at - time.monotonic())):
                return
            heapq.heappop(self._agenda)
            try:
                act()
            except db.Error:
                pass
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")

    def calm(self) -> None:
        """Submit no handler any more that is poison late: all is over soon after `close`."""
        self._slow = self._orders.slow = False

    def close(self) -> None:
        """Submit and cancel nothing more."""
        self._open = False

    def _plan(self, at: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (at, self._number, act))

    def _again(self, rate: float, submit: Callable[[], None]) -> None:
        if self._open:
            wait_s = self._rng.expovariate(rate)
            self._plan(time.monotonic() + wait_s, lambda: self._again(rate, submit))
            submit()

    def _each(self, gap_s: float, act: Callable[[], None]) -> None:
        if self._open:
            self._plan(time.monotonic() + gap_s, lambda: self._each(gap_s, act))
            act()

    def _submit_run(self) -> None:
        rng = self._rng
        run_id = str(uuid.UUID(int=rng.getrandbits(128)))
        name = rng.choices(list(self._weights), list(self._weights.values()))[0]
        if rng.random() < POISON:
            name = workflows.poison(rng, slow=self._slow)
        cancel_s = rng.uniform(0.05, 1.5)
        by_hand = rng.random() < 0.5
        cancelled = rng.random() < (0.5 if name == "wide" else 0.05)
        kind = rng.choice([*growing_workflows.KINDS])
        context = {"skip": rng.random() < 0.5, "kind": kind}
        run_store.insert_run(run_id=run_id, workflow_name=name, context=context)
        self.books.runs[run_id] = name
        if cancelled:
            at = time.monotonic() + cancel_s
            self._plan(at, lambda: self._cancel(run_id, by_hand=by_hand))

    def _submit_job(self) -> None:
        task, args = (
            "note",
            {"number": self._number, "kind": workflows.poison(self._rng, slow=self._slow)},
        )
        if self._rng.random() < POISON:
            task = "spoiled"
        job_id = jobs.enqueue(task_name=task, queue=tasks.NOTES, reason="load", args=args)
        self.books.jobs[job_id] = task

    def _cancel(self, run_id: str, *, by_hand: bool) -> None:
        if not self._open:
            return
        self.books.perhaps_cancelled.add(run_id)
        if by_hand:
            with db.connection() as conn:
                done = conn.execute(_CANCEL, (run_id,)).fetchone() is not None
        else:
            done = runs.cancel(run_id) is not None
        with db.connection() as conn:
            row = conn.execute(
                "SELECT extract(epoch FROM clock_timestamp())::float8 AS t"
            ).fetchone()
        if done and row is not None:
            self.books.cancelled[run_id] = row["t"]

    def _answer(self) -> None:
        self._plan(time.monotonic() + 0.25, self._answer)
        with db.connection() as conn:
            rows = conn.execute(_WAITING, ([*self.books.runs],)).fetchall()
        waiting = [(row["run_id"], row["node_id"]) for row in rows]
        for where in sorted(waiting):
            if where in self.books.answers or where in self.books.never_answered:
                continue
            if where in self.books.perhaps_answered:
                self._say_again(where)
                continue
            if self._rng.random() < NEVER_ANSWERED:
                self.books.never_answered.add(where)
                continue
            first, second = f"first-{self._number}", f"second-{self._number}"
            if self._rng.random() >= self._twice:
                self._say(where, first)
            elif self._rng.random() < 0.5:
                self._say(where, first)
                self._say(where, second)
            else:
                self._say(where, first, second)

    def _say(self, where: tuple[str, str], *values: str) -> None:
        """Submit two answers in one transaction, so that nobody has taken the first yet."""
        accepted: list[str] = []
        try:
            with db.transaction() as conn:
                for value in values:
                    try:
                        runs.answer(*where, value, conn=conn)
                        accepted.append(value)
                    except errors.InputRefused:
                        self.books.refused += 1
        except db.Error:
            self.books.perhaps_answered.add(where)
        else:
            if accepted:
                self.books.answers.setdefault(where, []).extend(accepted)

    def _say_again(self, where: tuple[str, str]) -> None:
        """Repeat answers that may have been lost while the database was away."""
        with db.transaction() as conn, suppress(errors.InputRefused):
            runs.answer(*where, f"again-{self._number}", conn=conn)

    def _write_late(self) -> None:
        """Write to terminal rows as an app might: the triggers refuse it."""
        if not self._open or self.books.moved:
            return
        self._plan(time.monotonic() + 1.0, self._write_late)
        for statement in _LATE:
            self.books.late_writes += 1
            with suppress(db.Error), db.connection() as conn:
                row = conn.execute(statement.encode()).fetchone()
                if row is not None:
                    self.books.moved.append(row["moved"])
