"""Define the base of the fleet's state machine: database, model of the rows, drawn choices."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from tests.support import factories, fleet, flow
from tests.support import fleet_model as model

FAR = "interval '1 hour'"
PICK = st.integers(0, 10_000)
HOST = st.sampled_from(["box", "den"])
PRIORITY = st.sampled_from([1, 50, 100])
ENDS = st.sampled_from(["completed", "completed", "completed", "failed", "cancelled"])
SLOTS = (
    ("box", "cpu", {}), ("box", "cpu", {}), ("den", "cpu", {"newest": True}), ("den", "gpu", {}),
    ("box", "fetch", {}), ("den", "fetch", {"locks": False}),
)  # fmt: skip
TABLES = ("workflow_node_jobs", "ingest_jobs")
_FACTS = (
    "status, worker_id, claim_no, attempts, crash_count, lapse_count, watchdog_retries, generation,"
    " priority, cancel_requested_at IS NOT NULL, blocked_reason IS NOT NULL, max_attempts"
)
# Everything that the model predicts, in one round trip.
_ROWS = (
    f"SELECT 'node' AS kind, jsonb_build_array({_FACTS}) AS facts, id, run_id, node_id, seq"
    " FROM workflow_node_jobs"
    f" UNION ALL SELECT 'ingest', jsonb_build_array({_FACTS}), id, NULL, NULL, seq"
    " FROM ingest_jobs"
    " UNION ALL SELECT 'run', jsonb_build_array(status, generation, priority,"
    " definition IS NOT NULL), id, NULL, NULL, 0 FROM workflow_runs"
    " UNION ALL SELECT 'event', to_jsonb(kind), run_id, run_id, node_id, id"
    " FROM workflow_dispatch_events WHERE processed_at IS NULL"
    " UNION ALL SELECT 'answer', to_jsonb(status), run_id, run_id, node_id, 0"
    " FROM workflow_input_submissions"
    " UNION ALL SELECT 'flag', to_jsonb(last_flagged_dead_at IS NOT NULL), '', host_label, queue, 0"
    " FROM worker_heartbeats"
)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, model.Node]:
    """Draw a graph of up to five steps, each behind any of those before it."""
    found: dict[str, model.Node] = {}
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["work", "work", "work", "skip", "input"]))
        queue = draw(st.sampled_from(["cpu", "cpu", "gpu"]))
        deps = draw(st.lists(st.sampled_from([*found]), unique=True, max_size=2)) if found else []
        name = f"t{index}" if kind == "input" else f"t{index}/n"
        found[name] = model.Node(kind, "cpu" if kind == "input" else queue, tuple(deps))
    return found


class World:
    """What all examples share: connections, the provider, workers' places and orchestrators."""

    def __init__(self, conn: Any, lives: Any) -> None:
        self.conn, self.lives = conn, lives
        self.slots = [fleet.Slot(host, queue, lives, **more) for host, queue, more in SLOTS]
        self.orchestrators = [fleet.Orchestrator(), fleet.Orchestrator()]
        self.flow = flow.Flow()
        node = {"id": "n", "node": "ok"}
        self.flow.define(cpu=[node], gpu=[node | {"gpu": True}])

    def close(self) -> None:
        for each in (*self.slots, *self.orchestrators, self.flow):
            each.close()

    def define(self, name: str, graph: dict[str, model.Node]) -> None:
        steps: list[Any] = []
        for node, spec in graph.items():
            more: dict[str, Any] = {"depends_on": [dep.partition("/")[0] for dep in spec.deps]}
            if spec.kind == "skip":
                more["skip_if"] = {"$value": True}
            step = node.partition("/")[0]
            asks = spec.kind == "input"
            steps.append(flow.ask(step, **more) if asks else flow.step(step, spec.queue, **more))
        self.flow.define(*steps, name=name)


class Base(RuleBasedStateMachine):
    """A machine without rules."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.conn = self.world.conn
        self.slots, self.orchestrators = self.world.slots, self.world.orchestrators
        tables_ = "workflow_runs ingest_jobs ingest_job_events workers worker_heartbeats"
        factories.empty(self.conn, *tables_.split(), "worker_controls")
        for slot in self.slots:
            slot.renew_process()
        self.fleet = model.Fleet()
        self.submitted = self.writes = 0
        self.past: list[fleet.Past] = []
        self.dead: list[fleet.Process] = []
        self.flagged: dict[tuple[str, str], bool] = {}
        self.stale: dict[tuple[str, str], bool] = {}

    # What rules choose from.

    def run_of(self, pick: int, *wanted: str) -> model.Run:
        """Draw a run, usually one in these states, if there is any."""
        runs = [run for run in self.fleet.runs if run.status in wanted]
        runs = runs if runs and pick % 4 else self.fleet.runs
        return runs[pick // 4 % len(runs)]

    def job_of(self, pick: int, *wanted: str) -> model.Job:
        """Draw a job, usually one in these states, if there is any."""
        jobs = [job for job in self.fleet.jobs if job.status in wanted]
        jobs = jobs if jobs and pick % 4 else self.fleet.jobs
        return jobs[pick // 4 % len(jobs)]

    def unfinished(self) -> list[model.Run]:
        return [run for run in self.fleet.runs if run.status not in model.TERMINAL]

    def live_ingest(self) -> list[model.Job]:
        return [job for job in self.fleet.ingest if job.status in ("queued", "running")]

    def claimable(self) -> bool:
        return any(job.status == "queued" and not job.waits for job in self.fleet.jobs)

    def dead_ids(self) -> set[str]:
        return {process.worker_id for process in self.dead}

    def busy(self) -> list[fleet.Slot]:
        return [slot for slot in self.slots if slot.process.work is not None]

    def one_busy(self, pick: int) -> fleet.Slot:
        """Draw a busy slot; every other time one that has lost its claim without knowing it."""
        lost = [slot for slot in self.busy() if not slot.process.holds]
        slots = lost if lost and pick % 2 else self.busy()
        return slots[pick // 2 % len(slots)]

    def row_of(self, job: model.Job) -> str:
        return TABLES[job.run is None]

    def change(self, job: model.Job, what: str) -> None:
        self.conn.execute(f"UPDATE {self.row_of(job)} SET {what} WHERE id = %s", (job.id,))

    def look_at_rows(self) -> dict[str, list[Any]]:
        """Read the rows by kind; the model learns the ids and places of new jobs."""
        found: dict[str, list[Any]] = {}
        for row in self.conn.execute(_ROWS).fetchall():
            found.setdefault(row["kind"], []).append(row)
        runs = {run.id: run for run in self.fleet.runs}
        for row in found.get("node", []):
            job = runs[row["run_id"]].jobs.get(row["node_id"])
            if job is not None:
                job.id = job.id or row["id"]
                job.seq = job.seq or row["seq"]
        return found
