"""Which nodes have printed since a time, as `show --follow` reads their logs."""

from __future__ import annotations

from typing import Any

from queue_workflows.engine import logs
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
    transitions.write_log(conn, jobs["b"], None, "more")

    def logged(*given: Any) -> list[str]:
        found = logs.nodes_that_logged(conn, run_id, *given)
        return [row["node_id"] for row in found]

    assert logged(None, None) == ["a", "c", "d", "b"]
    since = logs.nodes_that_logged(conn, run_id, None, None)[2]["updated_at"]
    assert logged(since, None) == ["d", "b"]
    assert logged(since, ["d", "a"]) == ["d"]
