"""Define the command `queue-workflows` (extra: cli): one module per subcommand.

The function of a subcommand is as long as its list of options, which typer reads from it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Callable, Sequence

import typer

from queue_workflows import __version__
from queue_workflows.cli import command
from queue_workflows.runtime import entry_point

COMMANDS = {
    "demo": "demo.demo",
    "up": "up.up",
    "run": "run.run",
    "serve": "serve.serve",
    "check": "check.check",
    "status": "status.status",
    "runs": "runs.runs",
    "show": "show.show",
    "workers": "workers.workers",
    "queues": "queues.app",
    "schedules": "schedules.app",
    "models": "models.app",
    "samples": "samples.samples",
    "metrics": "metrics.metrics",
    "why": "why.why",
    "jobs": "jobs.app",
    "events": "events.app",
    "cancel": "changed_work.cancel",
    "retry": "changed_work.retry",
    "upgrade": "upgrade.upgrade",
    "inputs": "answer.waiting",
    "answer": "answer.answer",
    "spans": "spans.spans",
    "supervise": "supervise.supervise",
    "migrate": "migrate.migrate",
    "prune": "prune.prune",
    "audit": "audit.audit",
    "doctor": "doctor.doctor",
    "connect": "connect.connect",
    "health": "health.health",
    "databases": "databases.databases",
}
"""The function of each subcommand, or the Typer app of several, in the order of `--help`."""
_SETTINGS = {
    # So that VALUE may be -1.
    "answer": {"ignore_unknown_options": True},
}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"queue-workflows {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    del version


def load(argv: Sequence[str] | None = None) -> typer.Typer:
    """Return the command with the subcommand that the arguments name, or with all of them.

    Without the others it starts in half the time. Raises `ModuleNotFoundError` if a package of the
    extra `cli` is missing.
    """
    given = sys.argv[1:] if argv is None else argv
    return _with((given[0],) if given and given[0] in COMMANDS else tuple(COMMANDS))


@functools.cache
def _with(names: tuple[str, ...]) -> typer.Typer:
    made = typer.Typer(
        help="Postgres as queue, message bus and memory of a workflow engine.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name in names:
        found = _subcommand(name)
        if isinstance(found, typer.Typer):
            made.add_typer(found)
        else:
            made.command(name, context_settings=_SETTINGS.get(name))(found)
    made.callback()(_root)
    return made


@functools.cache
def _subcommand(name: str) -> Callable[..., None] | typer.Typer:
    module, _, attribute = COMMANDS[name].partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 for refused input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that this terminal cannot show must not end the command.
            stream.reconfigure(errors="backslashreplace")
    return entry_point.run_main(command.PROG, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    try:
        load(argv)(args=None if argv is None else list(argv), prog_name=command.PROG)
    except SystemExit as end:
        with contextlib.suppress(TypeError, ValueError):
            return int(end.code or 0)
        return 1
    return 0
