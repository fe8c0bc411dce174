"""Add --db NAME, a database of the embedded server, to every command that uses one database."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from queue_workflows import config

NONE = frozenset({"check", "databases"})
"""Commands that use no database, or all databases."""
_Database = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A database of the embedded server; default: the one of the app's folder.",
    ),
]


def add(app: typer.Typer) -> None:
    """Add the option to each command of `app`, after those of the function's signature."""
    for each in app.registered_commands:
        if each.callback is not None and each.name not in NONE:
            each.callback = _with_option(each.callback)


def _with_option(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter(
        "db", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Database
    )

    @functools.wraps(function)
    def wrapper(*args: Any, db: str | None = None, **kwargs: Any) -> Any:
        config.get_config().embedded_db = db or ""
        return function(*args, **kwargs)

    parameters = [*signature.parameters.values(), option]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper
