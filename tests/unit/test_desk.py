"""The worker's decisions against every order of replies, losses, deaths, signals and times."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import psycopg
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from queue_workflows import db
from queue_workflows.claim import claims, outcomes
from queue_workflows.db import link, statements
from queue_workflows.run import executors
from queue_workflows.types import JsonDict
from queue_workflows.worker import claimed_job, desk, job_logs, leases, queue_state, shapes
from tests.support import examples

TABLE = "ingest_jobs"
QUEUES = ("fetch", "load")
LEASE_S = 30.0
CRASHES, LAPSES = 3, 10
"""With so many crashes, or lapses in a row, a job is poison."""
OPEN = ("queued", "running")
EVENTS = [
    *6 * ["go_on"], *4 * ["enqueue"], *3 * ["handler_ends", "handler_is_done", "lose"],
    *2 * ["talk", "send", "execute", "answer", "time_passes", "executor_dies", "lapse", "reopen"],
    "read", "lock", "unlock", "cancel", "switch", "refuse", "server_goes_on", "turn", "ask",
    "signals_arrive", "prints", "freezes", "sweep", "throttle", "requeue", "stop", "launcher_dies",
]  # fmt: skip


class Refused(psycopg.Error):
    """A statement that the database refuses."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__("refused")
        self.sqlstate = sqlstate


class Passing(Refused, psycopg.OperationalError):
    """A statement that may succeed later."""


REFUSALS = [
    Passing("40P01"),
    Passing("25006"),
    Passing("57014"),
    Refused("22003"),
    Refused("54000"),
]


