"""Create the scratch database of a test run: next to a `*_test` one, or on an embedded server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from queue_workflows import db, embedded
from queue_workflows.db import scratch_databases

VARIABLE = "QUEUE_WORKFLOWS_TEST_DB_URL"
_FOLDER = "QUEUE_WORKFLOWS_EMBEDDED_DIR"
_UNSAFE = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""A crash of the machine may lose test data."""


@contextlib.contextmanager
def database(dsn: str | None = None) -> Generator[str]:
    """Yield the DSN of a new database with the schema; drop it at the end.

    It is on the server of `dsn` (or QUEUE_WORKFLOWS_TEST_DB_URL), whose database's name has to end
    in `_test` and is not changed; else on an embedded server in a folder of its own for tests.
    """
    with contextlib.ExitStack() as stack:
        given = dsn or os.environ.get(VARIABLE)
        if not given:
            folder = embedded.data_dir()
            with environment(**{_FOLDER: str(folder.with_name(f"{folder.name}_test"))}):
                server = stack.enter_context(embedded.ensure(settings=_UNSAFE))
            given = server.dsn.replace("/queue_workflows?", "/queue_workflows_test?")
        made = stack.enter_context(scratch_databases.database(given))
        with environment(QUEUE_WORKFLOWS_DB_URL=made):
            db.bootstrap()
            db.close_pool()
        yield made


@contextlib.contextmanager
def environment(**values: str) -> Generator[None]:
    """Set these environment variables for the block, then restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
