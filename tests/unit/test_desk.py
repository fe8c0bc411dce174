"""The worker's decisions against every order of replies, losses, deaths, signals and times."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import psycopg
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from queue_workflows import db
from queue_workflows.db import link, statements
from queue_workflows.engine import claims, outcomes
from queue_workflows.run import executors
from queue_workflows.worker import claimed_job, desk, job_logs, lane, shapes

TABLE = "ingest_jobs"
WORKER = "w:1:0:ex-1"


class Refused(psycopg.Error):
    """A statement that the database refuses."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__("refused")
        self.sqlstate = sqlstate


class FakeDatabase:
    """The jobs of one queue, and the statements that a desk sends about them."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.locked: set[str] = set()
        """Jobs whose rows a stranger has locked."""

    def add(self, crashes: int = 0, lapses: int = 0) -> None:
        job_id = f"j{len(self.rows)}"
        self.rows[job_id] = {
            "status": "queued",
            "claim": 0,
            "worker": None,
            "ends": [],
            "crashes": crashes,
            "lapses": lapses,
        }

    def steal(self, job_id: str) -> None:
        """Let the claim of a job be lost, as after a lapsed lease."""
        row = self.rows[job_id]
        if row["status"] == "running":
            row.update(status="queued", worker=None)

    def demand(self, *job_ids: str) -> None:
        """Refuse a statement that would have to wait for a lock."""
        if self.locked.intersection(job_ids):
            raise Refused(desk.LOCKED)

    def held(self, job_id: str, claim: int) -> bool:
        row = self.rows[job_id]
        return row["status"] == "running" and row["worker"] == WORKER and row["claim"] == claim

    def end(self, job_id: str, claim: int, status: str) -> bool:
        if not self.held(job_id, claim):
            return False
        row = self.rows[job_id]
        assert claim not in [each for each, _ in row["ends"]], "two ends of one claim"
        row["ends"].append((claim, status))
        row.update(status=status, worker=None, lapses=0)
        return True

    def run(self, script: db.Script[Any]) -> Any:
        try:
            statement = next(script)
            while True:
                try:
                    rows = self._answer(statement)
                except psycopg.Error as error:
                    statement = script.throw(error)
                else:
                    statement = script.send(rows)
        except StopIteration as end:
            return end.value

    def _answer(self, statement: db.Statement) -> list[Any]:
        given, text = statement.parameters, statement.text
        known = statements
        if text == known.claims.ingest_rows:
            return self._step(given)
        if text == known.attempts.policy[TABLE]:
            return [{"policy": None, "attempts": 0, "max_attempts": 1}]
        if text == known.attempts.fail[TABLE]:
            self.demand(given["job"])
            done = self.end(given["job"], given["claim"], "failed")
            return [{"status": "failed", "id": given["job"]}] if done else []
        if text == known.handback.hand_back[TABLE]:
            self.demand(*given["jobs"])
            pairs = zip(given["jobs"], given["claims"], strict=True)
            return [{"id": job} for job, claim in pairs if self.end(job, claim, "queued")]
        if text == known.handback.strays[TABLE]:
            return [
                {"id": job, "worker_id": WORKER, "claim_no": row["claim"]}
                for job, row in self.rows.items()
                if row["worker"] == WORKER and job not in self.locked
            ]
        if text == known.claims.has_recorded_ingest:
            row = self.rows[given["job"]]
            return [{}] if given["claim"] in [claim for claim, _ in row["ends"]] else []
        if text == known.recovery.of_claim[TABLE]:
            return [{"id": given["job"]}] if self.held(given["job"], given["claim"]) else []
        if text == known.recovery.count_crash[TABLE]:
            self.demand(*given["ids"])
            return [self._crashed(job) for job in given["ids"]]
        return []

    def _crashed(self, job_id: str) -> dict[str, Any]:
        row = self.rows[job_id]
        row["crashes"] += 1
        status = "failed" if row["crashes"] == 3 else "queued"
        self.end(job_id, row["claim"], status)
        return {"id": job_id, "status": status, "heartbeat_at": None, "progress": None,
                "attempts": 0, "claim_no": row["claim"], "queue": "fetch"}  # fmt: skip

    def _step(self, given: Any) -> list[Any]:
        done = json.loads(given["done"]) if given["done"] else []
        self.demand(*(each["id"] for each in done))
        if not all(self.held(each["id"], each["claim_no"]) for each in done):
            raise Refused(claims.CLAIM_LOST)
        for each in done:
            self.end(each["id"], each["claim_no"], "completed")
        found: list[tuple[bytes | None, ...]] = []
        for job_id, row in self.rows.items():
            free = row["status"] == "queued" and job_id not in self.locked
            if free and len(found) < given["claim"]:
                row.update(status="running", worker=WORKER, claim=row["claim"] + 1)
                texts = (job_id, row["claim"], row["crashes"], None, "task")
                head = [None if each is None else str(each).encode() for each in texts]
                lapses = str(row["lapses"]).encode()
                found.append((*head, None, None, None, None, b"{}", None, None, lapses))
        return found


class FakePlace:
    """An executor with one job."""

    shared = False

    def __init__(self, job: claimed_job.ClaimedJob) -> None:
        self.jobs = {1: job}
        self.killed = False


class FakeRunner:
    """Two executors, each with one job at most."""

    gives_back = False
    accepts = True

    def __init__(self) -> None:
        self.places: list[FakePlace] = []

    @property
    def room(self) -> int:
        return 2 - len(self.places)

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        del isolated, shared
        running = [each.jobs[1] for each in self.places]
        assert all(job.id != other.id for other in running), "it runs twice at once"
        alone = any(each.crash_count == 2 or each.lapse_count == 9 for each in [job, *running])
        assert not (running and alone), "a death would be the last of a neighbour"
        job.place = FakePlace(job)
        self.places.append(job.place)

    def interrupt(self, job: Any, reason: str) -> None:
        del job, reason

    def recorded(self, job: Any, found: object) -> None:
        del job, found


class Worker(RuleBasedStateMachine):
    """A desk with one lane, whose events come in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.data = FakeDatabase()
        self.runner = FakeRunner()
        self.request: link.Request | None = None
        seams = desk.Seams(lambda: None, lambda _: None, self.kill)
        self.desk = desk.Desk(
            seams, job_logs.JobLogs(lambda _: None, self.clock), now_fn=self.clock
        )
        who = claims.Claimant(WORKER, "host", "fetch", 30.0)
        shape, runner = shapes.Shape(2), self.runner
        self.lane = lane.Lane(who, shape, runner, now_fn=self.clock)  # type: ignore[arg-type]
        self.desk.lanes.append(self.lane)

    def clock(self) -> float:
        return self.now

    def kill(self, place: Any, now: bool, why: str) -> None:
        del why
        place.killed |= now

    # --- What may happen.

    @rule(
        count=st.integers(1, 4),
        crashes=st.sampled_from([0, 0, 1, 2]),
        lapses=st.sampled_from([0, 0, 0, 9]),
    )
    def enqueue(self, count: int, crashes: int, lapses: int) -> None:
        for _ in range(count):
            self.data.add(crashes, lapses)
        self.desk.look()

    @precondition(lambda self: self.request is None)
    @rule()
    def send(self) -> None:
        self.request = self.desk.next()

    @precondition(lambda self: self.request is not None)
    @rule(how=st.sampled_from(["done", "done", "done", "refused", "lost", "lost after commit"]))
    def reply(self, how: str) -> None:
        request, self.request = self.request, None
        assert request is not None
        if how == "refused":
            request.refused(Refused("57014"))
        elif how == "lost":
            request.lost()
        else:
            try:
                result = self.data.run(request.script)
            except psycopg.Error as error:
                request.refused(error)
                return
            if how == "done":
                request.done(result)
            else:
                request.lost()

    @precondition(lambda self: self.runner.places)
    @rule(which=st.integers(0, 1), kind=st.sampled_from(["completed", "completed", "failed"]))
    def handler_ends(self, which: int, kind: str) -> None:
        place = self.runner.places.pop(which % len(self.runner.places))
        self.desk.ended(place.jobs[1], outcomes.Outcome(kind, 0.001))
        self.desk.room()

    @precondition(lambda self: self.runner.places)
    @rule(which=st.integers(0, 1), late=st.booleans())
    def executor_dies(self, which: int, late: bool) -> None:
        place = self.runner.places.pop(which % len(self.runner.places))
        killed = "job" if place.killed else ""
        self.desk.died(place.jobs[1], executors.Death("killed", {}, late, killed))
        self.desk.room()

    @rule(seconds=st.sampled_from([0.01, 0.6, 1.5, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.desk.tick(self.now)
        self.die_if_killed()

    @precondition(lambda self: self.lane.jobs)
    @rule(which=st.integers(0, 5))
    def claim_is_lost(self, which: int) -> None:
        job = [*self.lane.jobs.values()][which % len(self.lane.jobs)]
        if job.id in self.data.locked:
            return
        self.data.steal(job.id)
        if not job.recording and job.end is None and self.desk.runs(job):
            self.desk.lose(job)
        self.die_if_killed()

    @precondition(lambda self: self.lane.jobs)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        self.desk.cancel([*self.lane.jobs.values()][which % len(self.lane.jobs)])

    @precondition(lambda self: self.lane.jobs)
    @rule(which=st.integers(0, 5))
    def lock(self, which: int) -> None:
        self.data.locked.add([*self.lane.jobs][which % len(self.lane.jobs)])

    @rule()
    def unlock(self) -> None:
        self.data.locked.clear()

    @rule(policy=st.sampled_from(["hard", "drain", None]))
    def switch(self, policy: str | None) -> None:
        self.desk.switch(self.lane, policy, hard=policy == "hard")
        self.die_if_killed()

    def die_if_killed(self) -> None:
        for place in [each for each in self.runner.places if each.killed]:
            self.runner.places.remove(place)
            self.desk.died(place.jobs[1], executors.Death("killed", {}, False, "job"))
            self.desk.room()

    # --- What must hold.

    @invariant()
    def held_jobs_are_somewhere(self) -> None:
        if not hasattr(self, "lane"):
            return
        places = {id(place.jobs[1]) for place in self.runner.places}
        for job in self.lane.jobs.values():
            assert (job.place is not None) == (id(job) in places), job.id
        assert len(self.lane.waiting) == len({job.id for job in self.lane.waiting})

    def teardown(self) -> None:
        """Once nothing fails any more, every job ends that is not locked, and then the others."""
        if not hasattr(self, "lane"):
            return
        self.desk.switch(self.lane, None, hard=False)
        for locked in ({*self.data.locked}, set[str]()):
            self.data.locked = locked
            for _ in self.turns():
                if not self.unfinished() and self.request is None:
                    break
            assert not self.unfinished()

    def unfinished(self) -> list[str]:
        """Return the jobs that are held or have not ended, without those that are locked."""
        open_ = [
            job for job, row in self.data.rows.items() if row["status"] in ("queued", "running")
        ]
        return [job for job in {*open_, *self.lane.jobs} if job not in self.data.locked]

    def turns(self) -> Generator[None]:
        for _ in range(200 + 20 * len(self.data.rows)):
            self.now += 0.7
            for job in [*self.lane.jobs.values()]:
                job.lease_end.beat(self.now)
            self.desk.tick(self.now)
            self.die_if_killed()
            if self.request is None:
                self.request = self.desk.next()
            if self.request is not None:
                self.reply("done")
            while self.runner.places:
                self.handler_ends(0, "completed")
            yield


TestWorker = Worker.TestCase
TestWorker.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
