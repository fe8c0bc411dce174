"""Receive notifications of a channel without sleeping."""

from __future__ import annotations

from psycopg import sql

from queue_workflows import db

CHANNELS = (
    "node_job_ready",
    "ingest_job_ready",
    "orchestrator_work",
    "worker_control",
    "job_cancel",
    "job_parts",
)


class NotificationListener:
    """Listens to the engine's channels on a connection of its own."""

    def __init__(self) -> None:
        self._conn = db.connect()
        for channel in (*CHANNELS, "end_of_story"):
            self._conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def heard(self) -> list[tuple[str, str]]:
        """Return (channel, payload) of all notifications since the last call, sorted."""
        # Notifications come in the order of their commits: behind ours there is none before it.
        self._conn.execute("NOTIFY end_of_story")
        found: list[tuple[str, str]] = []
        for note in self._conn.notifies(timeout=10):
            if note.channel == "end_of_story":
                return sorted(found)
            found.append((note.channel, note.payload))
        raise AssertionError("the server notified nothing for 10 s")

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()