class FakeDatabase:
    """The jobs of the queues, and the statements that a worker sends about them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rows: dict[str, dict[str, Any]] = {}
        self.locked: set[str] = set()
        """Jobs whose rows a stranger has locked."""
        self.left_to_leases: set[str] = set()
        """Jobs of which a worker need not know: locked once, or claimed after a reply was lost."""
        self.off: dict[str, str] = {}
        """The stop policies of the queues that are OFF."""
        self.promised: set[tuple[str, int]] = set()
        """Claims whose results must be recorded: the handler has completed and nobody else ended
        the claim."""

    def add(self, queue: str, crashes: int = 0, lapses: int = 0) -> None:
        job_id = f"j{len(self.rows)}"
        self.rows[job_id] = {
            "queue": queue,
            "status": "queued",
            "claim": 0,
            "worker": None,
            "expires": 0.0,
            "due": 0.0,
            "cancel": False,
            "ends": [],
            "crashes": crashes,
            "lapses": lapses,
            "deaths": crashes,
        }

    @property
    def claims(self) -> set[tuple[str, int]]:
        """Return the claims that a worker holds."""
        return {(job, row["claim"]) for job, row in self.rows.items() if row["worker"]}

    def lapse(self, job_id: str) -> None:
        """Take a claim back, of which nobody knows what became."""
        row = self.rows[job_id]
        if row["status"] == "running" and job_id not in self.locked:
            self.promised.discard((job_id, row["claim"]))
            row["lapses"] += 1
            row.update(status="failed" if row["lapses"] >= LAPSES else "queued", worker=None)
            self.end_cancelled(row)

    def sweep(self) -> None:
        """Take back what was not renewed in time."""
        for job_id, row in self.rows.items():
            if row["expires"] < self.now:
                self.lapse(job_id)

    def cancel(self, job_id: str) -> None:
        """Cancel a job, whose handler must end first if it runs."""
        self.rows[job_id]["cancel"] = True
        self.end_cancelled(self.rows[job_id])

    def end_cancelled(self, row: dict[str, Any]) -> None:
        if row["cancel"] and row["status"] == "queued":
            row["status"] = "cancelled"

    def demand(self, *job_ids: str) -> None:
        """Refuse a statement that would have to wait for a lock."""
        if self.locked.intersection(job_ids):
            raise Refused(desk.LOCKED)

    def held(self, job_id: str, claim: int) -> bool:
        row = self.rows[job_id]
        return row["status"] == "running" and bool(row["worker"]) and row["claim"] == claim

    def end(self, job_id: str, claim: int, status: str) -> bool:
        if not self.held(job_id, claim):
            return False
        row = self.rows[job_id]
        assert claim not in [each for each, _ in row["ends"]], "two ends of one claim"
        row["ends"].append((claim, status))
        row.update(status=status, worker=None, lapses=0)
        self.end_cancelled(row)
        return True

    def run(self, script: db.Script[Any]) -> Any:
        try:
            statement = next(script)
            while True:
                try:
                    rows = self.answer(statement)
                except psycopg.Error as error:
                    statement = script.throw(error)
                else:
                    statement = script.send(rows)
        except StopIteration as end:
            return end.value

    def answer(self, statement: db.Statement) -> list[Any]:
        known = statements
        answers: dict[bytes, Callable[[Any], list[Any]]] = {
            known.claims.ingest_rows.text: self._step,
            known.claims.renew[TABLE].text: self._renew,
            known.claims.has_recorded["ingest_jobs"].text: self._recorded,
            known.job_steps.begin[TABLE].text: self._begin_step,
            known.claim_isolation.claimable[TABLE].text: lambda given: [
                {"id": job} for job in self._claimable(given)
            ],
            known.claim_isolation.fail[TABLE].text: self._fail,
            known.controls.off_policy.text: lambda given: [
                {"policy": self.off.get(given["queue"])}
            ],
            known.attempts.policy[TABLE].text: lambda _: [
                {"policy": None, "attempts": 0, "max_attempts": 1}
            ],
            known.attempts.fail[TABLE].text: self._fail,
            known.attempts.end_by_watchdog[TABLE].text: self._fail,
            known.handback.hand_back[TABLE].text: self._hand_back,
            known.handback.strays[TABLE].text: self._strays,
            known.recovery.count_crash[TABLE].text: self._count_crash,
        }
        answer = answers.get(statement.text)
        return [] if answer is None else answer(statement.parameters)

    def _fail(self, given: Any) -> list[Any]:
        self.demand(given["job"])
        done = self.end(given["job"], given["claim"], "failed")
        return [{"status": "failed", "id": given["job"]}] if done else []

    def _hand_back(self, given: Any) -> list[Any]:
        pairs = [*zip(given["jobs"], given["claims"], strict=True)]
        self.demand(*(job for job, claim in pairs if self.held(job, claim)))
        ended = [job for job, claim in pairs if self.end(job, claim, "queued")]
        for job in ended:
            self.rows[job]["due"] = self.now + given["after_s"]
        return [{"id": job} for job in ended]

    def _strays(self, given: Any) -> list[Any]:
        return [
            {"id": job, "worker_id": row["worker"], "claim_no": row["claim"]}
            for job, row in self.rows.items()
            if row["worker"] == given["worker"] and job not in self.locked
        ]

    def _recorded(self, given: Any) -> list[Any]:
        ends = self.rows[given["job"]]["ends"]
        return [{}] if given["claim"] in [claim for claim, _ in ends] else []

    def _begin_step(self, given: Any) -> list[Any]:
        held = self.held(given["job"], given["claim"])
        return [{"state": None, "held": held, "attempts": 1, "position": 0}]

    def _count_crash(self, given: Any) -> list[Any]:
        pairs = zip(given["jobs"], given["claims"], strict=True)
        held = [job for job, claim in pairs if self.held(job, claim)]
        self.demand(*held)
        return [self._crashed(job) for job in held]

    def _crashed(self, job_id: str) -> dict[str, Any]:
        row = self.rows[job_id]
        row["crashes"] += 1
        status = "failed" if row["crashes"] >= CRASHES else "queued"
        self.end(job_id, row["claim"], status)
        return {"id": job_id, "status": row["status"], "heartbeat_at": None, "progress": None,
                "attempts": 0, "claim_no": row["claim"], "queue": row["queue"]}  # fmt: skip

    def _renew(self, given: Any) -> list[Any]:
        found: list[Any] = []
        for job, claim in zip(given["jobs"], given["claims"], strict=True):
            row = self.rows[job]
            if self.held(job, claim) and row["worker"] == given["worker"]:
                if renewed := job not in self.locked:
                    row["expires"] = self.now + given["lease_s"]
                found.append(
                    {"id": job, "claim_no": claim, "cancel": row["cancel"], "renewed": renewed}
                )
        return found

    def _step(self, given: Any) -> list[Any]:
        done = json.loads(given["done"]) if given["done"] else []
        self.demand(*(each["id"] for each in done))
        if not all(self.held(each["id"], each["claim_no"]) for each in done):
            raise Refused(claims.CLAIM_LOST)
        for each in done:
            self.end(each["id"], each["claim_no"], "completed")
        return [self._row(job) for job in self._claim(given, given["claim"])]

    def _claimable(self, given: Any) -> list[str]:
        return [
            job_id
            for job_id, row in self.rows.items()
            if row["status"] == "queued" and row["due"] <= self.now
            and job_id not in self.locked
            and row["queue"] == given["queue"] and given["queue"] not in self.off
        ]  # fmt: skip

    def _claim(self, given: Any, most: int) -> list[str]:
        only = given["only"]
        found = [job for job in self._claimable(given) if only in (None, job)][:most]
        for row in map(self.rows.__getitem__, found):
            claim, expires = row["claim"] + 1, self.now + given["lease_s"]
            row.update(status="running", worker=given["worker"], claim=claim, expires=expires)
        return found

    def _row(self, job_id: str) -> tuple[bytes | None, ...]:
        row = self.rows[job_id]
        texts = (job_id, row["claim"], row["crashes"], None, "task")
        head = [None if each is None else str(each).encode() for each in texts]
        lapses = str(row["lapses"]).encode()
        return (*head, None, None, None, None, b"{}", None, None, lapses)


class FakeLink:
    """A connection: what is sent, executed and answered are three events."""

    def __init__(self, data: FakeDatabase, source: link.Source) -> None:
        self.data, self.source = data, source
        self.request: link.Request | None = None
        self.reply: tuple[Any, psycopg.Error | None] | None = None
        self.is_open = True

    @property
    def idle(self) -> bool:
        return self.request is None and self.is_open

    @property
    def executing(self) -> bool:
        return self.request is not None and self.reply is None

    def send(self) -> None:
        self.request, self.reply = self.source.next(), None

    def execute(self, refused: psycopg.Error | None = None) -> None:
        assert self.request is not None
        if refused is not None:
            self.reply = None, refused
            if not isinstance(refused, Passing):
                self.data.promised.clear()  # a result of these may be what it refuses
            return
        try:
            self.reply = self.data.run(self.request.script), None
        except psycopg.Error as error:
            self.reply = None, error

    def answer(self) -> None:
        assert self.reply is not None
        request, (result, error) = self.taken(), self.reply
        if error is not None:
            request.refused(error)
        else:
            request.done(result)

    def taken(self) -> link.Request:
        request, self.request = self.request, None
        assert request is not None
        return request

    def lose(self) -> None:
        self.is_open = False
        self.source.disconnected()
        if self.request is not None:
            self.taken().lost()

    def reopen(self) -> None:
        self.is_open = True
        self.source.connected()


class FakePlace:
    """An executor, and what it has sent that the worker has not read yet."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.jobs: dict[int, claimed_job.ClaimedJob] = {}
        self.running: dict[int, claimed_job.ClaimedJob] = {}
        """Its jobs whose handlers have not ended."""
        self.sent: list[tuple[int, outcomes.Outcome]] = []
        self.told: set[int] = set()
        self.signals: set[int] = set()
        self.killed_for = ""
        self.is_dead = False


