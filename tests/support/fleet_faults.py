"""Define the fleet's state machine rules for faults, orchestrators and sweeps."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from queue_workflows import dispatcher
from tests.support import deaths, fleet, fleet_base
from tests.support import fleet_model as model
from tests.support.fleet_base import FAR, PICK, TABLES


class Faults(fleet_base.Base):
    """Faults, orchestrators and sweeps."""

    @precondition(lambda self: self.busy())
    @rule(
        pick=PICK, how=st.sampled_from(["reaped", "silent", "unseen"]),
        times=st.sampled_from([1, 3]), after_s=st.sampled_from([None, 40, 100]),
    )  # fmt: skip
    def die(self, pick: int, how: str, times: int, after_s: int | None) -> None:
        slot = self.one_busy(pick)
        job = slot.process.job
        for found in self.runs_again(job, times, slot):
            dead = self.replace(found)
            if how == "reaped" or times > 1:
                self.recover_claims(dead)
            elif how == "silent" and job.worker == dead.worker_id:
                self.age_heartbeat(job)
        if after_s is not None:
            self.sweep(0, after_s, "gone")

    def replace(self, slot: fleet.Slot) -> fleet.Process:
        dead = slot.renew_process()
        self.dead.append(dead)
        return dead

    @precondition(lambda self: any(job.worker in self.dead_ids() for job in self.fleet.running))
    @rule(pick=PICK)
    def reap(self, pick: int) -> None:
        self.recover_claims(self.dead[pick % len(self.dead)])

    def recover_claims(self, dead: fleet.Process) -> None:
        held = [job for job in self.fleet.running if job.worker == dead.worker_id]
        rows = deaths.recover(self.conn, deaths.killed(dead.pid), dead.host)
        assert sorted(row["id"] for row in rows) == sorted(job.id for job in held)
        for job in held:
            job.crash()

    @precondition(lambda self: self.fleet.running)
    @rule(pick=PICK)
    def lapse(self, pick: int) -> None:
        job = self.fleet.running[pick % len(self.fleet.running)]
        self.change(job, "lease_expires_at = now() - interval '1 s'")
        job.lapsed = True

    @precondition(lambda self: self.fleet.running)
    @rule(pick=PICK, noticed=st.booleans())
    def falls_silent(self, pick: int, noticed: bool) -> None:
        self.age_heartbeat(self.fleet.running[pick % len(self.fleet.running)])
        if noticed:
            self.sweep(0, 40, "gone")

    def age_heartbeat(self, job: model.Job) -> None:
        self.change(job, f"heartbeat_at = now() - {FAR}")
        self.conn.execute(
            f"UPDATE workers SET last_seen = now() - {FAR} WHERE worker_id = %s", (job.worker,)
        )
        job.quiet = True
        for process in (*self.dead, *(slot.process for slot in self.slots)):
            process.quiet = process.quiet or process.worker_id == job.worker

    @precondition(lambda self: self.stale and self.fleet.running)
    @rule(pick=PICK)
    def host_falls_silent(self, pick: int) -> None:
        host, queue = sorted(self.stale)[pick % len(self.stale)]
        self.conn.execute(
            f"UPDATE worker_heartbeats SET last_seen = now() - {FAR}"
            " WHERE host_label = %s AND queue = %s",
            (host, queue),
        )
        self.stale[host, queue] = True

    @precondition(lambda self: any(job.waits for job in self.fleet.jobs) or self.fleet.answers)
    @rule()
    def time_passes(self) -> None:
        self.conn.execute(
            "UPDATE workflow_input_submissions SET available_at = now() - interval '1 s'"
            " WHERE status = 'pending' AND available_at IS NOT NULL"
        )
        for table in TABLES:
            self.conn.execute(
                f"UPDATE {table} SET available_at = now() - interval '1 s'"
                " WHERE blocked_reason = 'not_due'"
            )
        for job in self.fleet.jobs:
            job.due = job.waits
        for answer in self.fleet.answers:
            answer.due = True

    # Orchestrators.

    @rule(which=st.integers(0, 1), what=st.sampled_from(["look", "look", "runs", "events"]))
    def orchestrate(self, which: int, what: str) -> None:
        one = self.orchestrators[which]
        with fleet.mind(one.mind):
            if what == "look":
                one.pool.check()
            else:
                one.pool.work(runs=what == "runs", events=what == "events", inputs=False)
        if what == "look":
            self.fleet.promote(self.fleet.jobs)
            self.fleet.work()
        else:
            self.fleet.work(runs=what == "runs", events=what == "events", inputs=False)

    @precondition(lambda self: any(run.status == "queued" for run in self.fleet.runs))
    @rule(pick=PICK)
    def start_again(self, pick: int) -> None:
        run = self.run_of(pick, "queued")
        dispatcher.start_run(run.id)
        run.start()

    @precondition(lambda self: self.fleet.runs)
    @rule(pick=PICK)
    def replay(self, pick: int) -> None:
        """Dispatch an event again whose dispatch was committed."""
        rows = self.conn.execute(
            "UPDATE workflow_dispatch_events SET processed_at = NULL WHERE id = (SELECT id FROM"
            " (SELECT id, row_number() OVER (ORDER BY id) AS n, count(*) OVER () AS of"
            " FROM workflow_dispatch_events WHERE processed_at IS NOT NULL) e"
            " WHERE n = 1 + %s %% of) RETURNING run_id, node_id, kind",
            (pick,),
        ).fetchall()
        for row in rows:
            run = next(run for run in self.fleet.runs if run.id == row["run_id"])
            run.open.append((row["node_id"], row["kind"]))

    @precondition(lambda self: any(job.run for job in self.fleet.jobs))
    @rule(pick=PICK, kind=st.sampled_from(["completed", "awaiting_input"]))
    def callback(self, pick: int, kind: str) -> None:
        job = self.job_of(pick, kind)
        if job.run is not None:
            fleet.callback(job.run.id, job.node, kind)
            if kind == "completed" and job.run.live and job.run.is_done(job.node):
                job.run.advance([job.node])

    @rule(
        which=st.integers(0, 1), after_s=st.sampled_from([0, 10, 40, 100]),
        what=st.sampled_from(["reclaim", "gone", "gone", "flag"]),
    )  # fmt: skip
    def sweep(self, which: int, after_s: int, what: str) -> None:
        """Sweep some time later; 100 s are a break in which it did not have the database."""
        one = self.orchestrators[which]
        for _ in range(4 if after_s == 40 else 0):
            one.now += 10
            self.reclaim(one)
        one.now += 0 if after_s == 40 else after_s
        if what == "reclaim":
            self.reclaim(one)
        elif what == "gone":
            one.sweeps.reclaim_lost_sessions()
            gone = {each.worker_id for each in self.dead if each.locks and each.quiet}
            for job in self.fleet.running if one.trusts(30) else ():
                if job.quiet and job.worker in gone:
                    job.lapse()
        else:
            self.conn.execute(  # the clock of the rows goes on by itself
                "UPDATE worker_heartbeats SET last_seen = now()"
                f" WHERE last_seen > now() - {FAR} / 2"
            )
            one.sweeps.flag_dead_workers()
            owners = {(job.worker.partition(":")[0], job.queue) for job in self.fleet.running}
            for key in owners & {*self.stale} if one.trusts(30) else ():
                self.flagged[key] = self.flagged[key] or self.stale[key]

    def reclaim(self, one: fleet.Orchestrator) -> None:
        """Reclaim lapsed leases as lapses, unless the orchestrator was away since the renewal."""
        had_s = one.had_s
        for table in TABLES:  # the clock of the rows goes on by itself
            self.conn.execute(
                f"UPDATE {table} SET heartbeat_at = now() WHERE status = 'running'"
                f" AND heartbeat_at > now() - {FAR} / 2"
            )
        one.reclaim()
        for job in self.fleet.running:
            if job.lapsed and had_s and not job.quiet:
                job.lapse()
            elif job.lapsed:
                job.back(front=True)
