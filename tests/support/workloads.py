"""Submit workloads that must end although processes die, and check their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from queue_workflows import db, events, node_queue, run_store, runs
from queue_workflows import jobs as jobs_api
from queue_workflows.engine import schedules
from tests.support import failpoints

BATCH = 3


class Job(NamedTuple):
    """A job as it ended."""

    me: str
    status: str
    attempts: int
    crash_count: int
    left: dict[str, Any] | None
    """What its one recorded execution returned."""
    finals: int
    """How often its end was recorded."""
    handed_back: int = 0
    """How often a parent handed it back, uncounted, as its worker with executors died."""

    @property
    def deaths(self) -> int:
        """How often the process of its worker or handler died, while its handler may have run."""
        return self.crash_count + self.handed_back


HANDED_BACK = """
       (SELECT count(*) FROM workflow_node_events e WHERE e.job_id = j.id AND
       e.event_type = 'requeued' AND e.detail ->> 'reason' LIKE 'its worker %%') AS handed_back"""
"""How often a parent handed a node back."""
_NODES = f"""
SELECT split_part(j.node_id, '/', 1) AS me, j.status, j.attempts, j.crash_count,
       j.context_delta AS left, (SELECT count(*) FROM workflow_node_events e WHERE e.job_id = j.id
       AND e.event_type IN ('completed', 'failed', 'cancelled')) AS finals, {HANDED_BACK}
  FROM workflow_node_jobs j WHERE j.run_id = ANY (%s)
"""
_OF_MAPS = f"""
SELECT j.resolved_inputs ->> 'me' AS me, j.status, j.attempts, j.crash_count,
       j.context_delta AS left, (SELECT count(*) FROM workflow_node_events e WHERE e.job_id = j.id
       AND e.event_type IN ('completed', 'failed', 'cancelled')) AS finals, {HANDED_BACK}
  FROM workflow_node_jobs j WHERE j.run_id = ANY (%s) AND j.node_module <> '__map__'
"""
_NOTES = """
SELECT coalesce(j.args ->> 'me', j.reason) AS me, j.status, j.attempts, j.crash_count,
       j.result AS left, (SELECT count(*) FROM ingest_job_events e WHERE e.job_id = j.id
       AND e.event_type IN ('completed', 'failed', 'cancelled')) AS finals,
       (SELECT count(*) FROM ingest_job_events e WHERE e.job_id = j.id AND
       e.event_type = 'requeued' AND e.detail ->> 'reason' LIKE 'its worker %%') AS handed_back
  FROM ingest_jobs j WHERE j.id = ANY (%s)
"""


def jobs(query: str, ids: list[str]) -> dict[str, Job]:
    with db.transaction() as conn:
        rows = conn.execute(query.encode(), (ids,)).fetchall()
    return {row["me"]: Job(**row) for row in rows}


def judge(job: Job, tokens: list[str]) -> None:
    """Check for one end and one result, by an execution that happened, with each accounted for."""
    assert job.finals == 1, job
    assert job.deaths <= 1, job
    if job.status == "completed":
        assert job.left is not None
        assert job.left["token"] in tokens, job
        assert 1 <= len(tokens) <= 1 + job.attempts + job.deaths, (job, tokens)
    else:
        assert job.status == "failed", job
        assert job.attempts <= len(tokens) <= job.attempts + job.deaths, (job, tokens)


class Workload(Protocol):
    """What is brought to its end past the death of a role."""

    def __init__(self, tag: str) -> None: ...

    def submit(self) -> dict[str, str]:
        """Queue it; what the roles' environment has to say of it."""
        ...

    def is_over(self) -> bool: ...

    def judge(self, folder: Path) -> list[Job]:
        """Check what it came to."""
        ...


