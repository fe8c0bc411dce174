"""The fleet benchmark plays a trace with real claims to its end."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from benchmarks import fleet, fleet_sim, fleet_trace

pytestmark = pytest.mark.slow
"""They test the benchmark; `test_invariant_gpu_claims.py` and `test_fleet_rule.py` the claims."""


@pytest.fixture
def url(migrated_database: str) -> str:
    return migrated_database


@pytest.mark.parametrize("policy", fleet_sim.POLICIES[1::3], ids=lambda policy: policy.name)
def test_every_job_of_a_trace_is_claimed_and_completed(url: str, policy: fleet_sim.Policy) -> None:
    from queue_workflows import db

    given = fleet_trace.trace("mixed", 0.3, seed=3, hours=0.1)
    play = fleet.Play(url, given, policy, scale=600.0)
    play.prepare()
    with ExitStack() as running:
        for one in play.services(time.monotonic()):
            running.enter_context(one)
        assert play.wait(60)
    found = play.figures()
    assert 0 < found.loads <= len(given.arrivals)
    assert 0 <= found.mean <= found.longest <= found.makespan
    with db.connect(url=url) as conn:
        rows = conn.execute("SELECT status, count(*) AS n FROM workflow_node_jobs GROUP BY 1")
        assert [tuple(row.values()) for row in rows] == [("completed", len(given.arrivals))]
        learned = conn.execute("SELECT max(runs) > 10 AS more FROM gpu_models").fetchone()
        assert learned == {"more": True}
