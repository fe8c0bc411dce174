"""Hold what the requests of one service share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import fastapi
from starlette.requests import Request

from queue_workflows import db
from queue_workflows.service import calls, changes
from queue_workflows.service import settings as service_settings


class Service:
    """The settings, the threads for blocking calls, and the changes that requests wait for."""

    def __init__(self, settings: service_settings.Settings) -> None:
        self.settings = settings
        self.calls = calls.Calls(settings.pg_pool_size + settings.pg_max_overflow)
        self.changes = changes.Changes()
        self.started_at = time.monotonic()
        self.problems: dict[str, str] = {}
        """What is wrong with the processes that the lifespan started, by name."""
        self.open_connections: Callable[[], int] = int
        """Return the number of open connections; 0 if the server of an app counts them."""
        self._schema_check: asyncio.Task[int] | None = None

    def schema_check(self) -> Awaitable[int]:
        """Wait until the database has replied that it has the schema; raise if it has not.

        Requests that wait at the same time share one check. Anybody may ask, without a token, and
        must not take the threads of those who have one.
        """
        if self._schema_check is None or self._schema_check.done():
            check = self.calls.run(db.wait_for_schema, db.REQUIRED_VERSION, timeout_s=0)
            self._schema_check = asyncio.ensure_future(check)
        return asyncio.shield(self._schema_check)

    def close(self) -> None:
        """End the threads, and what waits for changes."""
        self.changes.close()
        self.calls.close()


def ending(app: fastapi.FastAPI) -> Callable[[], None]:
    """Return what ends the streams and long polls of an application."""
    own: Service = app.state.service
    return own.changes.end_readers


def count_connections(app: fastapi.FastAPI, count: Callable[[], int]) -> None:
    """Let an application know how many connections its server has open."""
    own: Service = app.state.service
    own.open_connections = count


def of(request: Request) -> Service:
    """Return the service that serves this request."""
    return request.app.state.service
