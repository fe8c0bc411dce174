"""Rows that raised are left alone for a while."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import pq

from queue_workflows.claim import row_isolation
from tests.support.clocks import Clock


def test_a_locked_row_is_left_alone_for_longer_each_time_and_is_no_failure() -> None:
    """Each try waits for the lock, and the rows behind it wait too."""
    clock = Clock(0.0)
    rows = row_isolation.Isolation(clock)

    def locked() -> None:
        raise psycopg.errors.LockNotAvailable

    def ended(_: BaseException, __: int) -> bool:
        raise AssertionError("a locked row is not a failure")

    for wait_s in (0.5, 1.0, 2.0):
        rows.attempt("answer", "a", locked, ended)
        assert rows.aside("answer") == ["a"]
        clock.now += wait_s - 0.1
        assert rows.aside("answer") == ["a"]
        clock.now += 0.2
        assert rows.aside("answer") == []
    assert rows.attempt("answer", "a", lambda: "taken") == "taken"
    rows.attempt("answer", "a", locked)
    clock.now += 0.6
    assert rows.aside("answer") == []


@pytest.mark.parametrize("words", ["line 1 at RAISE", "Zeile 1 bei RAISE", "linea 1 a RAISE"])
@pytest.mark.parametrize("kind", [psycopg.errors.AdminShutdown, psycopg.errors.LockNotAvailable])
def test_an_error_that_a_trigger_raises_is_of_its_row_in_every_language(
    kind: type[psycopg.Error], words: str
) -> None:
    """The context of an error is in the language of the server's `lc_messages`."""
    field = pq.DiagnosticField
    known: dict[int, bytes | None] = {field.CONTEXT: f"PL/pgSQL a() {words}".encode()}
    raised = kind("refused", info={**known, field.SOURCE_FUNCTION: b"exec_stmt_raise"})
    assert row_isolation.is_of_row(raised) and row_isolation.is_about_rows(raised)
    assert not row_isolation.is_outage(raised)
    assert not row_isolation.is_busy(raised)
    own = kind("refused", info={**known, field.SOURCE_FUNCTION: b"ProcessInterrupts"})
    assert not row_isolation.is_of_row(own) and not row_isolation.is_about_rows(own)
    assert row_isolation.is_outage(own) or row_isolation.is_busy(own)
