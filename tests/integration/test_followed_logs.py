"""Which nodes have printed or streamed since a time, as `show --follow` reads it."""

from __future__ import annotations

from typing import Any

from queue_workflows.db import statements
from tests.support import factories, transitions


def test_the_nodes_that_logged_come_in_the_order_of_their_last_write(
    conn: Any,
) -> None:
    run_id = factories.run(conn)
    jobs: dict[str, dict[str, Any]] = {}
    for name in "abcd":
        factories.node(conn, run_id, name)
        jobs[name] = transitions.claim_node(conn)
        transitions.write_log(conn, jobs[name], name)
    silent = factories.node(conn, run_id, "silent")
    factories.ingest(conn, id=silent["id"])
    transitions.write_log(conn, transitions.claim_ingest(conn), "of an ingest job of the same id")
    transitions.write_log(conn, jobs["b"], None, "more")

    def logged(since: Any, nodes: Any) -> list[str]:
        found = statements.logs.nodes_that_logged(conn, run_id=run_id, since=since, nodes=nodes)
        return [row["node_id"] for row in found]

    assert logged(None, None) == ["a", "c", "d", "b"]
    since = statements.logs.nodes_that_logged(conn, run_id=run_id, since=None, nodes=None)[2][
        "updated_at"
    ]
    assert logged(since, None) == ["d", "b"]
    assert logged(since, ["d", "a"]) == ["d"]


def test_the_streams_of_nodes_that_run_or_have_just_ended_are_live(conn: Any) -> None:
    run_id = factories.run(conn)
    for name in ("runs", "just", "long", "silent"):
        factories.node(conn, run_id, name)
        job = transitions.claim_node(conn)
        assert name == "silent" or transitions.stream(conn, job, 1, "a", "b")
        if name in ("just", "long"):
            transitions.complete(conn, job)
    conn.execute(
        "UPDATE workflow_node_jobs SET finished_at = now() - interval '11 s' WHERE node_id = 'long'"
    )

    def streaming(nodes: list[str] | None, *, live: bool) -> list[str]:
        found = statements.job_parts.streaming_nodes(
            conn, run_id=run_id, nodes=None if nodes is None else [*nodes], live=live
        )
        assert {(row["claim_no"], row["seq"]) for row in found} <= {(1, 2)}
        return [row["node_id"] for row in found]

    assert streaming(None, live=True) == ["runs", "just"]
    assert streaming(None, live=False) == ["runs", "just", "long"]
    assert streaming(["long", "runs"], live=False) == ["runs", "long"]
