"""Define the command `queue-workflows` (extra: cli); `GROUPS` lists its subcommands."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import typer

from queue_workflows import __version__, errors
from queue_workflows.cli import command, define
from queue_workflows.runtime import entry_point, exit_codes

GROUPS: dict[str, dict[str, str]] = {
    "Run": {
        "demo": "run.demo", "check": "check.check", "run": "run.run", "up": "up.up",
        "serve": "up.serve",
    },
    "Look": {
        "status": "status.status", "runs": "runs.runs", "show": "show.show", "why": "runs.why",
        "failures": "failures.app", "inputs": "answer.waiting", "workers": "status.workers",
        "samples": "telemetry.samples", "acts": "jobs.acts",
    },
    "Change": {
        "answer": "answer.answer", "cancel": "runs.cancel", "retry": "runs.retry",
        "upgrade": "runs.upgrade", "jobs": "jobs.app", "queues": "queues.queues",
        "schedules": "queues.schedules", "models": "status.models", "events": "queues.events",
    },
    "Operate": {
        "doctor": "doctor.doctor", "audit": "doctor.audit", "health": "status.health",
        "supervise": "supervise.supervise", "metrics": "telemetry.metrics",
        "spans": "telemetry.spans", "prune": "migrate.prune",
    },
    "Set up": {
        "connect": "doctor.connect", "migrate": "migrate.migrate",
        "databases": "migrate.databases",
    },
}  # fmt: skip
"""The function of each subcommand, or the Typer app of several, in the order of `--help`."""
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


class _Root(define.Commands):
    """The command, whose help lists the subcommands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, all with the same columns."""
        del ctx
        width = max(map(len, self.commands))
        for title, group in GROUPS.items():
            found = {name: self.commands[name] for name in group if name in self.commands}
            room = formatter.width - 6 - width
            lines = [(n.ljust(width), each.get_short_help_str(room)) for n, each in found.items()]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


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
        cls=_Root,
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
    given = sys.argv[1:] if argv is None else [*argv]
    if given and given[0] not in (*COMMANDS, "--help", "--version"):
        hint = errors.hint(given[0], COMMANDS) or f"; `{command.PROG} --help` lists them"
        command.print_message(f"there is no command {given[0]!r:.80}{hint}")
        return exit_codes.REFUSED
    try:
        load(given)(args=given, prog_name=command.PROG)
    except SystemExit as end:
        with contextlib.suppress(TypeError, ValueError):
            return int(end.code or 0)
        return 1
    return 0
