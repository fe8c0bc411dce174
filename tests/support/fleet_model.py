"""Model the rows of a fleet in memory: runs, jobs and answers, one method per transition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

TERMINAL = ("completed", "failed", "cancelled")
DONE = ("completed", "skipped")
FRONT = 10
MAX_CRASHES = 3
MAX_TRIPS = 3
MAX_LAPSES = 10


class Node(NamedTuple):
    """A node of a graph: `work`, `skip` or `input`, and what it waits for."""

    kind: str
    queue: str
    deps: tuple[str, ...]


@dataclass(eq=False)
class Job:
    """A job of either family; `run` is None for ingest."""

    queue: str
    priority: int
    run: Run | None = None
    node: str = ""
    max_attempts: int = 1
    generation: int = 0
    id: str = ""
    seq: int = 0
    status: str = "queued"
    worker: str | None = None
    claim_no: int = 0
    attempts: int = 0
    crashes: int = 0
    lapses: int = 0
    """How often in a row nobody has recorded how its claim ended."""
    trips: int = 0
    asked: bool = False
    """Its end was requested while it ran."""
    waits: bool = False
    """It is not due yet."""
    due: bool = False
    """Its time has come, and nobody has let it in."""
    lapsed: bool = False
    quiet: bool = False
    """It has not been renewed for long."""
    gone: bool = False

    def facts(self) -> tuple[object, ...]:
        """Return what the row must contain."""
        return (
            self.status, self.worker, self.claim_no, self.attempts, self.crashes, self.lapses,
            self.trips, self.generation, self.priority, self.asked, self.waits, self.max_attempts,
        )  # fmt: skip

    def is_held(self, worker: str, claim_no: int) -> bool:
        mine = (self.status, self.worker, self.claim_no) == ("running", worker, claim_no)
        return mine and not self.gone

    @property
    def asks(self) -> bool:
        """Return whether it is the job of an input node."""
        return self.run is not None and self.run.graph[self.node].kind == "input"

    @property
    def over(self) -> bool:
        return self.asked or (self.run is not None and self.run.status in TERMINAL)

    def become(self, status: str) -> None:
        """Enter any state but running; finishing or parking a node adds its event."""
        if self.status == "running":
            self.lapses = 0
        self.status, self.worker, self.lapsed, self.quiet = status, None, False, False
        self.waits = self.due = False
        if self.run is not None and status in ("completed", "failed", "awaiting_input"):
            self.run.open.append((self.node, status))

    def claim(self, worker: str) -> None:
        self.status, self.worker, self.claim_no = "running", worker, self.claim_no + 1

    def fail(self) -> None:
        self.attempts += 1
        if self.over:
            self.become("cancelled")
        elif self.attempts < self.max_attempts:
            self.become("queued")
            self.waits = True
        else:
            self.become("failed")

    def park(self) -> None:
        self.become("cancelled" if self.over else "awaiting_input")

    def back(self, *, front: bool = False) -> None:
        """Return to the queue, uncounted, after being handed back or taken back."""
        self.become("cancelled" if self.over else "queued")
        if front:
            self.priority = min(self.priority, FRONT)

    def trip(self) -> None:
        again = self.run is not None and self.trips < MAX_TRIPS
        self.trips += 1
        self.become("cancelled" if self.over else "queued" if again else "failed")
        if again:
            self.priority = min(self.priority, FRONT)

    def crash(self) -> None:
        first = self.crashes == 0
        self.crashes += not self.over
        poison = self.crashes >= MAX_CRASHES
        self.become("cancelled" if self.over else "failed" if poison else "queued")
        if first:
            self.priority = min(self.priority, FRONT)
        self.waits = self.status == "queued" and not first

    def lapse(self) -> None:
        before, over = self.lapses, self.over
        poison = before + 1 >= MAX_LAPSES
        self.become("cancelled" if over else "failed" if poison else "queued")
        self.lapses = 0 if over else before + 1
        if not before:
            self.priority = min(self.priority, FRONT)
        self.waits = self.status == "queued" and before > 0

    def reopen(self, generation: int, priority: int) -> None:
        self.become("queued")
        self.attempts = self.crashes = self.lapses = self.trips = 0
        self.asked = False
        self.generation, self.priority, self.seq = generation, priority, 0


@dataclass(eq=False)
class Run:
    """A run of a graph, its jobs by node, and the events of it that nobody has dispatched."""

    id: str
    graph: dict[str, Node]
    priority: int
    status: str = "queued"
    generation: int = 0
    started: bool = False
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    open: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def live(self) -> bool:
        return self.status == "running"

    def facts(self) -> tuple[object, ...]:
        return self.status, self.generation, self.priority, self.started

    def is_done(self, node: str) -> bool:
        return node in self.jobs and self.jobs[node].status in DONE

    def state(self, node: str) -> str | None:
        return self.jobs[node].status if node in self.jobs else None

    def asking(self) -> list[str]:
        """Return the nodes that wait for a person."""
        return [node for node in self.jobs if self.state(node) == "awaiting_input"]

    def downstream(self, nodes: Collection[str]) -> list[str]:
        return [name for name, spec in self.graph.items() if not {*nodes}.isdisjoint(spec.deps)]

    def end(self, status: str) -> None:
        """End the run, and what waits in it."""
        self.status = status
        for job in self.jobs.values():
            if job.status in ("queued", "awaiting_input"):
                job.become("cancelled")

    def start(self) -> None:
        if self.status == "queued":
            self.status, self.started = "running", True
            self.advance(None)

    def advance(self, finished: Collection[str] | None) -> None:
        """Queue what these nodes have made ready (None: all that is), and end the run if it is."""
        todo = [*self.graph] if finished is None else self.downstream(finished)
        while todo:
            skipped = [node for node in todo if self._is_ready(node) and self._make(node)]
            todo = self.downstream(skipped)
        if all(map(self.is_done, self.graph)):
            self.end("completed")

    def _is_ready(self, node: str) -> bool:
        job = self.jobs.get(node)
        free = job is None or (
            job.status in ("failed", "cancelled") and job.generation < self.generation
        )
        return free and all(map(self.is_done, self.graph[node].deps))

    def _make(self, node: str) -> bool:
        """Create the node; return whether it is skipped."""
        spec = self.graph[node]
        job = self.jobs.setdefault(node, Job(spec.queue, self.priority, self, node))
        job.reopen(self.generation, self.priority)
        if spec.kind == "skip":
            job.status = "skipped"
        return spec.kind == "skip"

    def drain(self, *, nowait: bool = False) -> None:
        """Dispatch the open events; `nowait`: input nodes stay open."""
        events, self.open = self.open, []
        failed = [node for node, kind in events if kind == self.state(node) == "failed"]
        if self.status == "queued":
            failed = [node for node in failed if self.jobs[node].generation == self.generation]
        if self.status in TERMINAL:
            return
        if failed:
            self.end("failed")
            return
        parked = [e for e in events if e[1] == self.state(e[0]) == "awaiting_input"]
        finished = [node for node, kind in events if kind == "completed" and self.is_done(node)]
        if self.live and finished:
            self.advance(finished)
        self.open = parked if nowait else []

    def cancel(self) -> bool:
        if self.status in TERMINAL:
            return False
        self.end("cancelled")
        return True

    def reopen(self) -> None:
        """Queue a failed or cancelled run again; nobody requests the end of what still runs."""
        self._queue(1)

    def reopen_from(self, node: str) -> None:
        again = self.from_node(node)
        self._queue(2)
        for name in again & {*self.jobs}:
            job = self.jobs[name]
            job.become("cancelled")
            job.generation = self.generation - 1

    def _queue(self, generations: int) -> None:
        self.status = "queued"
        self.generation += generations
        for job in self.jobs.values():
            if job.status == "running":
                job.asked = False

    def from_node(self, node: str) -> set[str]:
        found, todo = {node}, [node]
        while todo:
            following = {*self.downstream([todo.pop()])} - found
            found |= following
            todo += following
        return found


@dataclass(eq=False)
class Answer:
    """A person's answer to a node."""

    run: Run
    node: str
    status: str = "pending"
    due: bool = True

    def take(self) -> None:
        """Take the answer as the listener does."""
        state = self.run.state(self.node)
        if state in ("queued", "running"):
            self.due = False
        elif state == "awaiting_input":
            self.status = "processed"
            self.run.jobs[self.node].become("completed")
            self.run.drain(nowait=True)
        else:
            self.status = "failed"


