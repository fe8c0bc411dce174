"""Submit workloads that must end although processes die, and check their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from queue_workflows import db, events, node_queue, run_store, runs
from queue_workflows import jobs as jobs_api
from tests.support import factories, failpoints

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
_GRAPH = f"""
SELECT j.node_id AS me, j.status, j.attempts, j.crash_count, j.context_delta AS left,
       (SELECT count(*) FROM workflow_dispatch_events e WHERE e.job_id = j.id
           AND e.kind = 'completed') AS finals, {HANDED_BACK}
  FROM workflow_node_jobs j WHERE j.run_id = ANY (%s)
"""

_OF_RUNS = f"""
SELECT j.resolved_inputs ->> 'me' AS me, j.status, j.attempts, j.crash_count,
       j.context_delta AS left, (SELECT count(*) FROM workflow_node_events e WHERE e.job_id = j.id
       AND e.event_type IN ('completed', 'failed', 'cancelled')) AS finals, {HANDED_BACK}
  FROM workflow_node_jobs j
 WHERE j.run_id = ANY (%s) AND NOT starts_with(j.node_module, '__')
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
        found = jobs(_OF_RUNS, self.ids)
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
            due = factories.one(conn, "SELECT now()") - timedelta(minutes=5)
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


class Growing:
    """A run with a branch whose arm is a chain, a child run with a retry, and a loop."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.run_id = ""

    def submit(self) -> dict[str, str]:
        context = {"tag": self.tag, "kind": "film"}
        self.run_id = run_store.insert_run(workflow_name="growing", context=context)["id"]
        return {}

    def is_over(self) -> bool:
        over = (run_store.get_run(self.run_id) or {})["status"] in ("completed", "failed")
        return over and node_queue.count_unprocessed_dispatch_events() == 0

    def judge(self, folder: Path) -> list[Job]:
        run = run_store.get_run(self.run_id) or {}
        assert (run["status"], run["error"]) == ("completed", None)
        with db.transaction() as conn:
            (child,) = conn.execute(
                "SELECT id, status FROM workflow_runs WHERE parent_run_id = %s", (self.run_id,)
            ).fetchall()
        assert child["status"] == "completed"
        found = jobs(_GRAPH, [self.run_id, child["id"]])
        tokens = failpoints.executions(folder, self.tag)
        ran = {"first/n": "first", "done/film": "film", "done/again": "again", "last/n": "last"}
        ran |= {"within/n": "within", "made/n": "made"}
        first = (found["again/round#1"].left or {})["token"]
        ran |= {"again/round#1": (found["child"].left or {})["token"], "again/round#2": first}
        assert tokens.keys() == {*ran.values()}
        assert found.keys() == {*ran, "done", "done/other", "child", "__output__", "again"}
        assert found["done/other"].status == "skipped"
        for node_id, me in ran.items():
            judge(found[node_id], tokens[me])
        done, last = found["done"].left or {}, found["last/n"].left or {}
        assert (done, found["done"].finals) == (found["done/again"].left, 1)
        made, again = found["made/n"].left or {}, found["again"].left or {}
        given = {"token": made["token"]}
        assert (made["seen"], again["token"]) == (done["token"], last["seen"])
        assert (again, found["again"].finals) == (found["again/round#2"].left, 1)
        for engine_node in ("child", "__output__"):
            assert (found[engine_node].left, found[engine_node].finals) == (given, 1)
        with db.transaction() as conn:
            assert not conn.execute(
                "SELECT FROM workflow_dispatch_events WHERE run_id = ANY (%s)"
                " AND processed_at IS NULL",
                ([self.run_id, child["id"]],),
            ).fetchall()
        return [*found.values()]


class MappedRuns(Runs):
    """A run with a map of three items, two at a time, each of which is a child run, and a join."""

    names = ("treated",)

    def judge(self, folder: Path) -> list[Job]:
        (run_id,) = self.ids
        run = run_store.get_run(run_id) or {}
        assert (run["status"], run["error"]) == ("completed", None)
        with db.transaction() as conn:
            children = conn.execute(
                "SELECT id, status, parent_node_id FROM workflow_runs WHERE parent_run_id = %s",
                (run_id,),
            ).fetchall()
        items = {f"each[{key}]/go" for key in failpoints.ITEMS}
        assert len(children) == len(items)
        assert {child["parent_node_id"] for child in children} == items
        assert {child["status"] for child in children} == {"completed"}
        found = jobs(_OF_RUNS, [run_id, *(child["id"] for child in children)])
        tokens = failpoints.executions(folder, self.tag)
        assert found.keys() == {"list", "join", *(f"of-{key}" for key in failpoints.ITEMS)}
        for me, job in found.items():
            judge(job, tokens[me])
        waited = jobs(_GRAPH, [run_id])
        assert {waited[node_id].finals for node_id in (*items, "each")} == {1}
        results = [(found[f"of-{key}"].left or {})["token"] for key in failpoints.ITEMS]
        assert (found["join"].left or {})["seen"] == results
        return [*found.values()]


class Deciding(Runs):
    """A run with a map of two items, each with a node, a branch and a loop, and a join."""

    names = ("deciding",)

    def judge(self, folder: Path) -> list[Job]:
        (run_id,) = self.ids
        run = run_store.get_run(run_id) or {}
        assert (run["status"], run["error"]) == ("completed", None)
        found = jobs(_GRAPH, [run_id])
        tokens = failpoints.executions(folder, self.tag)
        ran, results = {"join/n": "join"}, list[str]()
        for key in failpoints.DECIDING:
            at = f"each[{key}]/"
            chosen = ["done/film", "done/again"] if key == "a" else ["done/other"]
            others = {"done/film", "done/again", "done/other"} - {*chosen}
            assert {found[at + name].status for name in others} == {"skipped"}
            me = f"of-{key}"
            for name in ("n", *chosen, "again/round#1", "again/round#2"):
                ran[at + name] = me
                me = (found[at + name].left or {})["token"]
            results.append(me)
            ends = {"done": chosen[-1], "again": "again/round#2"}
            for name, end in ends.items():
                assert (found[at + name].left, found[at + name].finals) == (found[at + end].left, 1)
            for name in (*others, *ends):
                found.pop(at + name)
        assert found.pop("each").finals == 1
        assert found.keys() == ran.keys()
        assert tokens.keys() == {*ran.values()}
        for place, me in ran.items():
            judge(found[place], tokens[me])
        assert (found["join/n"].left or {})["seen"] == results
        return [*found.values()]