class FakeRunner:
    """Executors of one queue: two with one job each, or one with two jobs."""

    gives_back = False
    accepts = True

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.places: list[FakePlace] = []
        self.others: list[FakeRunner] = [self]
        """The executors of all queues of the worker."""
        self.started = self.asked = 0
        self.open_questions: set[int] = set()

    @property
    def room(self) -> int:
        if self.shared:
            blocked = any(each.signals for each in self.places)
            return 0 if blocked else 2 - sum(len(each.jobs) for each in self.places)
        return 2 - len(self.places)

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        del isolated, shared
        running = [
            each for one in self.others for place in one.places for each in place.running.values()
        ]
        assert all(job.id != other.id for other in running), "it runs twice at once"
        alone = any(each.crash_count == 2 or each.lapse_count == 9 for each in [job, *running])
        assert not (running and alone), "a death would be the last of a neighbour"
        if not (self.shared and self.places):
            self.places.append(FakePlace(shared=self.shared))
        job.place = place = self.places[-1]
        self.started += 1
        job.key = self.started
        place.jobs[job.key] = place.running[job.key] = job

    def catch_up(self) -> None:
        """Nothing is unread."""

    def interrupt(self, job: Any, reason: str) -> None:
        del reason
        if job.place is not None:
            job.place.told.add(job.key)

    def recorded(self, job: Any, found: object) -> None:
        del job, found

    def answer(self, place: Any, number: int, answer: JsonDict) -> None:
        del place, answer
        self.open_questions.remove(number)  # once each

    def kill(self, place: FakePlace, signum: int, why: str) -> None:
        place.signals.add(signum)
        place.killed_for = place.killed_for or why

    def kill_idle(self, why: str) -> None:
        del why


