"""Define the command `queue-workflows` (extra: cli); `COMMANDS` names each subcommand's module."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Sequence

import typer

from queue_workflows import __version__
from queue_workflows.cli import command
from queue_workflows.runtime import entry_point

COMMANDS = {
    "demo": "run.demo", "up": "up.up", "run": "run.run", "serve": "up.serve",
    "check": "check.check", "status": "status.status", "runs": "runs.runs", "show": "show.show",
    "workers": "status.workers", "queues": "queues.queues", "schedules": "queues.schedules",
    "models": "status.models", "samples": "samples.samples", "metrics": "metrics.metrics",
    "why": "runs.why", "jobs": "jobs.app", "events": "queues.events", "cancel": "runs.cancel",
    "retry": "runs.retry", "upgrade": "runs.upgrade", "inputs": "answer.waiting",
    "answer": "answer.answer", "spans": "spans.spans", "supervise": "supervise.supervise",
    "migrate": "migrate.migrate", "prune": "migrate.prune", "audit": "doctor.audit",
    "doctor": "doctor.doctor", "connect": "doctor.connect", "health": "status.health",
    "databases": "migrate.databases",
}  # fmt: skip
"""The function of each subcommand, or the Typer app of several, in the order of `--help`."""


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
        module, _, attribute = COMMANDS[name].partition(".")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        if isinstance(found, typer.Typer):
            made.add_typer(found)
        else:
            # VALUE of `answer` may be -1.
            made.command(name, context_settings={"ignore_unknown_options": name == "answer"})(found)
    made.callback()(_root)
    return made


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
