"""Define the fleet's state machine rules for apps and operators."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import queue_workflows
from queue_workflows import dispatcher, errors, node_queue, run_store, runs, workers
from queue_workflows import jobs as jobs_api
from tests.support import factories, fleet_base
from tests.support import fleet_model as model
from tests.support.fleet_base import HOST, PICK, PRIORITY, graphs


class Apps(fleet_base.Base):
    """Apps and operators."""

    @precondition(lambda self: len(self.unfinished()) < 3)
    @rule(graph=graphs(), priority=PRIORITY, start=st.booleans())
    def submit(self, graph: dict[str, model.Node], priority: int, start: bool) -> None:
        self.submitted += 1
        name = f"w{self.submitted}"
        self.world.define(name, graph)
        row = run_store.insert_run(workflow_name=name, priority=priority)
        run = model.Run(row["id"], graph, priority)
        self.fleet.runs.append(run)
        if start:
            dispatcher.start_run(run.id)
            run.start()

    @precondition(lambda self: len(self.live_ingest()) < 3)
    @rule(priority=PRIORITY, attempts=st.integers(1, 2))
    def enqueue_ingest(self, priority: int, attempts: int) -> None:
        row = factories.ingest(self.conn, priority=priority, max_attempts=attempts)
        job = model.Job("fetch", priority, max_attempts=attempts, id=row["id"], seq=row["seq"])
        self.fleet.ingest.append(job)

    @precondition(lambda self: self.unfinished())
    @rule(
        pick=PICK, status=st.sampled_from(["cancelled", "cancelled", "failed", "engine"]),
        regret=st.booleans(),
    )  # fmt: skip
    def end_run(self, pick: int, status: str, regret: bool) -> None:
        run = self.run_of(pick, "running")
        over = run.status in model.TERMINAL
        if status == "engine":
            assert (runs.cancel(run.id) is None) is over
        elif not over:
            self.conn.execute(
                "UPDATE workflow_runs SET status = %s, finished_at = now() WHERE id = %s",
                (status, run.id),
            )
        if not over:
            run.end("failed" if status == "failed" else "cancelled")
            if regret:
                runs.retry(run.id)
                run.reopen()

    @precondition(lambda self: self.fleet.running)
    @rule(pick=PICK, regret=st.booleans())
    def cancel_job(self, pick: int, regret: bool) -> None:
        job = self.job_of(pick, "running")
        found = jobs_api.cancel(job.id) is not None
        assert found is (job.status in ("queued", "running", "awaiting_input"))
        if job.status == "running":
            job.asked = True
        elif found:
            job.become("cancelled")
        if found and job.run is not None and job.run.cancel() and regret:
            runs.retry(job.run.id)
            job.run.reopen()

    @precondition(lambda self: any(run.status in model.TERMINAL for run in self.fleet.runs))
    @rule(pick=PICK, by=st.sampled_from(["host", "retry", "job", "from", "from"]), at=PICK)
    def again(self, pick: int, by: str, at: int) -> None:
        run = self.run_of(pick, *model.TERMINAL)
        idle = [node for node in run.graph if run.state(node) != "running"]
        nodes = idle if idle and at % 8 else [*run.graph]
        node = nodes[at // 8 % len(nodes)]
        job = run.jobs.get(node)
        if by == "from":
            running = any(run.state(name) == "running" for name in run.from_node(node))
            able = run.status in model.TERMINAL and run.started and not running
        else:
            able = run.status in ("failed", "cancelled")
        if by == "host":
            self.conn.execute(
                "UPDATE workflow_runs SET status = 'queued'"
                " WHERE id = %s AND status IN ('failed', 'cancelled')",
                (run.id,),
            )
        elif by == "job" and job is not None:
            able = able and job.status in ("failed", "cancelled")
            self.expect(able, lambda: jobs_api.retry(job.id))
        else:
            from_node = node if by == "from" else None
            self.expect(able, lambda: runs.retry(run.id, from_node=from_node))
        if able and by == "from":
            run.reopen_from(node)
        elif able:
            run.reopen()

    def expect(self, able: bool, act: Any) -> None:
        """Expect that the change happens, or that it is refused."""
        if able:
            act()
            return
        with pytest.raises((errors.InvalidConfig, errors.UnknownJob)):
            act()

    @precondition(lambda self: len(self.live_ingest()) < len(self.fleet.ingest))
    @rule(pick=PICK)
    def retry_ingest(self, pick: int) -> None:
        job = self.fleet.ingest[pick % len(self.fleet.ingest)]
        able = job.status in ("failed", "cancelled")
        self.expect(able, lambda: jobs_api.retry(job.id))
        if able:
            seq = job.seq
            job.reopen(job.generation + 1, job.priority)
            job.seq = seq

    @precondition(lambda self: any(job.asks for job in self.fleet.jobs))
    @rule(pick=PICK, at=PICK, twice=st.booleans())
    def answer(self, pick: int, at: int, twice: bool) -> None:
        run = self.run_of(pick, "running", "completed")
        asking = [name for name, spec in run.graph.items() if spec.kind == "input"]
        asking = [name for name in asking if name in run.jobs] or asking
        nodes = asking or [*run.graph]
        node = nodes[at % len(nodes)]
        for _ in range(1 + twice):
            waits = run.state(node) in ("queued", "running", "awaiting_input")
            if asking and waits and not self.fleet.in_flight(run, node):
                queue_workflows.submit_input(run.id, node, 5)
                self.fleet.answers.append(model.Answer(run, node))
            else:
                with pytest.raises((errors.InputRefused, errors.UnknownJob)):
                    queue_workflows.submit_input(run.id, node, 6)

    @precondition(lambda self: sum(run.status in model.TERMINAL for run in self.fleet.runs) > 2)
    @rule(pick=PICK)
    def delete_run(self, pick: int) -> None:
        over = [run for run in self.fleet.runs if run.status in model.TERMINAL]
        run = over[pick % len(over)]
        assert run_store.delete_run(run.id)
        run.graph = dict(run.graph)
        for job in run.jobs.values():
            job.gone = True
        run.status = "deleted"
        self.fleet.runs.remove(run)
        self.fleet.answers = [each for each in self.fleet.answers if each.run is not run]

    # Operators.

    @rule(
        host=HOST, queue=st.sampled_from(["cpu", "gpu", "fetch", "all"]),
        policy=st.sampled_from([None, None, None, "hard", "hard", "drain", "pause"]),
        until=st.sampled_from([None, "later", "past"]),
    )  # fmt: skip
    def switch(self, host: str, queue: str, policy: str | None, until: str | None) -> None:
        if policy is None:
            workers.enable(host, queue)
            self.fleet.off.pop((host, queue), None)
            return
        lasts = datetime.timedelta(hours=1) if until else None
        workers.disable(host, queue, stop_policy=policy, until=lasts)
        self.fleet.off[host, queue] = model.Off(policy, until == "past")
        if until == "past":
            self.conn.execute(
                "UPDATE worker_controls SET until_at = now() - interval '1 s'"
                " WHERE host_label = %s AND queue = %s",
                (host, queue),
            )
        for slot in self.slots:
            if slot.host == host and slot.process.work is None:
                self.claim_in(slot, True, False)

    @precondition(lambda self: self.fleet.running)
    @rule(host=HOST, queue=st.sampled_from(["cpu", "gpu", "fetch"]))
    def take_back(self, host: str, queue: str) -> None:
        count = node_queue.requeue_running_for_worker(host, queue)
        jobs = [job for job in self.fleet.running if job.queue == queue]
        jobs = [job for job in jobs if job.worker.startswith(f"{host}:")]
        assert count == len(jobs)
        for job in jobs:
            job.back(front=True)

    @precondition(lambda self: any(run.live for run in self.fleet.runs))
    @rule()
    def resume_all(self) -> None:
        live = [run for run in self.fleet.runs if run.live]
        assert run_store.reenqueue_running_for_resume() == len(live)
        for run in live:
            run.status, run.priority = "queued", min(run.priority, model.FRONT)
