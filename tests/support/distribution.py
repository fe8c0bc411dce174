"""Decide for `pytest -n` which process runs which tests."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

TOGETHER = (
    "tests/unit/",
    "tests/e2e/test_benchmarks.py",
    "tests/e2e/test_connect.py",
    "tests/e2e/test_second_machine.py",
    "tests/e2e/test_site.py",
    "tests/e2e/test_wheel.py",
    "tests/integration/test_declare_types.py",
    "tests/integration/test_soak_mutants.py",
    "tests/test_invariant_claim_plans.py",
    "tests/test_invariant_limits_race.py",
    "tests/test_no_ai_leads_import.py",
)
"""Files that one process runs as a whole: what their tests share costs seconds, or all tests cost
nothing."""
BATCH = 16
"""Other tests that are handed out at once: each hand-out costs a round trip of two processes."""


class Scheduling(LoadScopeScheduling):
    """Hand out some folders test by test, costly files as a whole, and all others in batches."""

    def __init__(self, config: Any, log: Any, *, one_by_one: tuple[str, ...]) -> None:
        # Else pytest-xdist hands out the largest scopes first, and the longest tests last.
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._one_by_one = one_by_one
        self._batch_of: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(TOGETHER):
            return nodeid.partition("::")[0]
        if nodeid.startswith(self._one_by_one):
            return nodeid
        return self._batch_of.setdefault(nodeid, f"batch {len(self._batch_of) // BATCH}")