class Off(NamedTuple):
    """An OFF row: its policy, and whether its time is over."""

    policy: str
    ended: bool


class Fleet:
    """Everything there is."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.ingest: list[Job] = []
        self.answers: list[Answer] = []
        self.off: dict[tuple[str, str], Off] = {}

    @property
    def jobs(self) -> list[Job]:
        nodes = [job for run in self.runs for job in run.jobs.values()]
        return nodes + self.ingest

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.status == "running"]

    def policy(self, host: str, queue: str) -> str | None:
        """Return how the workers of a host and queue must stop now; None: they are ON."""
        rows = [self.off.get((host, name)) for name in (queue, "all")]
        policies = [row.policy for row in rows if row and not row.ended]
        return "hard" if "hard" in policies else next(iter(policies), None)

    def next(self, host: str, queue: str, *, newest: bool = False, promote: bool) -> Job | None:
        """Return the job that a worker there would claim."""
        if self.policy(host, queue) is not None:
            return None
        waiting = [job for job in self.jobs if (job.status, job.queue) == ("queued", queue)]
        if promote:
            self.promote(waiting)
        able = [job for job in waiting if not job.waits and not job.over]
        band = [job for job in able if job.priority == min(job.priority for job in able)]
        return sorted(band, key=lambda job: job.seq, reverse=newest)[0] if band else None

    def promote(self, jobs: Collection[Job]) -> None:
        for job in jobs:
            if job.due:
                job.waits = job.due = False

    def work(self, *, runs: bool = True, inputs: bool = True, events: bool = True) -> None:
        """Do what an orchestrator does when it checks all of these."""
        for run in self.runs if runs else ():
            run.start()
        for answer in self.answers if inputs else ():
            if answer.status == "pending" and answer.due:
                answer.take()
        for run in self.runs if events else ():
            if run.open:
                run.drain()

    def in_flight(self, run: Run, node: str) -> bool:
        return any((a.run, a.node, a.status) == (run, node, "pending") for a in self.answers)
