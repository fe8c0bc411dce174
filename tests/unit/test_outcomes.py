"""What a failed body leaves: its error and its traceback, without the passwords in them."""

from __future__ import annotations

import pytest

from queue_workflows.store import outcomes

DSN = "postgresql://letters:canary@db/letters"


def failed(error: Exception) -> outcomes.Outcome:
    try:
        raise error
    except type(error) as raised:
        return outcomes.of_error(raised, 0.1, "node s/a")


def test_passwords_are_masked_in_error_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    made = failed(ConnectionError(f"no way to {DSN}"))
    assert made.error == "ConnectionError: no way to postgresql://letters:***@db/letters"
    assert "postgresql://letters:***@db" in (made.detail or "")
    assert "canary" not in f"{made} {caplog.text}"
