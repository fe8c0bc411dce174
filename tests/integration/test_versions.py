"""Versions of nodes: definitions store them, claims obey them, and `why` explains them."""

from __future__ import annotations

import time
from typing import Any

import pytest

import queue_workflows
from queue_workflows import check, config, db, errors, jobs
from queue_workflows.declare import node, workflow
from tests.support import factories, tabled, transitions, worker_reports
from tests.support.wait import patience

OTHER = ["m@1", "n@4"]


def who(
    *versions: str, worker_id: str = "w1", queue: str = "cpu", **more: Any
) -> transitions.Claimant:
    return transitions.who(queue, worker_id, versions=[*versions] or None, **more)


def taken(conn: db.Connection, claimant: transitions.Claimant) -> str | None:
    return next((job["node_id"] for job in transitions.claim(conn, claimant)), None)


# --- declared and frozen -------------------------------------------------------------------------


def test_a_version_that_is_no_positive_number_is_refused() -> None:
    cases: list[Any] = [0, -1, True, "3", 1.0, [], 10**9 + 1, 10**5000, float("nan"), b"1"]
    for version in cases:
        with tabled.case(version):
            with pytest.raises(
                errors.InvalidConfig, match="version must be a whole number from 1 to"
            ):
                queue_workflows.register_node("m", lambda: None, version=version)
            with pytest.raises(errors.InvalidConfig, match="version must be"):
                node(version=version)(lambda: None)
            with pytest.raises(errors.InvalidConfig, match="version must be"):
                config.set_node_versions({"fine": 2, "m": version})
            assert config.get_config().node_versions == {}


def test_the_definition_has_the_versions_of_nodes_in_maps_and_loops() -> None:
    @node(version=3)
    def versioned(item: int) -> dict[str, Any]:
        return {"item": item}

    @node
    def plain(items: list[Any]) -> dict[str, Any]:
        return {"items": items}

    @workflow
    def with_versions(numbers: list[int]) -> None:
        plain(versioned.map(numbers))

    found = check.workflow("with_versions").definition
    assert found is not None
    nodes = found["nodes"]
    assert [each.get("version") for each in nodes] == [None, None]
    assert [each["version"] for each in nodes[0]["map"]["body"]] == [3]


# --- claims --------------------------------------------------------------------------------------


def test_a_claim_takes_only_versions_that_the_worker_has(conn: db.Connection) -> None:
    run_id = factories.run(conn)
    rows = [("a", "m@2", 100), ("b", "m@3", 100), ("c", None, 100)]
    rows += [("d", "m@3", 50), ("e", None, 60), ("f", "n@4", 70)]
    for node_id, version, priority in rows:
        factories.node(conn, run_id, node_id, required_version=version, priority=priority)
    assert [taken(conn, who()) for _ in range(3)] == ["e", "c", None]
    assert [taken(conn, who("m@3", "n@4", "x@1")) for _ in range(4)] == ["d", "f", "b", None]
    assert taken(conn, who("m@2")) == "a"


@pytest.mark.parametrize("batch", [False, True])
def test_versions_keep_the_order_of_the_queue(conn: db.Connection, batch: bool) -> None:
    run_id = factories.run(conn)
    for number in range(12):
        version = ("m@1", None, "n@4", "z@9")[number % 4]
        factories.node(conn, run_id, f"n{number:02}", required_version=version)
    if batch:
        found = [job["node_id"] for job in transitions.claim(conn, who(*OTHER), 20)]
    else:
        found = [taken(conn, who(*OTHER)) for _ in range(9)]
    assert found == [f"n{number:02}" for number in range(12) if number % 4 < 3]
    assert taken(conn, who(*OTHER)) is None


def test_an_overflow_host_takes_the_newest_of_a_version(conn: db.Connection) -> None:
    run_id = factories.run(conn)
    for number in range(3):
        factories.node(conn, run_id, f"v{number}", required_version="m@1")
        factories.node(conn, run_id, f"p{number}")
    newest = who("m@1", newest=True)
    found = [taken(conn, newest) for _ in range(7)]
    assert found == ["v2", "v1", "v0", "p2", "p1", "p0", None]


