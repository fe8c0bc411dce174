"""Define the command `queue-workflows` (extra: cli): one module per subcommand."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence

import typer

from queue_workflows import __version__
from queue_workflows.cli import (
    answer,
    audit,
    cancel,
    check,
    command,
    connect,
    database_option,
    databases,
    demo,
    doctor,
    health,
    jobs,
    migrate,
    models,
    prune,
    queues,
    retry,
    run,
    runs,
    samples,
    schedules,
    show,
    status,
    supervise,
    up,
    why,
    workers,
)
from queue_workflows.runtime import entry_point

app = typer.Typer(
    help="Postgres as queue, message bus and memory of a workflow engine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("up")(up.up)
app.command("run")(run.run)
app.command("check")(check.check)
app.command("status")(status.status)
app.command("runs")(runs.runs)
app.command("show")(show.show)
app.command("workers")(workers.workers)
app.command("queues")(queues.queues)
app.command("schedules")(schedules.schedules)
app.command("models")(models.models)
app.command("samples")(samples.samples)
app.command("why")(why.why)
app.add_typer(jobs.app)
app.command("cancel")(cancel.cancel)
app.command("retry")(retry.retry)
app.command("inputs")(answer.waiting)
# So that VALUE may be -1.
app.command("answer", context_settings={"ignore_unknown_options": True})(answer.answer)
app.command("supervise")(supervise.supervise)
app.command("migrate")(migrate.migrate)
app.command("prune")(prune.prune)
app.command("audit")(audit.audit)
app.command("doctor")(doctor.doctor)
app.command("connect")(connect.connect)
app.command("health")(health.health)
app.command("databases")(databases.databases)
database_option.add(app)
database_option.add(jobs.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"queue-workflows {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  typer holds it
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    del version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 for refused input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that this terminal cannot show must not end the command.
            stream.reconfigure(errors="backslashreplace")
    return entry_point.run_main(command.PROG, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    try:
        app(args=None if argv is None else list(argv), prog_name=command.PROG)
    except SystemExit as end:
        with contextlib.suppress(TypeError, ValueError):
            return int(end.code or 0)
        return 1
    return 0
