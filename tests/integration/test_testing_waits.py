"""`queue_workflows.testing`: back-offs, apps that are imported already, runs that cannot start."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, db, declare, testing
from queue_workflows.testing import app_harness

DECLARED = """
import queue_workflows
from queue_workflows import declare

@declare.node
def shout(text: str) -> str:
    return text.upper()

@declare.workflow
def hello(text: str):
    shout(text)

def setup():
    queue_workflows.configure(ingest_queues={"chores"})
"""


NUMBERS = itertools.count()


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that declares in a submodule, imported as a test module would have done before."""
    name = f"letters_{next(NUMBERS)}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text(f"from {name}.flows import setup\n")
    (package / "flows.py").write_text(DECLARED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(declare, "_declared", {})
    made = importlib.import_module(name)
    config.reset_for_tests()
    yield made
    for each in (f"{name}.flows", name):
        del sys.modules[each]


def flaky_app() -> None:
    """Two nodes side by side, each with a second attempt, one of them due before the other."""
    calls = {"soon": 0, "late": 0}

    def body(name: str) -> Any:
        def run() -> dict[str, int]:
            calls[name] += 1
            if calls[name] == 1:
                raise ConnectionError(name)
            return {"calls": calls[name]}

        return run

    nodes = list[dict[str, Any]]()
    for name, base_s in (("soon", 600), ("late", 3600)):
        queue_workflows.register_node(name, body(name))
        backoff = {"kind": "constant", "base_s": base_s, "jitter": 0}
        nodes.append({"id": name, "retries": 1, "backoff": backoff})
    step = {"id": "s", "kind": "pipeline", "pipeline": "both"}
    queue_workflows.set_workflow_provider(
        {"flaky": {"name": "flaky", "steps": [step]}}.__getitem__,
        {"both": {"name": "both", "nodes": nodes}}.__getitem__,
    )


COMES_DUE = """
UPDATE {table} SET available_at = now()
 WHERE id = (SELECT id FROM {table} WHERE available_at > now() ORDER BY available_at LIMIT 1)
"""


def comes_due_after_the_work(monkeypatch: pytest.MonkeyPatch, table: str) -> list[int]:
    """Let the first back-off end once, between the work and the question what is due next.

    Returns a list that holds how many rows came due so.
    """
    original, moved = app_harness.Harness.work, list[int]()

    def work(self: app_harness.Harness) -> int:
        done = original(self)
        if not moved:
            with db.connect() as conn:
                moved.append(conn.execute(COMES_DUE.format(table=table).encode()).rowcount)
        return done

    monkeypatch.setattr(app_harness.Harness, "work", work)
    return moved


def test_a_back_off_that_has_just_ended_does_not_hide_the_later_ones(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = comes_due_after_the_work(monkeypatch, "workflow_node_jobs")
    with testing.harness(app=flaky_app, dsn=dsn, own=True) as flows:
        done = flows.run_workflow("flaky").completed()
    assert moved == [1]
    assert {name: node.attempts for name, node in done.nodes.items()} == {"s/soon": 1, "s/late": 1}


def test_a_task_whose_back_off_has_just_ended_is_seen_through(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def flaky() -> dict[str, int]:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError
        return {"calls": len(calls)}

    def app() -> None:
        queue_workflows.configure(ingest_queues={"chores"})
        queue_workflows.register_ingest_task("flaky", flaky, retries=1, backoff=600)

    moved = comes_due_after_the_work(monkeypatch, "ingest_jobs")
    with testing.harness(app=app, dsn=dsn, own=True) as flows:
        assert flows.run_task("flaky", queue="chores")["result"] == {"calls": 2}
    assert moved == [1]


@pytest.mark.parametrize("named", ["{}", "{}:setup", None])
def test_a_declared_app_that_is_imported_already_works(
    db: ModuleType, dsn: str, letters: ModuleType, named: str | None
) -> None:
    app = named.format(letters.__name__) if named else letters.setup
    for _ in range(2):
        with testing.harness(app=app, dsn=dsn, own=True) as flows:
            done = flows.run_workflow("hello", {"text": "x"}).completed()
            assert done.outputs == {"shout/shout": {"result": "X"}}


def test_an_app_does_not_get_what_another_app_declares(
    db: ModuleType, dsn: str, letters: ModuleType
) -> None:
    @declare.node
    def foreign() -> None: ...

    with testing.harness(app=f"{letters.__name__}:setup", dsn=dsn, own=True):
        assert set(config.get_config().node_map) == {"shout"}


def test_a_run_that_cannot_start_fails_its_test_with_the_reason(db: ModuleType, dsn: str) -> None:
    def app() -> None:
        queue_workflows.register_node("n", dict)

    stays = pytest.raises(AssertionError, match=r"stays queued: .*no workflow provider")
    with testing.harness(app=app, dsn=dsn, own=True) as flows, stays:
        flows.run_workflow("any")