@pytest.mark.parametrize("policy", ["strict", "balanced"])
def test_a_gpu_claim_takes_only_versions_that_the_worker_has(
    conn: db.Connection, policy: str
) -> None:
    run_id = factories.run(conn)
    for node_id, version, model in [("a", "m@2", "x"), ("b", "m@3", "x"), ("c", None, "x"),
                                    ("d", "m@2", None), ("e", "m@3", None)]:  # fmt: skip
        factories.node(
            conn, run_id, node_id, queue="gpu", required_version=version, required_model=model
        )
    old = who("m@2", queue="gpu", models=["x"], policy=policy)
    assert taken(conn, who(queue="gpu", policy=policy)) == "c"
    assert {taken(conn, old), taken(conn, old)} == {"a", "d"}
    assert taken(conn, old) is None
    new = who("m@3", queue="gpu", policy=policy)
    assert {taken(conn, new), taken(conn, new)} == {"b", "e"}


def test_locked_jobs_of_a_version_are_skipped(dsn: str, conn: db.Connection) -> None:
    run_id = factories.run(conn)
    first = factories.node(conn, run_id, "a", required_version="m@1")
    factories.node(conn, run_id, "b", required_version="m@1")
    factories.node(conn, run_id, "c", required_version="n@4")
    with db.connect() as other, other.transaction():
        other.execute("SELECT FROM workflow_node_jobs WHERE required_version = 'm@1' FOR UPDATE")
        assert taken(conn, who(*OTHER)) == "c"
        assert taken(conn, who(*OTHER)) is None
    assert taken(conn, who(*OTHER)) == first["node_id"]


def test_a_claim_apart_obeys_versions(conn: db.Connection) -> None:
    run_id = factories.run(conn)
    factories.node(conn, run_id, "a", required_version="m@2")
    mine = factories.node(conn, run_id, "b", required_version="m@1")
    assert transitions.claim_apart(conn, who("m@1")) == mine["id"]


def test_a_queue_full_of_other_versions_does_not_slow_claims(conn: db.Connection) -> None:
    run_id = factories.run(conn)

    def fill(count: int, version: str) -> None:
        conn.execute(
            "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, priority,"
            " required_version) SELECT %s, %s || n, 'm', 'cpu', 1, %s"
            " FROM generate_series(1, %s) n",
            (run_id, version, version, count),
        )

    def reads(claimant: transitions.Claimant) -> int:
        """Return how many blocks a claim of nothing reads, once it is planned."""
        row = None
        for _ in range(2):
            row = conn.execute(
                "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT"
                " queue_workflows_node_step(%s, 'box', 'cpu', 600, true, false, false, false, NULL,"
                " NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,"
                " p_versions => %s::text[])",
                (claimant.worker_id, claimant.versions),
            ).fetchone()
        assert row is not None
        plan = row["QUERY PLAN"][0]["Plan"]
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    fill(10, "m@2")
    few = [reads(who()), reads(who("m@1", "m@3", "n@1"))]
    fill(20_000, "m@9")
    conn.execute("ANALYZE workflow_node_jobs")
    many = [reads(who()), reads(who("m@1", "m@3", "n@1"))]
    assert all(after < before + 40 for before, after in zip(few, many, strict=True)), (few, many)
    factories.node(conn, run_id, "mine", required_version="n@1", priority=100)
    factories.node(conn, run_id, "plain", priority=200)
    started = time.monotonic()
    assert [taken(conn, who("n@1")) for _ in range(3)] == ["mine", "plain", None]
    assert time.monotonic() - started < patience(1)


# --- why -----------------------------------------------------------------------------------------


def test_why_names_the_version_and_the_remedy(conn: db.Connection) -> None:
    job = factories.node(conn, required_version="m@3")
    worker_reports.report(conn, who("m@2"))
    worker_reports.report(conn, who(worker_id="w2"))
    found = jobs.explain(job["id"], conn=conn)
    assert found is not None
    assert (found["clause"], found["can_run"]) == ("version", False)
    assert "no live worker of queue cpu has version 3 of node m" in found["detail"]
    assert f"queue-workflows upgrade {job['run_id']}" in found["detail"]
    assert [each["detail"] for each in found["workers"]] == [
        "the job needs version 3 of node m, and the worker has version 2",
        "the job needs version 3 of node m, and the worker has no version of it",
    ]
    worker_reports.report(conn, who("m@3", worker_id="w3"))
    found = jobs.explain(job["id"], conn=conn)
    assert found is not None
    assert (found["clause"], found["can_run"]) == (None, True)
    assert [each["clause"] for each in found["workers"]] == ["version", "version", "next"]
