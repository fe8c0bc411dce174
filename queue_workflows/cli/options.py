"""Define the options that commands share: --app, --json, --debug, --out and those about logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from queue_workflows.runtime import entry_point, logs


def option(metavar: str | None, help_: str, *names: str, **more: Any) -> Any:
    """Return an option with a value, for which `metavar` stands; `names`: default its own."""
    return typer.Option(*names, metavar=metavar, help=help_, **more)


def flag(name: str, help_: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=help_)


def argument(metavar: str, help_: str, **more: Any) -> Any:
    """Return an argument, for which `metavar` stands."""
    return typer.Argument(metavar=metavar, help=help_, **more)


App = Annotated[
    str | None,
    typer.Option(metavar="MODULE[:CALLABLE]", help="The app (or env QUEUE_WORKFLOWS_APP)."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show whole tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: stable keys, ISO times.")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="How many at most.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the run's files; nodes write below it."),
]


def _level(value: str) -> str:
    if value.lower() not in entry_point.LOG_LEVELS:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(entry_point.LOG_LEVELS)}")
    return value.lower()


def _form(value: str | None) -> str | None:
    if value is not None and value.lower() not in logs.FORMATS:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(logs.FORMATS)}")
    return value.lower() if value else None


LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", callback=_form, help="Log as text or json; default: LOG_FORMAT, text."
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        callback=_level,
        help=f"How much is logged: {', '.join(entry_point.LOG_LEVELS)}.",
    ),
]
