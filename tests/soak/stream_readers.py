"""Read the streams of the soak's jobs while they grow, behind the last part that was read."""

from __future__ import annotations

import threading
from typing import Final

from queue_workflows import db, errors, streams
from tests.soak import acknowledgements, background, stream_tasks

EVERY_S: Final = 0.2
Read = list[streams.Part]


class Readers(background.BackgroundThread):
    """Keeps what a reader of each job has got, in the order in which it got it."""

    def __init__(self, books: acknowledgements.Acknowledgements) -> None:
        super().__init__("stream-readers")
        self._books = books
        self._over: set[str] = set()
        self.found: dict[str, Read] = {}

    def go(self, stop: threading.Event) -> None:
        while not stop.wait(EVERY_S):
            self.read()

    def read(self) -> None:
        """Read on in each stream whose job had not ended."""
        for job_id, task in [*self._books.jobs.items()]:
            if task in stream_tasks.TASKS and job_id not in self._over:
                try:
                    self._read(job_id)
                except errors.UnknownJob:
                    continue  # another check finds lost jobs
                except (db.Error, errors.DatabaseUnavailable):
                    return  # the server is down: the place is kept

    def _read(self, job_id: str) -> None:
        found = self.found.setdefault(job_id, [])
        after = found[-1].id if found else None
        page = streams.read_page(job_id, stream_tasks.NAME, after=after)
        found += page.parts
        if page.over:
            self._over.add(job_id)
