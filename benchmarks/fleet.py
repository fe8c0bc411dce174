"""Run `python -m benchmarks.fleet`: the claim policies with real claims; handlers only sleep.

Each policy works through the same trace in a database of its own, all at the same time. A machine
is a thread with a connection: it claims and completes by the worker's own statement, reports and
learns as a worker does, and sleeps where a worker would load and run.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from benchmarks import fleet_sim as sim
from benchmarks import fleet_trace as traces
from benchmarks import server
from queue_workflows import db
from queue_workflows.claim import claims, job_tables, outcomes
from queue_workflows.db import statements
from queue_workflows.runtime import service
from queue_workflows.types import Row

LOOK_S = 0.01
"""Pause of a machine that was given nothing. Real workers are woken, and look once a second."""
BEAT_S = 5.0
_PICK = """
CREATE OR REPLACE FUNCTION queue_workflows_pick_gpu(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision,
    p_versions text[] DEFAULT NULL)
RETURNS text LANGUAGE sql AS $$
    SELECT j.id FROM workflow_node_jobs j
     WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
     ORDER BY {order} LIMIT 1 FOR UPDATE OF j SKIP LOCKED
$$
"""
OTHERS = {
    "fifo": _PICK.replace("{order}", "j.seq"),
    "affinity-first": _PICK.replace(
        "{order}", "(j.required_model IS DISTINCT FROM p_model), j.priority, j.seq"
    ),
}
"""What the rules that we do not ship choose by."""


class Play:
    """One policy on one trace, its seconds `scale` times as short."""

    def __init__(self, url: str, given: traces.Trace, policy: sim.Policy, scale: float) -> None:
        self._url = url
        self._trace = given
        self._policy = policy
        self._scale = scale
        self._begun = self._ended = 0.0
        self._waits: list[tuple[int, float]] = []
        self._loads = 0
        self._left = len(given.arrivals)
        self._lock = threading.Lock()
        self._over = threading.Event()

    def prepare(self) -> None:
        """Set the claim policy, and store what a long-running fleet has learned."""
        with closing(db.connect(url=self._url)) as conn:
            if self._policy.rule in OTHERS:
                conn.execute(OTHERS[self._policy.rule].encode())
            conn.execute(
                "INSERT INTO workflow_runs (id, workflow_name, status) VALUES ('r', 'fleet',"
                " 'running')"
            )
            for number, speed in enumerate(traces.SPEEDS):
                for model, load_s in self._trace.load_s.items():
                    conn.execute(
                        "INSERT INTO gpu_models (model, host_label, load_s, loads, run_s, runs)"
                        " VALUES (%s, %s, %s, 10, %s, 10)",
                        (
                            *(model, f"machine{number}", load_s / speed / self._scale),
                            self._trace.run_s[model] / speed / self._scale,
                        ),
                    )

    def services(self, begun: float) -> list[service.Service]:
        """Return the arrivals and the machines, on a clock that began then (`time.monotonic`)."""
        self._begun = begun
        services: list[service.Service] = [service.Thread("arrivals", self._arrive)]
        for number in range(len(traces.SPEEDS)):
            services.append(
                service.Thread(f"machine{number}", lambda stop, n=number: self._serve(n, stop))
            )
        return services

    def wait(self, timeout_s: float) -> bool:
        """Return whether every job was completed in time."""
        return self._over.wait(timeout_s)

    def figures(self) -> traces.Figures:
        """Return the figures of the trace, in its own seconds."""
        return traces.figures(self._waits, self._loads, self._ended)

    def _now(self) -> float:
        return (time.monotonic() - self._begun) * self._scale

    def _arrive(self, stop: threading.Event) -> None:
        with closing(db.connect(url=self._url)) as conn:
            for number, job in enumerate(self._trace.arrivals):
                if stop.wait(max(0.0, (job.at_s - self._now()) / self._scale)):
                    return
                conn.execute(
                    "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue,"
                    " required_model, priority, ref_heads)"
                    " VALUES ('r', %s, 'm', 'gpu', %s, %s, '{}')",
                    (str(number), job.model, job.priority),
                )

    def _serve(self, number: int, stop: threading.Event) -> None:
        with closing(db.connect(url=self._url)) as conn:
            machine = _Machine(conn, number, self._policy, self._scale)
            done: claims.Done | None = None
            while not stop.is_set() and not self._over.is_set():
                job = machine.claim(done)
                if done is not None:
                    self._completed()
                done = None
                if job is None:
                    stop.wait(LOOK_S)
                    continue
                done = self._work(machine, job, traces.SPEEDS[number], stop)

    def _work(
        self, machine: _Machine, job: Row, speed: float, stop: threading.Event
    ) -> claims.Done | None:
        model = job["required_model"]
        if machine.model != model:
            machine.hold(None)
            load_s = self._trace.load_s[model] / speed / self._scale
            stop.wait(load_s)
            statements.models.learn_load(
                machine.conn, host=machine.host, model=model, seconds=load_s
            )
            machine.hold(model)
            with self._lock:
                self._loads += 1
        arrival = self._trace.arrivals[int(job["node_id"])]
        with self._lock:
            self._waits.append((arrival.priority, self._now() - arrival.at_s))
        run_s = arrival.run_s / speed / self._scale
        if stop.wait(run_s):
            return None
        # A real worker's seconds hold the load too, and its event takes it off again.
        lease = job_tables.lease_of(job_tables.NODE_JOBS, job)
        return claims.Done(lease, outcomes.Outcome("completed", run_s))

    def _completed(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._ended = self._now()
                self._over.set()


class _Machine:
    """A worker's claims and reports."""

    def __init__(self, conn: db.Connection, number: int, policy: sim.Policy, scale: float) -> None:
        self.conn = conn
        self.host = f"machine{number}"
        self.model: str | None = None
        self._reported = 0.0
        self._job: str | None = None
        self._who = claims.Claimant(
            f"w{number}",
            self.host,
            "gpu",
            policy="balanced" if policy.rule == "balanced" else "strict",
            grace_s=policy.grace_s / scale if policy.grace_s > 0 else policy.grace_s,
            bound_s=policy.bound_s / scale,
        )
        self._report()

    def hold(self, model: str | None) -> None:
        """Report which model is loaded."""
        self.model = model
        self._report()

    def claim(self, done: claims.Done | None) -> Row | None:
        """Complete one job and take the next, in the worker's one round trip."""
        who = self._who._replace(model=self.model, models=None)
        claim = claims.claim(job_tables.NODE_JOBS, who, done=[done] if done else [])
        job = next((row["body"] for row in db.run(self.conn, claim)), None)
        was, self._job = self._job, job["id"] if job else None
        if (was is None) != (job is None) or time.monotonic() - self._reported > BEAT_S:
            self._report()
        return job

    def _report(self) -> None:
        self._reported = time.monotonic()
        statements.workers.report(
            self.conn,
            worker_id=self._who.worker_id,
            host_label=self.host,
            queue="gpu",
            pid=1,
            state="busy" if self._job else "idle",
            job_ids=[self._job] if self._job else [],
            detail="{}",
            obey=True,
            concurrency=1,
            current_model=self.model,
            known_models=[],
            vram_total_mb=None,
        )


