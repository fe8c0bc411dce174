"""Define the fleet's state machine rules for workers, and for claims that are lost."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.support import factories, fleet, fleet_base
from tests.support import fleet_model as model
from tests.support.fleet_base import ENDS, FAR, PICK


class Workers(fleet_base.Base):
    """Workers, and claims that are lost."""

    @precondition(lambda self: self.claimable())
    @rule(pick=PICK, promote=st.booleans(), reply_lost=st.sampled_from([False, False, True]))
    def claim(self, pick: int, promote: bool, reply_lost: bool) -> None:
        idle = [slot for slot in self.slots if slot.process.work is None]
        if idle:
            self.claim_in(idle[pick % len(idle)], promote, reply_lost)

    @rule(promote=st.booleans(), which=st.integers(0, 1))
    def all_claim(self, promote: bool, which: int) -> None:
        self.orchestrate(which, "look")
        self.look_at_rows()
        for slot in self.slots:
            if slot.process.work is None:
                self.claim_in(slot, promote, False)

    @precondition(lambda self: self.busy())
    @rule(how=ENDS)
    def all_finish(self, how: str) -> None:
        for slot in self.busy():
            self.finish_in(slot, how, claim=False)
            self.look_at_rows()

    def claim_in(self, slot: fleet.Slot, promote: bool, reply_lost: bool) -> bool:
        if not slot.process.reported:
            self.beat_in(slot)
        expected = self.fleet.next(slot.host, slot.queue, newest=slot.newest, promote=promote)
        work = slot.core.claim(promote, unseen=reply_lost)
        if expected is not None:
            expected.claim(slot.process.worker_id)
        if reply_lost:
            assert work is None
            if expected is not None:
                expected.back()
            return False
        assert (work and work.id) == (expected and expected.id)
        if work is not None and expected is not None:
            self.take(slot, work, expected)
        return work is not None

    def take(self, slot: fleet.Slot, work: fleet.Work, job: model.Job) -> None:
        slot.process.work, slot.process.job = work, job
        self.past.append(fleet.Past(job, work.lease))

    @precondition(lambda self: self.busy())
    @rule(
        pick=PICK, how=ENDS, claim=st.booleans(),
        cut=st.sampled_from([None] * 6 + ["before", "after"]),
    )  # fmt: skip
    def finish(self, pick: int, how: str, claim: bool, cut: str | None) -> None:
        self.finish_in(self.one_busy(pick), how, claim=claim, cut=cut)

    def finish_in(self, slot: fleet.Slot, how: str, *, claim: bool, cut: str | None = None) -> None:
        process = slot.process
        job, work, held = process.job, process.work, process.holds
        process.work = process.job = None
        if job.asks:
            how = "parked"  # it has no handler that could end otherwise
        with fleet.mind(slot.mind):
            following = slot.core.finish(work, fleet.outcome(how), claim, cut)
        expected = self.finished(slot, job, how, claim) if held else None
        if expected is not None:
            expected.claim(process.worker_id)
            if cut == "after":
                expected.back()
                expected = None
        assert (following and following.id) == (expected and expected.id)
        if expected is not None:
            self.take(slot, following, expected)

    def finished(self, slot: fleet.Slot, job: model.Job, how: str, claim: bool) -> model.Job | None:
        """End a job in the model, and claim what the same transaction claims next."""
        if how == "completed":
            job.become("completed")
            if job.run is not None and self.dispatched_ahead(job):
                assert job.run.live
                job.run.open.remove((job.node, "completed"))
                job.run.advance([job.node])
                self.look_at_rows()
            if claim:
                return self.fleet.next(slot.host, slot.queue, newest=slot.newest, promote=False)
        elif how == "failed":
            job.fail()
        elif how == "parked":
            job.park()
        else:
            job.back()
        return None

    def dispatched_ahead(self, job: model.Job) -> bool:
        """Return whether the worker has closed its event, and so dispatched what follows."""
        return factories.one(
            self.conn,
            "SELECT processed_at IS NOT NULL FROM workflow_dispatch_events WHERE job_id = %s"
            " AND kind = 'completed' AND claim_no = %s",
            job.id, job.claim_no,
        )  # fmt: skip

    @precondition(lambda self: self.busy())
    @rule(pick=PICK, act=st.sampled_from(["renew", "control", "stop", "late", "cancelled"]))
    def watch(self, pick: int, act: str) -> None:
        slot = self.one_busy(pick)
        process, job, held = slot.process, slot.process.job, slot.process.holds
        if job.asks:
            return  # it has no handler that could be ended
        hard = act == "control" and self.fleet.policy(slot.host, slot.queue) == "hard"
        if act == "cancelled" and not process.work.cancel_requested:
            act = "renew"
        code = slot.judge(act)
        if act == "renew":
            assert code == (None if held else 77)
            if held:
                job.lapsed = job.quiet = False
                assert process.work.cancel_requested or not job.over
        elif act == "control":
            assert code == (79 if hard else None)
            if held and hard:
                job.back(front=True)
        else:
            assert code == {"stop": 0, "late": 77, "cancelled": 79}[act]
            if held:
                job.back()
        if code is not None:
            self.heartbeat_expired(slot, surely=code != 0)
            self.replace(slot)

    def heartbeat_expired(self, slot: fleet.Slot, *, surely: bool = True) -> None:
        """Learn whether the end of a worker has set the heartbeat of its queue back.

        It does unless others of that queue were seen just now. How long ago is a matter of the real
        time; so it is demanded, if `surely`, only where there are none.
        """
        key = slot.host, slot.queue
        if key not in self.stale:
            return
        place = "host_label = %s AND queue = %s"
        old, alone = self.conn.execute(
            f"SELECT last_seen < now() - {FAR} / 2 AS old, NOT EXISTS (SELECT FROM workers"
            f" WHERE {place} AND worker_id <> %s AND state NOT IN ('stopped', 'dead')) AS alone"
            f" FROM worker_heartbeats WHERE {place}",
            (*key, slot.process.worker_id, *key),
        ).fetchall()[0].values()  # fmt: skip
        assert old or not (alone and surely)
        self.stale[key] = old

    @precondition(lambda self: self.busy())
    @rule(pick=PICK, code=st.sampled_from([75, 76, 78]), times=st.sampled_from([1, 1, 4]))
    def trip(self, pick: int, code: int, times: int) -> None:
        slot = self.one_busy(pick)
        job = slot.process.job
        for found in self.runs_again(job, times, slot):
            self.trip_in(found, code)

    def trip_in(self, slot: fleet.Slot, code: int) -> None:
        job, held = slot.process.job, slot.process.holds
        events = {code: event for event, code in fleet.GUARDS.items()}
        if job.asks:
            return  # it has no handler
        assert slot.judge(events[code]) == code
        self.heartbeat_expired(slot)
        if held:
            job.trip()
        self.replace(slot)

    def runs_again(self, job: model.Job, times: int, slot: fleet.Slot) -> Iterator[fleet.Slot]:
        """Yield the slot that runs the job, then the next one after an idle worker claimed it."""
        yield slot
        for _ in range(times - 1):
            self.compare()
            self.time_passes()
            self.all_claim(True, 0)
            held = [slot for slot in self.slots if slot.process.job is job and slot.process.holds]
            yield from held

    @precondition(lambda self: self.busy() and any(slot.process.quiet for slot in self.slots))
    @rule(pick=PICK)
    def beat(self, pick: int) -> None:
        quiet = [slot for slot in self.slots if slot.process.quiet]
        self.beat_in(quiet[pick % len(quiet)])

    def beat_in(self, slot: fleet.Slot) -> None:
        process = slot.process
        slot.beat()
        process.reported, process.quiet = True, False
        if process.work is not None or self.fleet.policy(slot.host, slot.queue) is None:
            self.stale[slot.host, slot.queue] = self.flagged[slot.host, slot.queue] = False

    @precondition(lambda self: self.past)
    @rule(pick=PICK, act=st.sampled_from(fleet.WRITES))
    def lost_claim_writes(self, pick: int, act: str) -> None:
        lost = [past for past in self.past if not past.is_held]
        if lost:
            assert not fleet.write(self.conn, lost[pick % len(lost)], act)

    def superseded_claims_write(self) -> None:
        """Write under each lost claim whose job runs under another; nothing may be written."""
        for past in self.past:
            if past.job.status == "running" and not past.is_held:
                self.writes += 1
                act = fleet.WRITES[self.writes % len(fleet.WRITES)]
                assert not fleet.write(self.conn, past, act)