class Runs:
    """A run of a chain, a join, a skip, a retry and a question; and one that fails."""

    names = ("whole", "broken")

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.ids: list[str] = []

    def submit(self) -> dict[str, str]:
        context = {"tag": self.tag, "skip": True}
        with db.transaction() as conn:
            self.ids = [
                run_store.insert_run(workflow_name=name, context=context, conn=conn)["id"]
                for name in self.names
            ]
        return {}

    def is_over(self) -> bool:
        with db.transaction() as conn:
            asked = conn.execute(
                "SELECT run_id FROM workflow_node_jobs j WHERE run_id = ANY (%s)"
                " AND status = 'awaiting_input' AND input_spec IS NOT NULL AND NOT EXISTS ("
                "SELECT FROM workflow_input_submissions s WHERE s.run_id = j.run_id)",
                (self.ids,),
            ).fetchone()
            if asked:
                runs.answer(asked["run_id"], "ask", "yes", conn=conn)
            live = conn.execute(
                "SELECT FROM workflow_runs WHERE id = ANY (%s)"
                " AND status NOT IN ('completed', 'failed', 'cancelled')",
                (self.ids,),
            ).fetchone()
        return live is None and node_queue.count_unprocessed_dispatch_events() == 0

    def judge(self, folder: Path) -> list[Job]:
        assert [(run_store.get_run(run_id) or {})["status"] for run_id in self.ids] == [
            "completed",
            "failed",
        ]
        steps = {step["id"]: step for name in self.names for step in failpoints.WORKFLOWS[name]}
        found = jobs(_NODES, self.ids)
        assert found.keys() == steps.keys() - {"after"}
        tokens = failpoints.executions(folder, self.tag)
        assert tokens.keys() == found.keys() - {"never", "ask"}
        for me, job in found.items():
            wanted = {"never": "skipped", "bad": "failed"}.get(me, "completed")
            assert job.status == wanted, job
            if me in tokens:
                judge(job, tokens[me])
                self._judge_input(job, steps[me]["inputs"].get("seen"), found)
        assert "ask" not in found or found["ask"].finals == 1
        return [*found.values()]

    def _judge_input(self, job: Job, seen: dict[str, str] | None, found: dict[str, Job]) -> None:
        """Check that the input is what the previous node returned."""
        if seen is not None:
            node_id, _, key = seen["$from"].partition(".")
            before = found[node_id.removesuffix("/n")]
            assert (job.left or {})["seen"] == (before.left or {})[key], job


class MapRuns(Runs):
    """A run with a map of three items, two at a time, of two nodes each, and a join."""

    names = ("mapped",)

    def judge(self, folder: Path) -> list[Job]:
        assert [(run_store.get_run(run_id) or {})["status"] for run_id in self.ids] == ["completed"]
        found = jobs(_OF_MAPS, self.ids)
        tokens = failpoints.executions(folder, self.tag)
        keys = failpoints.ITEMS
        assert found.keys() == {"list", "join", *keys, *(f"of-{key}" for key in keys)}
        for me, job in found.items():
            judge(job, tokens[me])
        results = [(found[key].left or {})["token"] for key in keys]
        assert (found["join"].left or {})["seen"] == results
        return list(found.values())


class ShortRuns(Runs):
    """Less of it, for apps whose hooks make each step cost more."""

    names = ("short", "broken")


class Notes:
    """Ingest jobs: some that work, one that does on its second try, one that fails."""

    count = 2

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.ids: list[str] = []

    def _named(self) -> Iterator[tuple[str, str]]:
        half = self.count // 2
        yield from ((f"note-{number}", "work") for number in range(half))
        yield from (("once", "fails_once"), ("bad", "fails"))
        yield from ((f"note-{number}", "work") for number in range(half, self.count))

    def submit(self) -> dict[str, str]:
        with db.transaction() as conn:
            self.ids = [
                jobs_api.enqueue(
                    task_name=task,
                    queue=failpoints.QUEUE,
                    args={"tag": self.tag, "me": me},
                    conn=conn,
                )
                for me, task in self._named()
            ]
        return {}

    def is_over(self) -> bool:
        return all(job.status in ("completed", "failed") for job in jobs(_NOTES, self.ids).values())

    def judge(self, folder: Path) -> list[Job]:
        found = jobs(_NOTES, self.ids)
        assert [job.me for job in found.values() if job.status == "failed"] == ["bad"]
        tokens = failpoints.executions(folder, self.tag)
        assert tokens.keys() == found.keys() == {me for me, _ in self._named()}
        for job in found.values():
            judge(job, tokens[job.me])
        return [*found.values()]


