"""Provide what every command shares: exit codes, messages, stops and the choice of the database."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Generator
from typing import NamedTuple, NoReturn

import typer

from queue_workflows import config, db, errors
from queue_workflows.cli import output
from queue_workflows.db import databases
from queue_workflows.embedded import running_apps
from queue_workflows.runtime import app_loading, entry_point, logs, signals

PROG = "queue-workflows"
_log = logging.getLogger(__name__)
PERMISSION_DENIED = "42501"
PATIENCE_S = 10.0
"""Seconds for which a single action waits for a database that does not reply."""


def execute(name: str, run_command: Callable[[], int], *, debug: bool) -> NoReturn:
    """Run a command and exit with its code; an error of ours is one line on stderr."""

    def guarded() -> int:
        try:
            return run_command()
        except db.OperationalError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # A server's own error names the cause first; a failed connection last, after each try.
            line = lines[-1] if error.sqlstate is None else lines[0]
            raise errors.DatabaseUnavailable(f"{db.describe()}: {line}") from error
        except db.Error as error:
            if error.sqlstate == PERMISSION_DENIED:
                raise  # it has another remedy: `entry_point.run_main` names the GRANT
            # For example a counter at the maximum of its type, which no command can raise.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise errors.RowRefused(f"the database refused it: {lines[0]}") from error

    raise typer.Exit(entry_point.run_main(f"{PROG} {name}", guarded, debug=debug))


def print_message(text: str) -> None:
    """Print one line to stderr, so that stdout stays readable for programs; JSON if logs are."""
    if logs.are_json() and _log.isEnabledFor(logging.INFO):
        _log.info("%s", text)
    else:
        output.complain(f"{PROG}: {text}")


def refuse(name: str, text: str) -> None:
    """Print to stderr, on one line, why the command of this name did not do what it was asked."""
    output.complain(f"{PROG} {name}: {output.line(text, 500)}")


STOPS_WORK = "stopping; Ctrl-C once more hands running jobs back at once"
STOPS_VIEW = "stopping the view; {} continues"


def until_stopped(stops: Callable[[], str] = lambda: STOPS_WORK) -> signals.StopRequest:
    """Return the flag that SIGTERM and Ctrl-C set; `stops` is printed to stderr at the first."""
    # Inside a signal handler: no lock may be taken, as the stream's own write would.
    return signals.StopRequest(on_first=lambda: os.write(2, f"{PROG}: {stops()}\n".encode()))


@contextlib.contextmanager
def database(*, create: bool, app: str | None = None, up: bool = False) -> Generator[str]:
    """Yield the name of the database while connections live: the DSN's, else the embedded one's.

    `create=False` uses or starts an embedded server that exists and creates none. With a DSN the
    embedded server is never touched. `app` names the app whose processes this command starts. It is
    refused if an `up` of another app serves its database; `up` registers this process as one.
    Raises `InvalidConfig`, also for a DSN that cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if config.database_url() is None:
            words = stack.enter_context(_embedded(create=create, app=app, up=up))
        else:
            words = db.describe()
            _note_code(stack, app, up=up)
        stack.callback(db.close_pool)
        yield words


@contextlib.contextmanager
def _embedded(*, create: bool, app: str | None, up: bool) -> Generator[str]:
    requested = databases.requested()
    joined = databases.join(create=create)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(joined.server)
        config.configure(embedded=True)
        # The processes that this command starts must use the same database.
        stack.enter_context(_variable(config.EMBEDDED_DB_ENV, joined.project.name))
        if joined.made and not requested and databases.has_earlier(server):
            print_message(
                f"the database of earlier versions is still there: --db {databases.EARLIER}; "
                f"{PROG} databases lists all"
            )
        if app is not None:
            check = UpCheck(app, joined.project.name, shared=bool(requested))
            if up:
                stack.enter_context(
                    running_apps.registered(
                        server.data_dir, joined.project.name, app, refuse=check.refuse_up
                    )
                )
            else:
                check.refuse_other(running_apps.live(server.data_dir, joined.project.name))
        if config.get_config().app and not up:
            _report_older_code(running_apps.live(server.data_dir, joined.project.name))
        yield joined.describe()


def _note_code(stack: contextlib.ExitStack, app: str | None, *, up: bool) -> None:
    """Note an `up` on a server of the user's own, or report that one there runs older code.

    Only those of this machine and user are known, and nothing is if the folder cannot be used.
    """
    if not (app if up else config.get_config().app):
        return
    folder = running_apps.state_folder()
    database = hashlib.sha256(db.describe().encode(errors="replace")).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if up:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not running_apps.is_ours(folder):
            return
        if up:
            stack.enter_context(
                running_apps.registered(folder, database, app or "", refuse=lambda _: None)
            )
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


@contextlib.contextmanager
def _variable(name: str, value: str) -> Generator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class UpCheck(NamedTuple):
    """Which `up` may serve the database of an app.

    `shared`: the user chose the database by name.
    """

    app: str
    database: str
    shared: bool

    def refuse_up(self, running: list[running_apps.Up]) -> None:
        """Raise `InvalidConfig` if an `up` of this app runs, or a conflicting one."""
        for each in running:
            if _module(each.app) == _module(self.app):
                raise errors.InvalidConfig(
                    f"{each.app} runs already: `{PROG} up` with pid {each.pid}, since {each.since},"
                    f" on database {self.database}; `kill {each.pid}` stops it, and --db NAME "
                    "starts another one on a database of its own"
                )
        self.refuse_other(running)

    def refuse_other(self, running: list[running_apps.Up]) -> None:
        """Raise `InvalidConfig` if an `up` of another app runs and sharing was not chosen."""
        for each in running:
            if not self.shared and _module(each.app) != _module(self.app):
                raise errors.InvalidConfig(
                    f"`{PROG} up` of another app, {each.app} with pid {each.pid}, serves database "
                    f"{self.database} of this folder, and would fail the nodes of {self.app}: give "
                    "this app a database of its own by --db NAME, or a folder of its own; "
                    f"--db {self.database} shares the one that is there"
                )


def _module(app: str) -> str:
    return app.partition(":")[0]


@contextlib.contextmanager
def reading(app: str | None) -> Generator[str]:
    """Yield the database for a command that reads: it must reply now, and have the schema.

    Raises `DatabaseUnavailable` and `SchemaTimeout`, each with the remedy.
    """
    app_loading.load_app(app)
    with database(create=False) as words:
        db.wait_until_reachable(timeout_s=0)
        db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
        yield words


def wait_for_database(stop: signals.StopRequest, *, patience_s: float | None = PATIENCE_S) -> bool:
    """Wait until the database replies; return False if asked to stop before. None: without a limit.

    Raises `DatabaseUnavailable` after the patience, or at once for a refused login.
    """
    return db.wait_until_reachable(
        stopped=stop.requested.is_set, pause=stop.requested.wait, timeout_s=patience_s
    )


def prepare(stop: signals.StopRequest, *, patience_s: float | None = PATIENCE_S) -> bool:
    """Wait for the database and migrate it; return False if asked to stop before it replied."""
    entry_point.setup_logging("warning")
    if not wait_for_database(stop, patience_s=patience_s):
        return False
    db.bootstrap()
    return True
