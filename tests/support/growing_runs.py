"""Submit runs whose graphs decide while they run, and check that each node ended once."""

from __future__ import annotations

from pathlib import Path

from queue_workflows import db, node_queue, run_store
from tests.support import failpoints, workloads

_NODES = f"""
SELECT j.node_id AS me, j.status, j.attempts, j.crash_count, j.context_delta AS left,
       (SELECT count(*) FROM workflow_dispatch_events e WHERE e.job_id = j.id
           AND e.kind = 'completed') AS finals, {workloads.HANDED_BACK}
  FROM workflow_node_jobs j WHERE j.run_id = ANY (%s)
"""

_WORKED = f"""
SELECT j.resolved_inputs ->> 'me' AS me, j.status, j.attempts, j.crash_count,
       j.context_delta AS left, (SELECT count(*) FROM workflow_node_events e WHERE e.job_id = j.id
       AND e.event_type IN ('completed', 'failed', 'cancelled')) AS finals, {workloads.HANDED_BACK}
  FROM workflow_node_jobs j
 WHERE j.run_id = ANY (%s) AND NOT starts_with(j.node_module, '__')
"""


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

    def judge(self, folder: Path) -> list[workloads.Job]:
        run = run_store.get_run(self.run_id) or {}
        assert (run["status"], run["error"]) == ("completed", None)
        with db.transaction() as conn:
            (child,) = conn.execute(
                "SELECT id, status FROM workflow_runs WHERE parent_run_id = %s", (self.run_id,)
            ).fetchall()
        assert child["status"] == "completed"
        found = workloads.jobs(_NODES, [self.run_id, child["id"]])
        tokens = failpoints.executions(folder, self.tag)
        ran = {"first/n": "first", "done/film": "film", "done/again": "again", "last/n": "last"}
        ran |= {"within/n": "within", "made/n": "made"}
        first = (found["again/round#1"].left or {})["token"]
        ran |= {"again/round#1": (found["child"].left or {})["token"], "again/round#2": first}
        assert tokens.keys() == {*ran.values()}
        assert found.keys() == {*ran, "done", "done/other", "child", "__output__", "again"}
        assert found["done/other"].status == "skipped"
        for node_id, me in ran.items():
            workloads.judge(found[node_id], tokens[me])
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


class MappedRuns(workloads.Runs):
    """A run with a map of three items, two at a time, each of which is a child run, and a join."""

    names = ("treated",)

    def judge(self, folder: Path) -> list[workloads.Job]:
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
        found = workloads.jobs(_WORKED, [run_id, *(child["id"] for child in children)])
        tokens = failpoints.executions(folder, self.tag)
        assert found.keys() == {"list", "join", *(f"of-{key}" for key in failpoints.ITEMS)}
        for me, job in found.items():
            workloads.judge(job, tokens[me])
        waited = workloads.jobs(_NODES, [run_id])
        assert {waited[node_id].finals for node_id in (*items, "each")} == {1}
        results = [(found[f"of-{key}"].left or {})["token"] for key in failpoints.ITEMS]
        assert (found["join"].left or {})["seen"] == results
        return [*found.values()]


class Deciding(workloads.Runs):
    """A run with a map of two items, each with a node, a branch and a loop, and a join."""

    names = ("deciding",)

    def judge(self, folder: Path) -> list[workloads.Job]:
        (run_id,) = self.ids
        run = run_store.get_run(run_id) or {}
        assert (run["status"], run["error"]) == ("completed", None)
        found = workloads.jobs(_NODES, [run_id])
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
            workloads.judge(found[place], tokens[me])
        assert (found["join/n"].left or {})["seen"] == results
        return [*found.values()]