def play(
    where: server.Server, given: traces.Trace, policies: Sequence[sim.Policy], scale: float
) -> dict[str, traces.Figures]:
    """Return the figures of each policy for the trace; raise RuntimeError if one takes too long."""
    longest_s = given.arrivals[-1].at_s / scale
    with ExitStack() as stack:
        plays: dict[str, Play] = {}
        for number, policy in enumerate(policies):
            url = stack.enter_context(where.database(f"fleet{number}"))
            plays[policy.name] = Play(url, given, policy, scale)
            plays[policy.name].prepare()
        begun = time.monotonic()
        with ExitStack() as running:
            for each in plays.values():
                for one in each.services(begun):
                    running.enter_context(one)
            found: dict[str, traces.Figures] = {}
            for name, each in plays.items():
                if not each.wait(max(10.0, begun + 4 * longest_s + 30 - time.monotonic())):
                    raise RuntimeError(f"{name} did not end in time")
                found[name] = each.figures()
    return found


def run(where: server.Server, options: argparse.Namespace) -> int:
    """Play trace after trace until the time is over, and print a table per offered load."""
    until = time.monotonic() + options.minutes * 60
    found: dict[float, dict[str, list[traces.Figures]]] = {}
    seed = 0
    while seed == 0 or time.monotonic() < until:
        for offered in options.load:
            given = traces.trace(options.kind, offered, seed=seed, hours=options.hours)
            rows = found.setdefault(offered, {policy.name: [] for policy in sim.POLICIES})
            for name, figures in play(where, given, sim.POLICIES, options.scale).items():
                rows[name].append(figures)
        seed += 1
    about = traces.KINDS[options.kind].about
    for offered, rows in found.items():
        sys.stdout.write(
            f"\n{_counted(seed)} of {options.hours:g} h at {options.scale:g} times the speed,"
            f" {about}, {offered:.0%} offered load, real claims\n\n"
        )
        sys.stdout.write("\n".join(sim.table(rows)) + "\n")
    return 0


def _counted(number: int) -> str:
    """Return `1 trace`, `2 traces`."""
    return f"{number} trace" if number == 1 else f"{number} traces"


def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="no new trace after; default 5")
    parser.add_argument("--scale", type=float, default=200.0, help="times as fast; default 200")
    parser.add_argument("--hours", type=float, default=3.0, help="length of a trace; default 3")
    parser.add_argument("--kind", choices=traces.KINDS, default="mixed", help="default: mixed")
    parser.add_argument("--load", type=float, nargs="+", default=[0.35, 0.5, 0.7], metavar="SHARE")
    parser.add_argument("--dsn", help="a server to use; its database must be named *_bench")
    options = parser.parse_args(argv)
    with server.scratch_folder() as scratch, server.running(options.dsn, scratch) as where:
        return run(where, options)


if __name__ == "__main__":
    raise SystemExit(main())
