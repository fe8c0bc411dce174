"""The scheduler of `pytest -n`: it decides which process runs which tests."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = (
    "tests/unit/",
    "tests/e2e/test_benchmarks.py",
    "tests/e2e/test_connect.py",
    "tests/e2e/test_fleet.py",
    "tests/e2e/test_site.py",
    "tests/e2e/test_wheel.py",
    "tests/integration/test_declare_types.py",
    "tests/test_invariant_claim_plans.py",
    "tests/test_invariant_limits_race.py",
)
"""Files that one process runs as a whole: a fixture costs seconds, or all tests cost nothing."""


class Scheduling(LoadScopeScheduling):
    """Hand out one test at a time, and a file as a whole where that is cheaper."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0] if nodeid.startswith(TOGETHER) else nodeid
