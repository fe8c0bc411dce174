"""Lose the connection before or after the n-th statement, for every n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import db, errors, node_queue
from tests.support import flow, invariants, lost_replies, timeouts

ROUNDS = 30
COMMIT = "COMMIT"
QUIET = 2
"""So many runs in a row that were over before the n-th statement: there are no more."""
PARTS = 3
"""Each test takes every third statement, so that several processes share them."""


class Sabotage:
    """Closes the connection at the n-th statement or COMMIT of this process and raises."""

    def __init__(self, nth: int, *, after: bool) -> None:
        self.left = nth
        self.after = after
        self.hit = ""

    def around(self, act: Callable[[], Any], conn: Any, what: str) -> Any:
        """Execute a statement, of the orchestrator's connections or of a worker's links.

        What is lost after a statement of an open transaction is lost before it as well.
        """
        if self.after and what != COMMIT and _is_in_transaction(conn):
            return act()
        self.left -= 1
        if self.left:
            return act()
        self.hit = what[:60]
        if self.after:
            act()
        raise lost_replies.broken_error(conn, f"sabotage: {what}")


def _is_in_transaction(conn: Any) -> bool:
    """Return whether a connection of psycopg has begun one; each statement of a link is its own."""
    info = getattr(conn, "info", None)
    return info is not None and info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


@contextmanager
def sabotaged(monkeypatch: pytest.MonkeyPatch, plan: Sabotage) -> Iterator[None]:
    leave = psycopg.Transaction.__exit__

    def transaction_exit(self: psycopg.Transaction, kind: Any, *rest: Any) -> Any:
        if kind is not None:
            return leave(self, kind, *rest)
        return plan.around(lambda: leave(self, kind, *rest), self.connection, COMMIT)

    with monkeypatch.context() as patched, lost_replies.around_statements(plan.around):
        patched.setattr(psycopg.Transaction, "__exit__", transaction_exit)
        yield


class World:
    """A run of a diamond with a question in it, and those who bring it on."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.host = flow.Flow()
        queue_workflows.register_node("act", self._act)
        inputs = [{"name": "me", "from": "pipeline.me"}]
        one = [{"id": "n", "node": "act", "inputs": inputs}]
        self.host.define(
            flow.step("a", "one", inputs={"me": "a"}),
            flow.step("b", "one", inputs={"me": "b"}, depends_on=["a"]),
            flow.ask("q", depends_on=["a"]),
            flow.step("d", "one", inputs={"me": "d"}, depends_on=["b", "q"]),
            one=one,
        )
        self.run_id = self.host.submit()

    def _act(self, me: str) -> dict[str, Any]:
        self.ran[me] += 1
        return {"me": me}

    def bring_on(self) -> None:
        """Until the run is over, or nothing moves; what fails is tried again in the next round."""
        for _ in range(ROUNDS):
            for act in (self.host.look, self.host.work, self._answer):
                try:
                    act()
                except (db.Error, errors.ClaimLost):
                    continue
            if self._is_over():
                return

    def _answer(self) -> None:
        if flow.states(self.run_id).get("q") == "awaiting_input":
            try:
                queue_workflows.submit_input(self.run_id, "q", "yes")
            except errors.InputRefused:
                return

    def _is_over(self) -> bool:
        try:
            return flow.status(self.run_id) in ("completed", "failed")
        except db.Error:
            return False

    def close(self) -> None:
        self.host.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_connection_lost_at_any_statement_loses_and_doubles_nothing(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, after: bool, part: int
) -> None:
    timeouts.shorten_claim_retries(monkeypatch, 0.01)
    nth, quiet = part + 1 - PARTS, 0
    hit: list[str] = []
    while quiet < QUIET:
        nth += PARTS
        world, plan = World(), Sabotage(nth, after=after)
        try:
            with sabotaged(monkeypatch, plan):
                world.bring_on()
            with db.connect() as conn:
                # A claim whose reply was lost with its process is the lease's to bring back.
                conn.execute(
                    "UPDATE workflow_node_jobs SET lease_expires_at = now() - interval '1 s'"
                    " WHERE status = 'running'"
                )
                node_queue.reclaim_expired_leases()
                conn.execute("UPDATE workflow_node_jobs SET available_at = NULL")
                world.bring_on()
                where = f"statement {nth}, {plan.hit}"
                assert flow.status(world.run_id) == "completed", where
                assert {*flow.states(world.run_id).values()} == {"completed"}, where
                assert node_queue.count_unprocessed_dispatch_events() == 0, where
                assert invariants.broken(conn, slack_s=5) == [], where
                assert max(world.ran.values()) <= 2, where
        finally:
            world.close()
        quiet = 0 if plan.hit else quiet + 1
        hit += [plan.hit] if plan.hit else []
    assert len(hit) >= (5 if after else 10)
    assert COMMIT in hit
