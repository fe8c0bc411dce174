"""Random workflows end in real processes as a slow interpreter of the docs says."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from types import ModuleType

import pytest

from queue_workflows import db, node_queue, run_store
from tests.support import reference
from tests.support.commands import Commands
from tests.support.wait import until

APP = ("--app", "tests.support.reference:setup")
SEEDS = range(120)
PASSES = 2
"""The second runs of the workflows meet processes that know their graphs."""


def workers(cli: Commands, *more: str, count: int = 2) -> None:
    cli.start("queue-orchestrator", *APP)
    for _ in range(count):
        cli.start("queue-claim-worker", "--queue=cpu", *APP, *more)


FLEETS: dict[str, Callable[[Commands], object]] = {
    "up": lambda cli: cli.start("queue-workflows", "up", *APP, "--cpu", "2", "--gpu", "0"),
    "workers": workers,
    "inline": lambda cli: workers(cli, "--inline"),
    # Many short jobs are claimed ahead, and one statement records several of them.
    "one worker": lambda cli: workers(cli, "--slots", "2", "--batch", "4", count=1),
}


def all_ended(cases: dict[str, reference.Case]) -> bool:
    """Answer the questions that wait, and return whether every run has ended."""
    with db.connection() as conn:
        asked = conn.execute(
            "SELECT j.run_id, j.node_id, r.workflow_name AS name"
            "  FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id"
            " WHERE j.status = 'awaiting_input' AND j.input_spec IS NOT NULL"
            "   AND r.status = 'running' AND NOT EXISTS ("
            "       SELECT FROM workflow_input_submissions s"
            "        WHERE s.run_id = j.run_id AND s.node_id = j.node_id)"
        ).fetchall()
        for row in asked:
            value = cases[row["name"]].answers[row["node_id"]]
            conn.execute(
                "INSERT INTO workflow_input_submissions (run_id, node_id, value)"
                " VALUES (%s, %s, %s)",
                (row["run_id"], row["node_id"], json.dumps(value)),
            )
        left = conn.execute(
            "SELECT FROM workflow_runs WHERE status IN ('queued', 'running') LIMIT 1"
        ).fetchall()
    return not left


@pytest.mark.parametrize("fleet", FLEETS)
def test_runs_end_as_the_docs_say(db: ModuleType, cli: Commands, fleet: str) -> None:
    cases = {f"w{seed}": reference.case(Random(seed)) for seed in SEEDS}
    cli.env[reference.SEEDS] = json.dumps([*SEEDS])
    FLEETS[fleet](cli)
    told: list[str] = []
    for number in range(PASSES):
        for name, case in cases.items():
            run_store.insert_run(
                run_id=f"{name}.{number}", workflow_name=name, context=case.context
            )
        until(lambda: all_ended(cases), timeout_s=120, every_s=0.1)
        for name, case in cases.items():
            run = run_store.get_run(f"{name}.{number}")
            assert run is not None
            jobs = node_queue.list_jobs_for_run(run["id"])
            told += [f"{name}: {each}" for each in reference.difference(case, dict(run), jobs)]
    assert not told, "\n".join(told)
