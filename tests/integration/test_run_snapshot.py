"""The snapshot of a run that commands read: complete, bounded, and despite a lost connection."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest

from queue_workflows import config, dispatcher, errors, node_queue, run_store
from queue_workflows.cli import run_views, texts
from tests.support import flow


def started(count: int) -> str:
    nodes = [{"id": f"n{i}", "node": "m"} for i in range(count)]
    config.set_workflow_provider(
        lambda name: {
            "name": name,
            "steps": [
                {"id": "work", "kind": "pipeline", "pipeline": "p"},
                {"id": "ask", "kind": "input", "widget": "confirm", "depends_on": ["work"]},
            ],
        },
        lambda name: {"name": name, "nodes": nodes},
    )
    run_id = run_store.insert_run(workflow_name="w")["id"]
    dispatcher.start_run(run_id)
    return run_id


@pytest.fixture
def reader(db: ModuleType) -> object:
    made: list[run_views.Reader] = []

    def make(run_id: str) -> run_views.Reader:
        made.append(run_views.Reader(run_id))
        return made[0]

    yield make
    for each in made:
        each.close()


def test_steps_come_in_the_workflows_order_with_what_has_no_row_yet(reader) -> None:  # type: ignore[no-untyped-def]
    run_id = started(3)
    assert node_queue.claim_next_cpu_job(host="box")
    seen = reader(run_id).read()
    assert [(s.name, s.total, s.counts, s.state) for s in seen.steps] == [
        ("work", 3, {"queued": 2, "running": 1}, "running"),
        ("ask", 1, {}, "waiting"),
    ]
    assert [node["status"] for node in seen.nodes] == ["running", "queued", "queued"]
    assert (seen.total, seen.done, seen.over) == (4, 0, False)


def test_the_items_of_a_map_count_as_nodes_of_its_step(reader, toy: flow.Flow) -> None:  # type: ignore[no-untyped-def]
    def draw(inputs: dict[str, int]) -> dict[str, int]:
        return {"at": 1 // inputs["by"]}

    flow.body(draw, "draw")
    given = {"inputs": {"by": {"$from": "item"}}}
    each = {"id": "m", "kind": "map", "over": [1, 2, 0], "may_fail": 1, "pipeline": "draw"}
    toy.define(
        flow.step("scan"),
        each | given | {"depends_on": ["scan"]},
        flow.step("end", depends_on=["m"]),
        scan=flow.nodes(scan=""),
        draw=[{"id": "draw", "inputs": [{"name": "by", "from": "pipeline.by"}]}],
        end=flow.nodes(end=""),
    )
    run_id = toy.submit()
    toy.go()
    steps = [(step.name, step.done, step.total) for step in reader(run_id).read().steps]
    assert steps == [("scan", 1, 1), ("m", 3, 4), ("end", 1, 1)]


def test_of_a_large_run_only_what_matters_is_listed(reader) -> None:  # type: ignore[no-untyped-def]
    run_id = started(texts.SMALL + 40)
    for _ in range(texts.SHOWN + 1):
        node_queue.claim_next_cpu_job(host="box")
    seen = reader(run_id).read()
    assert seen.steps[0].counts == {"running": texts.SHOWN + 1, "queued": 59}
    assert len(seen.nodes) == texts.SHOWN
    assert {node["status"] for node in seen.nodes} == {"running"}


def test_a_lost_connection_is_reported_once_and_opened_again(  # type: ignore[no-untyped-def]
    db: ModuleType, reader, dsn: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    reading = reader(started(1))
    assert reading.read()
    with db.connect() as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname ="
            " current_database() AND application_name = 'queue_workflows'"
            " AND pid <> pg_backend_pid()"
        )
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
    assert reading.read() is None
    assert reading.read() is None
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
    assert reading.read()
    assert [r.message.split(":")[0] for r in caplog.records if "database" in r.message] == [
        "waiting for the database",
        "the database is back",
    ]


def test_a_deleted_run_ends_the_reading(reader) -> None:  # type: ignore[no-untyped-def]
    run_id = started(1)
    reading = reader(run_id)
    assert reading.read()
    run_store.delete_run(run_id)
    with pytest.raises(errors.UnknownJob, match=run_id):
        reading.read()


@pytest.mark.usefixtures("db")
def test_a_summary_has_the_workers_of_a_run_and_their_times() -> None:
    run_id = started(2)
    job = node_queue.claim_next_cpu_job(host="box")
    assert job
    node_queue.mark_completed(job["id"], context_delta={}, seconds=2.5)
    found = run_views.summary(run_id)
    assert found["longest_chain"] == {"nodes": ["work/n0", "ask"], "seconds": 2.5}
    assert found["nodes"] == {"completed": 1, "queued": 1}
    assert found["workers"] == [], "an operator completed it"


@pytest.mark.usefixtures("db")
def test_the_longest_chain_of_a_very_large_run_is_not_sought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_id = started(2)
    job = node_queue.claim_next_cpu_job(host="box")
    assert job
    node_queue.mark_completed(job["id"], context_delta={}, seconds=2.5)
    monkeypatch.setattr(run_views, "CHAIN_MAX", 2)
    found = run_views.summary(run_id)
    assert (found["nodes_total"], found["nodes"]) == (3, {"completed": 1, "queued": 1})
    assert found["longest_chain"] == {"nodes": [], "seconds": 0}