class Worker(RuleBasedStateMachine):
    """A worker's desk and leases with two queues, whose events come in any order."""

    @initialize(shared=st.booleans(), ends_with_job=st.booleans(), known=st.booleans())
    def begin(self, shared: bool, ends_with_job: bool, known: bool) -> None:
        self.named = mock.patch.object(db, "describe", return_value="here")
        self.named.start()
        self.data = FakeDatabase()
        self.late: list[db.Script[Any]] = []
        """What a server goes on with whose client is gone."""
        self.hold = math.inf
        """When the launcher ends all executors."""
        self.requeues = self.requeued = self.refused = 0
        logs = job_logs.JobLogs(lambda _: None, self.clock)
        self.desk = desk.Desk(
            lambda: None,
            lambda _: None,
            logs,
            ends_with_job=ends_with_job,
            is_known=False,
            now_fn=self.clock,
        )
        self.runners = [FakeRunner(shared=shared and queue == "fetch") for queue in QUEUES]
        for number, (queue, runner) in enumerate(zip(QUEUES, self.runners, strict=True)):
            runner.others = self.runners
            who = claims.Claimant(f"w:1:0:ex-{number}", "host", queue, LEASE_S)
            shape: Any = shapes.Shape(2, concurrent=runner.shared)
            self.desk.queues.append(queue_state.Queue(who, shape, runner))  # type: ignore[arg-type]
        self.leases = leases.Leases(
            self.desk, logs, hold=self.move, ring=lambda: None, report=self.report,
            now_fn=self.clock,
        )  # fmt: skip
        self.links = [FakeLink(self.data, self.desk), FakeLink(self.data, self.leases)]
        for _ in range(4 * known):
            self.talk(1)

    def clock(self) -> float:
        return self.data.now

    def move(self, until: float) -> bool:
        self.hold = until
        return True

    def report(self) -> JsonDict:
        return {"columns": {}}

    @property
    def places(self) -> list[tuple[FakeRunner, FakePlace]]:
        return [(runner, place) for runner in self.runners for place in runner.places]

    @property
    def jobs(self) -> list[claimed_job.ClaimedJob]:
        return self.desk.jobs

    @rule(what=st.sampled_from(EVENTS), n=st.integers(0, 63))
    def happens(self, what: str, n: int) -> None:
        """Let one thing happen; `n` says which of those that are possible.

        One rule for all: hypothesis leaves out most rules of a machine in most examples.
        """
        getattr(self, what)(n)

    # --- Jobs and their rows.

    def enqueue(self, n: int) -> None:
        queue = QUEUES[n % 2]
        for number in range(1 + n // 2 % 4):
            last = n // 8 if not number else 0
            self.data.add(queue, crashes=(0, 2, 1)[last % 3], lapses=9 if last == 3 else 0)
        if n % 3 and self.links[0].is_open:
            self.desk.notified("ingest_job_ready", queue)

    def lapse(self, n: int) -> None:
        if jobs := self.jobs:
            self.data.lapse(jobs[n % len(jobs)].id)

    def cancel(self, n: int) -> None:
        wanted = [job for job, row in self.data.rows.items() if row["status"] in OPEN]
        job_id = wanted[n % len(wanted)] if wanted else ""
        if wanted and job_id not in self.data.locked:
            self.data.cancel(job_id)
            if n % 3 and self.links[1].is_open:
                self.leases.notified("job_cancel", job_id)

    def lock(self, n: int) -> None:
        if wanted := [job for job, row in self.data.rows.items() if row["status"] in OPEN]:
            self.data.locked.add(wanted[n % len(wanted)])
            self.data.left_to_leases |= self.data.locked

    def unlock(self, _: int) -> None:
        self.data.locked.clear()

    def switch(self, n: int) -> None:
        queue = QUEUES[n % 2]
        policy = ("hard", "drain", None, None)[n // 2 % 4]
        self.data.off.pop(queue, None)
        if policy is not None:
            self.data.off[queue] = policy
        if n % 3 and self.links[1].is_open:
            self.leases.notified("worker_control", f"host:{queue}")

    # --- Connections.

    def send(self, n: int) -> None:
        if self.links[n % 2].idle:
            self.links[n % 2].send()

    def execute(self, n: int) -> None:
        if self.links[n % 2].executing:
            self.links[n % 2].execute()

    def answer(self, n: int) -> None:
        if self.links[n % 2].reply is not None and self.links[n % 2].request is not None:
            self.links[n % 2].answer()

    def talk(self, n: int) -> None:
        """Send, execute and answer without anything between."""
        self.send(n)
        self.execute(n)
        self.answer(n)

    def go_on(self, n: int) -> None:
        """Let nothing fail for a moment."""
        for _ in range(1 + n % 4):
            self.pass_time(0.1)
            self.turn(n)
            self.talk(1)
            self.talk(0)

    def refuse(self, n: int) -> None:
        if self.links[n % 2].executing:
            self.refused += 1
            self.links[n % 2].execute(REFUSALS[n // 2 % len(REFUSALS)])

    def lose(self, n: int) -> None:
        """Lose a connection; the server may execute what it has received later."""
        own = self.links[n % 2]
        if own.is_open:
            if own.executing and n // 2 % 2 and own.request is not None:
                self.late.append(own.request.script)
            own.lose()
            if n // 4 % 2:
                own.reopen()

    def reopen(self, n: int) -> None:
        if not self.links[n % 2].is_open:
            self.links[n % 2].reopen()

    def server_goes_on(self, _: int) -> None:
        if self.late:
            before = self.data.claims
            # What would follow this statement of a script was never sent.
            statement = next(self.late.pop(0), None)
            with contextlib.suppress(psycopg.Error):
                if statement is not None:
                    self.data.answer(statement)
            self.data.left_to_leases |= {job for job, _ in self.data.claims - before}

    # --- Executors.

    def handler_ends(self, n: int) -> None:
        running = [(place, key) for _, place in self.places for key in place.running]
        if running:
            place, key = running[n % len(running)]
            kind = ("completed", "completed", "failed", "cancelled")[n // 8 % 4]
            if kind != "cancelled" or key in place.told:
                del place.running[key]
                place.sent.append((key, outcomes.Outcome(kind, 0.001)))

    def read(self, n: int) -> None:
        """Read an outcome that an executor has sent."""
        if wanted := [each for each in self.places if each[1].sent]:
            self.take(*wanted[n % len(wanted)])

    def handler_is_done(self, n: int) -> None:
        """Let a handler end, and read its outcome at once."""
        self.handler_ends(n)
        self.read(n)

    def take(self, runner: FakeRunner, place: FakePlace) -> None:
        key, outcome = place.sent.pop(0)
        job = place.jobs.pop(key)
        claim = job.id, job.lease.claim_no
        if outcome.kind == "completed" and self.data.held(*claim):
            self.data.promised.add(claim)
        if not (place.jobs or runner.shared or place.is_dead or place.signals):
            runner.places.remove(place)  # it can take another one
        self.desk.ended(job, outcome)
        self.desk.room()

    def executor_dies(self, n: int) -> None:
        if places := self.places:
            self.die(*places[n % len(places)], by_deadline=False)

    def signals_arrive(self, _: int) -> None:
        for runner, place in self.places:
            if place.signals:
                self.die(runner, place, by_deadline=False)

    def die(self, runner: FakeRunner, place: FakePlace, *, by_deadline: bool) -> None:
        place.is_dead = True
        place.signals.add(True)
        while place.sent:
            self.take(runner, place)
        runner.places.remove(place)
        jobs = [*place.jobs.values()]
        if not (by_deadline or place.killed_for):
            for job in jobs:
                self.data.rows[job.id]["deaths"] += 1
        for job in jobs:
            job.place = None
            self.desk.died(job, executors.Death("killed", {}, by_deadline, place.killed_for))
        self.desk.room()

    def ask(self, n: int) -> None:
        """Let a handler begin a step."""
        running = [(runner, job) for runner, place in self.places for job in place.running.values()]
        if running:
            runner, job = running[n % len(running)]
            runner.asked += 1
            runner.open_questions.add(runner.asked)
            request = {"op": "begin", "kind": "step", "name": "s", "key": ""}
            self.desk.asked(job, {"no": runner.asked, "what": "step", "request": request})

    def prints(self, _: int) -> None:
        for each in self.places:
            for job in each[1].running.values():
                self.desk.printed(job, b"x")
                job.beat(self.data.now, "1")

    # --- The process.

    def time_passes(self, n: int) -> None:
        self.pass_time((0.01, 0.6, 1.5, 12.0)[n % 4])
        self.turn(n)

    def freezes(self, n: int) -> None:
        """Let the worker do nothing for so long."""
        self.pass_time((9.0, 29.0, 60.0)[n % 3])

    def pass_time(self, seconds: float) -> None:
        """Let time pass; the launcher kills all executors from its deadline on."""
        self.data.now += seconds
        if self.data.now >= self.hold:
            for runner, place in self.places:
                self.die(runner, place, by_deadline=True)

    def turn(self, _: int) -> None:
        self.desk.tick(self.data.now)
        self.leases.tick(self.data.now)
        if self.desk.stopping and not self.desk.busy:
            assert not any(place.jobs for _, place in self.places)
            self.leases.leave()

    def sweep(self, _: int) -> None:
        self.data.sweep()

    def throttle(self, n: int) -> None:
        self.desk.throttled = bool(n % 2)
        self.desk.look()

    def requeue(self, _: int) -> None:
        """Do what a stop policy of the app requests."""
        self.requeues += 1
        self.desk.requeue("policy", self.note_requeued)

    def note_requeued(self) -> None:
        self.requeued += 1

    def stop(self, n: int) -> None:
        self.desk.stop((0.0, 5.0, 60.0)[n % 3])

    def launcher_dies(self, n: int) -> None:
        """Lose all executors: none follows."""
        if n % 4:
            return  # rare, as little comes after it
        self.desk.stop(0.0)
        for runner, place in self.places:
            self.die(runner, place, by_deadline=bool(n % 8))

    # --- What must hold.

    @invariant()
    def held_jobs_are_somewhere(self) -> None:
        if not hasattr(self, "links"):
            return
        places = {id(job): place for _, place in self.places for job in place.jobs.values()}
        for own in self.desk.queues:
            for job in own.jobs.values():
                assert job.place is places.get(id(job)), job.id
            assert len(own.waiting) == len({job.id for job in own.waiting})
            assert not (self.desk.stopping and own.waiting)

    @invariant()
    def no_handler_outlasts_its_lease(self) -> None:
        """Also if the worker does nothing from here on."""
        if not hasattr(self, "links"):
            return
        for job in self.jobs:
            row = self.data.rows[job.id]
            if self.data.held(job.id, job.lease.claim_no):
                assert job.lease_end.ends <= row["expires"], job.id
                assert job.place is None or self.hold <= row["expires"], job.id

    @invariant()
    def no_claim_is_forgotten(self) -> None:
        """What is claimed and held is known, or is looked for after a lost reply."""
        if not hasattr(self, "links") or self.refused > desk.REFUSALS:
            return
        known = {job.id for job in self.jobs}
        known |= {each.job.id for each in self.desk._writes if each.ends}
        looked_for = {
            own.who.queue
            for own in self.desk.queues
            if own.claiming or own.unsure or own.unsure_at < math.inf
        }
        for job, _ in self.data.claims:
            is_looked_for = self.data.rows[job]["queue"] in looked_for
            assert job in known or is_looked_for or job in self.data.left_to_leases, job

    @invariant()
    def crashes_have_evidence(self) -> None:
        if not hasattr(self, "links"):
            return
        for job_id, row in self.data.rows.items():
            assert row["crashes"] <= row["deaths"], job_id
        assert self.requeued <= self.requeues

    def teardown(self) -> None:
        """Once nothing fails any more, every job ends that is not locked, and then the others."""
        if not hasattr(self, "links"):
            return
        self.named.stop()
        with mock.patch.object(db, "describe", return_value="here"):
            self.end()

    def end(self) -> None:
        self.late.clear()
        self.data.off.clear()
        self.desk.throttled = False
        for each in self.links:
            if not each.is_open:
                each.reopen()
        self.leases.renew_now()
        for locked in ({*self.data.locked}, set[str]()):
            self.data.locked = locked
            for _ in self.turns():
                if not self.unfinished():
                    break
            assert not self.unfinished()
        assert self.requeued == self.requeues
        self.talk_until_idle(0)
        assert not any(each.open_questions for each in self.runners)
        for job, claim in self.data.promised:
            assert (claim, "completed") in self.data.rows[job]["ends"], job

    def unfinished(self) -> list[str]:
        """Return the jobs that are held or have not ended, without those that are locked."""
        wanted = ("running",) if self.desk.stopping else ("queued", "running")
        open_ = [job for job, row in self.data.rows.items() if row["status"] in wanted]
        held = [job.id for job in self.jobs]
        return [job for job in {*open_, *held} if job not in self.data.locked]

    def talk_until_idle(self, at: int) -> None:
        for _ in range(100 + 10 * len(self.data.rows)):
            self.send(at)
            if self.links[at].request is None:
                return
            self.execute(at)
            self.answer(at)
        raise AssertionError("it sends one statement after the other")

    def turns(self) -> Generator[None]:
        for _ in range(300 + 30 * len(self.data.rows)):
            self.pass_time(0.7)
            self.turn(0)
            self.data.sweep()
            for at in (0, 1):
                self.talk_until_idle(at)
            # Without an event nothing is due at once again: the loop would spin.
            due = min(self.desk.tick(self.data.now), self.leases.tick(self.data.now))
            assert due > self.data.now or self.data.now >= self.desk.exit_by
            for runner, place in self.places:
                if place.signals:
                    self.die(runner, place, by_deadline=False)
            for runner, place in self.places:
                for key in [*place.running]:
                    del place.running[key]
                    place.sent.append((key, outcomes.Outcome("completed", 0.001)))
                while place.sent:
                    self.take(runner, place)
            yield


TestWorker = Worker.TestCase
TestWorker.settings = settings(
    max_examples=examples.examples(400), stateful_step_count=60, deadline=None
)
