"""The laws as queries of the package, held at every instant: an empty answer is the proof."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.admin import audit

LIVENESS = 15
"""It needs time to pass, which tests of single moments do not give it."""


def broken(conn: db.Connection, *, slack_s: float = 0.0) -> list[str]:
    """What breaks a law right now, one line each, within the retention of events.

    Law 8's waiting nodes under a terminal run are broken only after a sweep. `slack_s`: how long a
    cancel's transaction may have been open when its `finished_at` is no moment of acknowledgement.
    """
    values = audit.parameters(conn, since_s=None, limit=None, commit_s=slack_s, sweep_s=0)
    return [
        f"law {law.number}: {found.id}: {found.text}"
        for law in audit.LAWS
        if law.statement is not None and law.number != LIVENESS
        for found in audit.offenders(conn, law, values)
    ]
