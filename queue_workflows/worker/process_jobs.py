"""Track the running jobs and the claims in flight of a worker process, over all its slots."""

from __future__ import annotations

from collections.abc import Sequence

from queue_workflows.engine import job_tables
from queue_workflows.worker import claims_in_flight, current_job, guards, slot


class ProcessJobs:
    """The running jobs of a process, and the slots that claim them."""

    def __init__(self, slots: Sequence[slot.Slot]) -> None:
        self.slots = slots
        self.running: list[current_job.Work] = []
        """In the order of their start. Any thread may read the list: it is never changed in place.
        """

    def add(self, work: current_job.Work) -> None:
        """Add a job that runs; one thread at a time may call this or `remove`."""
        self.running = [*self.running, work]

    def remove(self, work: current_job.Work) -> None:
        """Remove a job that has ended."""
        self.running = [each for each in self.running if each is not work]

    def is_running(self, work: current_job.Work) -> bool:
        """Return whether this very execution runs."""
        return any(each is work for each in self.running)

    def running_in(self, own: slot.Slot) -> list[current_job.Work]:
        """Return the running jobs of a slot."""
        if len(self.slots) == 1:
            return self.running
        queue = own.who().queue
        return [work for work in self.running if work.job["queue"] == queue]

    def is_busy(self) -> bool:
        """Return whether a job runs or is claimed."""
        return bool(self.running) or any(each.in_flight.ids() for each in self.slots)

    def claims(self) -> dict[job_tables.Lease, guards.LeaseEnd]:
        """Return the claims in flight, which a worker of one job at a time has none of."""
        found = dict[job_tables.Lease, guards.LeaseEnd]()
        for each in self.slots:
            found |= each.in_flight.claims()
        return found

    def claims_with(
        self, work: current_job.Work | None
    ) -> list[claims_in_flight.ClaimsInFlight] | None:
        """Return all claims in flight, or None if `work` is given and has ended."""
        if work is not None and not self.is_running(work):
            return None
        return [each.in_flight for each in self.slots]

    def lease_ends(self) -> float | None:
        """Return when the first lease of the running jobs ends, or None."""
        return min((work.lease_end.ends for work in self.running), default=None)

    def budget_ends(self) -> float | None:
        """Return when the first budget of the running jobs ends, or None."""
        budgets = (ends for work in self.running if (ends := work.budget_ends) is not None)
        return min(budgets, default=None)

    def worker_ids(self) -> list[str]:
        """Return the worker id of each slot."""
        return [each.who().worker_id for each in self.slots]
