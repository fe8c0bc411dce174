"""Send failure alerts as a scheduler does."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db
from queue_workflows.alerts import sender
from tests.support import constants

Sender = sender.Sender
"""What sends in a scheduler: `run_once` sends what waits, `stop` ends it."""


def made(
    patch: pytest.MonkeyPatch, hook: Any = None, command: tuple[str, ...] = (), **limits: float
) -> Sender:
    """Return a sender that has sent nothing yet; `limits` are those of all senders from now on.

    Without `per_minute`, it makes up to 600 calls a minute.
    """
    for name, value in ({"per_minute": 600} | limits).items():
        constants.put(patch, f"alerts.sender.{name.upper()}", value)
    return sender.Sender(sender.Settings(hook, command))


def take() -> bool:
    """Take the oldest failure as a sender that ends then; return whether there is one."""
    with db.transaction() as conn:
        return sender.take(conn, app="a") is not None


def send() -> int:
    """Send what waits, as a scheduler that starts now does; return how many calls were made."""
    one = sender.Sender(sender.read_settings())
    try:
        return one.run_once()
    finally:
        one.stop()
