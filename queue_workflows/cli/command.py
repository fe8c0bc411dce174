"""What every command does around its body: exit codes, the app, the database in use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import NoReturn

import typer

from queue_workflows import config, db, embedded, errors
from queue_workflows.cli import output
from queue_workflows.runtime import process, signals

PROG = "queue-workflows"
PATIENCE_S = 10.0
"""How long a command that does one thing waits for a database that does not answer."""


def execute(name: str, body: Callable[[], int], *, debug: bool) -> NoReturn:
    """Run a command's body and leave with its exit code; one line for an error of ours."""

    def guarded() -> int:
        try:
            return body()
        except db.OperationalError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise errors.DatabaseUnavailable(f"{db.describe()}: {lines[-1]}") from error
        except db.Error as error:
            # Such as a counter at the end of its type, which no command can raise further.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise errors.RowRefused(f"the database refused it: {lines[0]}") from error

    raise typer.Exit(process.run_main(f"{PROG} {name}", guarded, debug=debug))


def say(text: str) -> None:
    """One line to stderr, where it disturbs no output that a program reads."""
    output.complain(f"{PROG}: {text}")


def until_stopped() -> signals.StopRequest:
    """What SIGTERM and Ctrl-C set; the first says on stderr what a second one does."""
    # Inside a signal handler: no lock may be taken, as the stream's own write would.
    text = f"{PROG}: stopping; Ctrl-C once more hands running jobs back at once\n".encode()
    return signals.StopRequest(on_first=lambda: os.write(2, text))


@contextlib.contextmanager
def database(*, create: bool) -> Generator[str]:
    """The database in words, while its connections live: the DSN's, else the embedded server.

    `create=False` joins or starts an embedded server that exists and makes none. With a DSN the
    embedded server is never touched. Raises `InvalidConfig` for a DSN that cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if config.database_url() is None:
            server = stack.enter_context(embedded.ensure(create=create))
            config.configure(embedded=True)
            words = server.describe()
        else:
            words = db.describe()
        stack.callback(db.close_pool)
        yield words


@contextlib.contextmanager
def reading(app: str | None) -> Generator[str]:
    """The database for a command that reads: it must answer now, and have the schema.

    Raises `DatabaseUnavailable` and `SchemaTimeout`, each with the remedy.
    """
    config.load_app(app)
    with database(create=False) as words:
        db.wait_until_reachable(timeout_s=0)
        db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
        yield words


def reached(stop: signals.StopRequest, *, patience_s: float | None = PATIENCE_S) -> bool:
    """Whether the database answers; False when asked to stop before. None: however long it takes.

    Raises `DatabaseUnavailable` after the patience, or at once for a refused login.
    """
    return db.wait_until_reachable(
        stopped=stop.requested.is_set, pause=stop.requested.wait, timeout_s=patience_s
    )


def prepare(stop: signals.StopRequest, *, patience_s: float | None = PATIENCE_S) -> bool:
    """`reached`, and the schema brought; False when asked to stop before the database answered."""
    process.setup_logging("warning")
    if not reached(stop, patience_s=patience_s):
        return False
    if db.pending():
        db.bootstrap()
    return True
