"""Send failure alerts as a scheduler does."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.alerts import sender

Sender = sender.Sender
"""What sends in a scheduler: `run_once` sends what waits, `stop` ends it."""


def made(hook: Any = None, command: tuple[str, ...] = (), **more: Any) -> Sender:
    """Return a sender of its own settings, up to 600 calls a minute, which has sent nothing yet."""
    given = {"per_minute": 600, "timeout_s": 10.0, "max_age_s": 3600.0, "poll_s": 60.0}
    return sender.Sender(sender.Settings(hook, command, **(given | more)))


def take() -> bool:
    """Take the oldest failure as a sender that ends then; return whether there is one."""
    given: dict[str, Any] = {"app": "a", "per_minute": 10, "lease_s": 60.0, "max_age_s": 60.0}
    with db.transaction() as conn:
        return sender.take(conn, **given) is not None


def send() -> int:
    """Send what waits, as a scheduler that starts now does; return how many calls were made."""
    one = sender.Sender(sender.read_settings())
    try:
        return one.run_once()
    finally:
        one.stop()
