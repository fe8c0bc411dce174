"""The ways of `tests/support/tracer.py` stay within the widths of `tests/unit/test_budgets.py`.

A way that became wider fails; `python -m tests.support.tracer ingest` prints it for a comparison
with the commit before. A way that became much narrower fails too, so that its bound is lowered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from queue_workflows import db
from tests.support import tracer
from tests.support.commands import Commands
from tests.unit import test_budgets

SLACK = 0.15
"""How far a width may be below its bound; some functions run on a busy machine alone."""
SEEN = {
    "ingest": {
        ("worker/desk.py", "_record_and_claim"),  # claims and records, in the worker
        ("run/job_loop.py", "_run"),  # in the executor
        ("run/task_call.py", "run"),
    },
    "run": {
        ("dispatch/advance.py", "plan_and_write"),  # in the orchestrator
        ("worker/queue_state.py", "claim"),
        ("run/task_call.py", "run"),
        ("worker/node_plans.py", "plan_ahead"),  # in the worker
    },
    "off": {("run/launcher.py", "_reap"), ("claim/record.py", "hand_back")},
    "lost-lease": {("claim/recovery.py", "reclaim_lapsed")},
    "show": {("cli/show.py", "show"), ("history.py", "get_run")},
}
"""Functions that the recorder has to see, one of each process."""


@pytest.mark.parametrize("way", tracer.WAYS)
def test_a_way_stays_within_its_width(
    cli: Commands, conn: db.Connection, tmp_path: Path, way: str
) -> None:
    functions = tracer.WAYS[way](tracer.Fleet(cli, conn, tmp_path))
    print(tracer.text(functions))
    names = {(each.file, each.name.rpartition(".")[2]) for each in functions}
    assert names >= SEEN[way], "the recorder misses a function, or it has another name now"
    found, bound = tracer.width(functions), test_budgets.WIDTHS[way]
    files = ", ".join(sorted({each.file for each in functions}))
    told = f"{found.functions} functions in {found.files} files, the bound is {bound}: {files}"
    assert found.functions <= bound[0] and found.files <= bound[1], told
    assert found.functions >= bound[0] * (1 - SLACK), f"lower the bound: {told}"


def test_each_way_has_a_bound() -> None:
    assert test_budgets.WIDTHS.keys() == tracer.WAYS.keys()
