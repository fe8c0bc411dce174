"""The workflows that 0.3.0 was recorded with end as it ended them, in each kind of processes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from queue_workflows import db, run_store
from tests.oracle import app
from tests.support.commands import ROOT, Command, Commands
from tests.support.wait import until

APP = ("--app", "tests.oracle.app:setup")
PASSES = 2
"""A run of a workflow that the processes have met before takes other ways through them."""
_ENDS = """
SELECT r.id, r.status, r.out_dir, r.error,
       coalesce((SELECT jsonb_object_agg(j.node_id, j.status) FROM workflow_node_jobs j
                  WHERE j.run_id = r.id), '{}') AS nodes,
       coalesce((SELECT jsonb_object_agg(j.node_id, j.context_delta) FROM workflow_node_jobs j
                  WHERE j.run_id = r.id AND j.status = 'completed'), '{}') AS outputs
  FROM workflow_runs r
"""
_QUESTIONS = """
SELECT j.run_id, j.node_id FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id
 WHERE j.status = 'awaiting_input' AND j.input_spec IS NOT NULL AND r.status = 'running'
   AND NOT EXISTS (SELECT FROM workflow_input_submissions s
                    WHERE s.run_id = j.run_id AND s.node_id = j.node_id)
"""
_OPEN = "SELECT count(*) AS n FROM workflow_runs WHERE status IN ('queued', 'running')"


class End(NamedTuple):
    """The end of a run: its status, the status of each node, the outputs of completed ones."""

    run: str
    nodes: dict[str, str]
    outputs: dict[str, Any]
    error: str | None = None


def workers(cli: Commands, *more: str) -> list[Command]:
    return [
        cli.start("queue-orchestrator", *APP),
        *(cli.start("queue-claim-worker", "--queue=cpu", *APP, *more) for _ in range(2)),
        cli.start("queue-claim-worker", "--queue=gpu", *APP, *more),
    ]


FLEETS: dict[str, Callable[[Commands], object]] = {
    "up": lambda cli: cli.start("queue-workflows", "up", *APP, "--cpu", "2", "--no-ingest"),
    "workers": workers,
    "inline": lambda cli: workers(cli, "--inline"),
}


def submit(case: dict[str, Any], run_id: str, folder: Path) -> None:
    out_dir = str(folder / "runs" / case["id"]) if case["out_dir"] else None
    if case["submit"] == "api":
        run_store.insert_run(
            run_id=run_id,
            workflow_name=case["id"],
            context=case["context"],
            out_dir=out_dir,
            priority=case["priority"],
        )
        return
    with db.connection() as conn:
        conn.execute(
            "INSERT INTO workflow_runs (id, workflow_name, context, out_dir, priority)"
            " VALUES (%s, %s, %s, %s, %s)",
            (run_id, case["id"], json.dumps(case["context"]), out_dir, case["priority"]),
        )


def all_ended() -> bool:
    """Answer the questions that wait, and return whether every run has ended."""
    with db.connection() as conn:
        for row in conn.execute(_QUESTIONS).fetchall():
            case = app.cases()[row["run_id"].partition(".")[0]]
            (value,) = (each["value"] for each in case["answers"] if each["node"] == row["node_id"])
            conn.execute(
                "INSERT INTO workflow_input_submissions (run_id, node_id, value)"
                " VALUES (%s, %s, %s)",
                (row["run_id"], row["node_id"], json.dumps(value)),
            )
        left = conn.execute(_OPEN).fetchone()
    assert left is not None
    return not left["n"]


def ends(suffix: str, folder: Path) -> Iterator[tuple[str, End]]:
    """Yield each case's id and the end of its run."""
    with db.connection() as conn:
        rows = conn.execute(_ENDS).fetchall()
    for row in rows:
        case_id, _, number = row["id"].partition(".")
        if number == suffix:
            given = app.cases()[case_id]["out_dir"]
            root, shown = (str(folder), "@") if given else (row["out_dir"] or "?", "@default")
            outputs = json.loads(json.dumps(row["outputs"]).replace(root, shown))
            yield case_id, End(row["status"], row["nodes"], outputs, row["error"])


