"""Provide the common parts of all commands: messages, stops and the choice of the database."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from queue_workflows import config, db, errors
from queue_workflows.cli import output
from queue_workflows.runtime import app_loading, entry_point, logs, signals

if TYPE_CHECKING:
    from queue_workflows.embedded import running_apps

PROG = "queue-workflows"
_log = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""Seconds for which a single action waits for a database that does not reply."""


def print_message(text: str) -> None:
    """Print one line to stderr, so that stdout stays readable for programs; JSON if logs are."""
    if logs.are_json() and _log.isEnabledFor(logging.INFO):
        _log.info("%s", text)
    else:
        output.complain(f"{PROG}: {text}")


class Refused(Exception):
    """A command could not do its work. It prints this reason and ends with exit code 1."""


def refuse(name: str, text: str) -> None:
    """Print to stderr, on one line, why the command of this name could not do its work."""
    output.complain(f"{PROG} {name}: {output.line(text, 500)}")


STOPS_WORK = "stopping; Ctrl-C once more hands running jobs back at once"
STOPS_VIEW = "stopping the view; {} continues"


def until_stopped(stops: Callable[[], str] = lambda: STOPS_WORK) -> signals.StopRequest:
    """Return the flag that SIGTERM and Ctrl-C set; `stops` is printed to stderr at the first."""
    # Inside a signal handler no lock may be taken, as the stream's own write would.
    return signals.StopRequest(on_first=lambda: os.write(2, f"{PROG}: {stops()}\n".encode()))


@contextlib.contextmanager
def database(*, create: bool, app: str | None = None, up: bool = False) -> Generator[str]:
    """Yield the name of the database, of the DSN or else the embedded one, while connections live.

    `create=False` uses or starts an embedded server that exists and creates none. With a DSN the
    embedded server is never touched. `app` names the app whose processes this command starts. It is
    refused if an `up` of another app serves its database; `up` registers this process as one.
    Raises `InvalidConfig`, also for a DSN that cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if config.database_url() is None:
            words = _join_embedded(stack, create=create, app=app, up=up)
        else:
            words = db.describe()
            _note_code(stack, app, up=up)
        stack.callback(db.close_pool)
        yield words


def _join_embedded(stack: contextlib.ExitStack, *, create: bool, app: str | None, up: bool) -> str:
    from queue_workflows.db import databases
    from queue_workflows.embedded import running_apps

    requested = config.requested_database()
    joined = databases.join(create=create)
    server, name = stack.enter_context(joined.server), joined.project.name
    config.configure(embedded=True)
    # The processes that this command starts must use the same database.
    before = {key: os.environ[key] for key in (config.EMBEDDED_DB_ENV,) if key in os.environ}
    stack.callback(os.environ.update, before)
    stack.callback(os.environ.pop, config.EMBEDDED_DB_ENV, None)
    os.environ[config.EMBEDDED_DB_ENV] = name
    if app is not None:
        refuse = functools.partial(_refuse, app, name, shared=bool(requested), up=up)
        if up:
            registered = running_apps.registered(server.data_dir, name, app, refuse=refuse)
            stack.enter_context(registered)
        else:
            refuse(running_apps.live(server.data_dir, name))
    if config.get_config().app and not up:
        _report_older_code(running_apps.live(server.data_dir, name))
    return joined.describe()


def _note_code(stack: contextlib.ExitStack, app: str | None, *, up: bool) -> None:
    """Note an `up` on a server of the user's own, or report that one there runs older code.

    Only an `up` of this machine and user is known, and none if the folder cannot be used.
    """
    if not (app if up else config.get_config().app):
        return
    from queue_workflows.embedded import running_apps

    folder = running_apps.state_folder()
    database = hashlib.sha256(db.describe().encode(errors="replace")).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if up:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not running_apps.is_ours(folder):
            return
        if up:
            ours = running_apps.registered(folder, database, app or "", refuse=lambda _: None)
            stack.enter_context(ours)
        else:
            _report_older_code(running_apps.live(folder, database))


def _report_older_code(running: list[running_apps.Up]) -> None:
    for each in running:
        if app_loading.checksum(each.sources) != each.checksum:
            print_message(
                f"`{PROG} up` of {each.app} with pid {each.pid} runs older code than its files "
                "have now: stop it by Ctrl-C and start it again, with --reload to restart it at "
                "each edit"
            )


def _refuse(
    app: str, database: str, running: list[running_apps.Up], *, shared: bool, up: bool
) -> None:
    """Raise `InvalidConfig` if an `up` of another app runs, and for an `up` one of this app.

    `shared`: the user chose the database by name, so that it may serve other apps.
    """
    for each in running:
        is_same = each.app.partition(":")[0] == app.partition(":")[0]
        if up and is_same:
            raise errors.InvalidConfig(
                f"{each.app} runs already: `{PROG} up` with pid {each.pid}, since {each.since},"
                f" on database {database}; `kill {each.pid}` stops it, and --db NAME "
                "starts another one on a database of its own"
            )
        if not shared and not is_same:
            raise errors.InvalidConfig(
                f"`{PROG} up` of another app, {each.app} with pid {each.pid}, serves database "
                f"{database} of this folder, and would fail the nodes of {app}: give "
                "this app a database of its own by --db NAME, or a folder of its own; "
                f"--db {database} shares the one that is there"
            )


@contextlib.contextmanager
def reading(app: str | None) -> Generator[str]:
    """Yield the database for a command that reads. It must reply now, and have the schema.

    Raises `DatabaseUnavailable` and `SchemaTimeout`, each with the remedy.
    """
    app_loading.load_app(app)
    with database(create=False) as words:
        db.wait_until_reachable(timeout_s=0)
        db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
        yield words


def prepare(
    stop: signals.StopRequest, *, patience_s: float | None = PATIENCE_S, migrates: bool = True
) -> bool:
    """Wait for the database and migrate it; return False if asked to stop meanwhile.

    Without `migrates`, it must have the schema. A `patience_s` of None has no limit. Raises
    `DatabaseUnavailable` after the patience, or at once for a refused login.
    """
    entry_point.setup_logging("warning")
    stopped, pause = stop.requested.is_set, stop.requested.wait
    if db.wait_until_reachable(stopped=stopped, pause=pause, timeout_s=patience_s):
        if migrates:
            db.bootstrap()
        else:
            db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
    return not stopped()
