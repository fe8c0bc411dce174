"""Define a schedule entry that fires every few seconds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from queue_workflows.scheduler import ScheduleEntry

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)


class Every(ScheduleEntry):
    """Fires each `SECONDS` seconds: the contract's entries would be too rare to see."""

    SECONDS = 2

    @property
    def expression(self) -> str:
        return f"every {self.SECONDS}s"

    def next_fire_at(self, now: datetime) -> datetime:
        return self.previous_fire_at(now) + timedelta(seconds=self.SECONDS)

    def previous_fire_at(self, now: datetime) -> datetime:
        whole = now.astimezone(timezone.utc).replace(microsecond=0)
        return whole - timedelta(seconds=int((whole - EPOCH).total_seconds()) % self.SECONDS)
