"""Under any faults the rows equal those of a simple model, and all work ends afterwards."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

import queue_workflows
from tests.support import fleet, fleet_apps, fleet_base, fleet_faults, fleet_workers, invariants
from tests.support import fleet_model as model
from tests.support.examples import examples
from tests.support.fleet_base import graphs

EXAMPLES = int(os.environ.get("FLEET_MACHINE_EXAMPLES", "0"))
"""For long runs by hand, which are random; 0: the few, always the same, of every test run."""
STEPS = int(os.environ.get("FLEET_MACHINE_STEPS", "45"))
"""Most rules that one example is made of."""
PHASES = (Phase.generate,) if os.environ.get("FLEET_MACHINE_RAW") else tuple(Phase)
"""Set: a failure is shown as it was found, at once; else in its shortest form, minutes later."""


class Machine(fleet_apps.Apps, fleet_workers.Workers, fleet_faults.Faults):
    """Apps, workers, orchestrators, operators and faults in any order."""

    @initialize(first=graphs(), second=graphs())
    def begin(self, first: dict[str, model.Node], second: dict[str, model.Node]) -> None:
        for graph in (first, second):
            self.submit(graph, 100, True)
            self.enqueue_ingest(100, 2)
        self.compare()
        self.all_claim(True, 0)

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.superseded_claims_write()
        self.compare()
        assert invariants.broken(self.conn) == []

    def compare(self) -> None:
        """The rows are the model's."""
        found = self.look_at_rows()

        def rows(*kinds: str) -> list[Any]:
            return [row for kind in kinds for row in found.get(kind, [])]

        def named(*kinds: str) -> list[tuple[str, ...]]:
            return sorted((row["run_id"], row["node_id"], row["facts"]) for row in rows(*kinds))

        jobs = {row["id"]: tuple(row["facts"]) for row in rows("node", "ingest")}
        assert jobs == {job.id: job.facts() for job in self.fleet.jobs}
        runs = {row["id"]: tuple(row["facts"]) for row in rows("run")}
        assert runs == {run.id: run.facts() for run in self.fleet.runs}
        events = [(run.id, *event) for run in self.fleet.runs for event in run.open]
        assert named("event") == sorted(events)
        answers = [(each.run.id, each.node, each.status) for each in self.fleet.answers]
        assert named("answer") == sorted(answers)
        flagged = {(row["run_id"], row["node_id"]): row["facts"] for row in rows("flag")}
        assert flagged == self.flagged

    # Faults stop.

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:  # else a rule has failed already
            self.all_ends()

    def all_ends(self) -> None:
        for host, queue in [*self.fleet.off]:
            self.switch(host, queue, None, None)
        for slot in self.slots:
            if slot.process.work is not None:
                self.finish_in(slot, "completed", claim=False)
        for job in self.fleet.running:
            self.change(job, "lease_expires_at = now() - interval '1 s'")
            job.lapsed = True
        self.settle()
        while asking := [(run, node) for run in self.fleet.runs for node in run.asking()]:
            assert {run.status for run, _ in asking} == {"running"}
            assert {run for run, _ in asking} >= {run for run in self.fleet.runs if run.live}
            for run, node in asking:
                queue_workflows.submit_input(run.id, node, None)
                self.fleet.answers.append(model.Answer(run, node))
            self.settle()
        assert {run.status for run in self.fleet.runs} <= {*model.TERMINAL}
        assert {job.status for job in self.fleet.jobs} <= {*model.TERMINAL, "skipped"}
        assert not [run for run in self.fleet.runs if run.open]
        assert invariants.stuck(self.conn) == []

    def settle(self) -> None:
        """Orchestrators and workers do what there is to do, as long as there is anything."""
        for turn in range(100):
            self.time_passes()
            self.reclaim(self.orchestrators[turn % 2])
            self.orchestrate(turn % 2, "look")
            self.look_at_rows()
            worked = False
            for slot in self.slots:
                while self.claim_in(slot, True, False):
                    worked = True
                    self.finish_in(slot, "completed", claim=False)
                    self.look_at_rows()
            self.nothing_is_wrong()
            if not worked:
                self.orchestrate(0, "look")
                return
        raise AssertionError("it does not end")


@pytest.fixture
def world(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Generator[fleet_base.World]:
    caplog.set_level(logging.CRITICAL)  # they say of each fault what they should
    fleet.hold_waits(monkeypatch)
    with db.connect() as conn, db.connect() as lives:
        made = fleet_base.World(conn, lives)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.timeout(900)
def test_under_any_faults_a_fleets_rows_are_right_and_all_ends(world: fleet_base.World) -> None:
    machine = type("Fleet", (Machine,), {"world": world})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or examples(25),
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            phases=PHASES,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