def wrong(case_id: str, now: End) -> str | None:
    """Return how a case did not end as it has to, or None."""
    was = End(**app.expected()[case_id])
    listed = app.differences()["cases"].get(case_id)
    if listed is not None and listed["reason"] in ("fails at once", "never ended"):
        told = contradictions(was, now)
        if now.run != listed["run"]:
            told.append(f"run {listed['run']} -> {now.run}")
        elif now.run == "failed":
            told += unexplained(was, now)
    else:
        own = was if listed is None else End(listed["run"], listed["nodes"], listed["outputs"])
        told = list(differing(own, now))
    return f"{case_id}: " + "\n    ".join(told) if told else None


def unexplained(was: End, now: End) -> list[str]:
    """Return the error of a failed run if it names no node that 0.3.0 could not complete either."""
    named = re.findall(r"^node '?([^\s':]+)", now.error or "")
    known = [node for node in named if was.nodes.get(node) not in ("completed", "skipped")]
    return [] if known else [f"it failed by: {now.error}"]


def contradictions(was: End, now: End) -> list[str]:
    """Return the nodes that ended one way in 0.3.0 and another way here.

    The run fails here before nodes end that could end in 0.3.0, or the other way round.
    """
    final = ("completed", "skipped", "failed")
    states = [
        f"{node}: {was.nodes[node]} -> {now.nodes[node]}"
        for node in was.nodes.keys() & now.nodes.keys()
        if was.nodes[node] != now.nodes[node] and {was.nodes[node], now.nodes[node]} <= {*final}
    ]
    outputs = [
        f"{node}: {was.outputs[node]!r:.300} -> {now.outputs[node]!r:.300}"
        for node in was.outputs.keys() & now.outputs.keys()
        if was.outputs[node] != now.outputs[node]
    ]
    return states + outputs


def differing(was: End, now: End) -> Iterator[str]:
    """Yield what differs."""
    if was.run != now.run:
        yield f"run {was.run} -> {now.run}"
    pairs: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
        (was.nodes, now.nodes),
        (was.outputs, now.outputs),
    )
    for old, new in pairs:
        for key in sorted(old.keys() | new.keys()):
            if old.get(key, "-") != new.get(key, "-"):
                yield f"{key}: {old.get(key, '-')!r:.300} -> {new.get(key, '-')!r:.300}"


@pytest.mark.parametrize("fleet", FLEETS)
def test_every_workflow_ends_as_in_0_3(
    db: ModuleType, cli: Commands, tmp_path: Path, fleet: str
) -> None:
    FLEETS[fleet](cli)
    for number in map(str, range(PASSES)):
        for case_id, case in app.cases().items():
            submit(case, f"{case_id}.{number}", tmp_path)
        until(all_ended, timeout_s=120, every_s=0.1)
        found = dict(ends(number, tmp_path))
        assert found.keys() == app.cases().keys()
        told = [text for case_id, now in found.items() if (text := wrong(case_id, now))]
        assert not told, "\n".join(told)


def test_each_difference_has_its_line_in_the_upgrade_guide() -> None:
    guide = " ".join((ROOT / "docs" / "differences-0-3-0.md").read_text().split())
    listed = app.differences()
    assert {case["reason"] for case in listed["cases"].values()} == listed["reasons"].keys()
    for reason, line in listed["reasons"].items():
        assert line in guide, f"docs/differences-0-3-0.md lacks the line for {reason!r}"
    for case_id, case in listed["cases"].items():
        was = app.expected()[case_id]["run"]
        assert (was in ("queued", "running")) >= (case["reason"] == "never ended"), case_id
        assert (was == "failed") >= (case["reason"] == "fails at once"), case_id