class Batches(Notes):
    """The same in more than two batches."""

    count = 2 * BATCH


class Stepped(Notes):
    """An ingest job with two steps, a loop, a sleep and a wait for an event."""

    def _named(self) -> Iterator[tuple[str, str]]:
        yield "note", "stepped"

    def is_over(self) -> bool:
        (job_id,) = self.ids
        kinds = {(step["kind"], step["state"]) for step in jobs_api.steps(job_id)}
        if ("event", "waiting") in kinds:
            events.send(failpoints.EVENT, key=self.tag, value=self.tag)
        return super().is_over()

    def judge(self, folder: Path) -> list[Job]:
        (job,) = jobs(_NOTES, self.ids).values()
        tokens = failpoints.executions(folder, self.tag)
        assert tokens.keys() == {"note", "note-round", "note-last"}
        judge(job, tokens["note"])
        left = job.left or {}
        assert left["last"] in tokens["note-last"]
        assert left["seen"] == self.tag
        assert len(tokens["note-last"]) <= 1 + job.deaths
        # A crash may repeat the rounds since the last renewal of the lease.
        most = failpoints.ROUNDS * (1 + job.deaths)
        assert failpoints.ROUNDS <= len(tokens["note-round"]) <= most
        recorded = jobs_api.steps(self.ids[0])
        assert [(step["kind"], step["state"]) for step in recorded] == [
            (kind, "done") for kind in ("step", "cursor", "sleep", "event", "step")
        ]
        outputs = [json.loads(step["output"]) for step in recorded if step["kind"] == "step"]
        assert [output["token"] for output in outputs] == [left["token"], left["last"]]
        return [job]


class Ticks:
    """An entry that was due five minutes ago and last fired an hour before, and its boot kick."""

    def __init__(self, tag: str) -> None:
        self.name = tag

    def submit(self) -> dict[str, str]:
        with db.transaction() as conn:
            due = schedules.database_now(conn) - timedelta(minutes=5)
            self.due = due.replace(second=0, microsecond=0)
            conn.execute(
                "INSERT INTO schedule_fires (name, fire_at) VALUES (%s, %s)",
                (self.name, self.due - timedelta(hours=1)),
            )
        return {failpoints.ENTRY: f"{self.name} {self.due.minute}"}

    def _fired(self) -> list[dict[str, Any]]:
        with db.transaction() as conn:
            return conn.execute(
                "SELECT f.name, f.fire_at, f.job_id, j.status FROM schedule_fires f"
                " LEFT JOIN ingest_jobs j ON j.id = f.job_id"
                " WHERE name IN (%(name)s, %(name)s || ':boot') AND fire_at > %(seed)s",
                {"name": self.name, "seed": self.due - timedelta(minutes=59)},
            ).fetchall()

    def is_over(self) -> bool:
        fired = self._fired()
        return len({row["name"] for row in fired}) == 2 and all(
            row["status"] == "completed" for row in fired
        )

    def judge(self, folder: Path) -> list[Job]:
        fired = self._fired()
        ticks = [row for row in fired if row["name"] == self.name]
        assert [row["fire_at"] for row in ticks] == [self.due]
        # A boot kick counts by the hour, which may have ended meanwhile.
        assert len(fired) <= 3
        ids = [row["job_id"] for row in fired]
        assert len({*ids}) == len(ids)
        with db.transaction() as conn:
            rows = conn.execute("SELECT id, result FROM ingest_jobs").fetchall()
            fires = conn.execute("SELECT job_id FROM schedule_fires WHERE job_id > ''").fetchall()
        assert {row["id"] for row in rows} == {row["job_id"] for row in fires}
        done = [line["token"] for line in failpoints.lines(folder / "bodies")]
        assert sorted(done) == sorted(row["result"]["token"] for row in rows)
        return [*jobs(_NOTES, ids).values()]
