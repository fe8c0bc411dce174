"""What gpu workers tell of models, and what the fleet makes of it."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.engine import models
from queue_workflows.types import Row


def learn_load(conn: db.Connection, host: str, model: str, seconds: float) -> None:
    """Note how long a load took."""
    models.learn_load(conn, host, model, seconds)


def publish_sizes(conn: db.Connection, host: str, sizes: dict[str, float]) -> None:
    """Write the GPU memory in GB that models need, as a host registers them; 0: unknown."""
    models.publish_sizes(conn, host, sizes)


def unserved(conn: db.Connection) -> list[Row]:
    """Return the models whose waiting jobs no live worker takes, each with reason and detail."""
    return models.unserved(conn)


def flagged(conn: db.Connection) -> list[Row]:
    """Return the flags that sweeps have set: model, reason, detail and number of jobs."""
    return models.flagged(conn)
