"""Define commands with their common options, their database and their output.

A function that `command` decorates takes its own options, those of `COMMON` that it names, and the
name of the `database`. It returns an exit code or `Shown`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import typer
from typer.core import TyperGroup

from queue_workflows import config, errors
from queue_workflows.cli import command as commands
from queue_workflows.cli import options, output
from queue_workflows.requests import request as requests

R = TypeVar("R", bound=requests.Request[Any])

COMMON: dict[str, tuple[Any, Any]] = {
    "app": (options.App, None),
    "as_json": (options.AsJson, False),
    "debug": (options.Debug, False),
    "db": (
        Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help="A database of the embedded server; default: the one of the app's folder.",
            ),
        ],
        None,
    ),
}
"""The type and the default of each common option."""
_USAGE: Any = typer.BadParameter.__mro__[1]


class Shown(NamedTuple):
    """The result of a command: the value for `--json`, and a function that prints it for people."""

    value: Any
    show: Callable[[], object]
    code: int = 0


def command(
    name: str, takes: str = "app as_json debug db", *, reads: bool = True
) -> Callable[[Callable[..., int | Shown]], Callable[..., None]]:
    """Return a decorator that makes a function the command of this name.

    `takes`: its common options. `reads`: it is called once the database has replied and has the
    schema; else it opens the database itself.
    """

    def decorate(function: Callable[..., int | Shown]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters

        @functools.wraps(function)
        def wrapper(**given: Any) -> None:
            common = {key: given.pop(key) for key in takes.split()}
            given |= {key: value for key, value in common.items() if key in own}
            if "db" in common:
                config.get_config().embedded_db = common["db"] or ""

            def run() -> int:
                if not reads:
                    return _print(function(**given), as_json=common.get("as_json", False))
                with commands.reading(common["app"]) as database:
                    named = {"database": database} if "database" in own else {}
                    found = function(**given, **named)
                return _print(found, as_json=common.get("as_json", False))

            commands.execute(name, run, debug=common["debug"])

        common = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for key, (kind, default) in COMMON.items()
            if key in takes.split()
        ]
        listed = [each for key, each in own.items() if key not in (*COMMON, "database")]
        made: Any = wrapper
        made.__signature__ = inspect.Signature([
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in listed), *common
        ])  # fmt: skip
        made.__annotations__ = {each.name: each.annotation for each in (*listed, *common)}
        return wrapper

    return decorate


def request(
    app: typer.Typer,
    name: str,
    kind: type[R],
    shown: Callable[[R, Any], int | Shown],
) -> None:
    """Add the subcommand that carries out an operation of `requests.catalog`.

    `shown` returns its result, given the request and the result of the noun. Fields of the route's
    path are arguments, the others options. Who requests it is an option too.
    """
    placed, marks = requests.placed(kind), requests.marks(kind)
    hints = typing.get_type_hints(kind)
    parameters: list[inspect.Parameter] = []
    for each in dataclasses.fields(kind):
        mark = marks[each.name]
        word = str if each.name in placed else str | None if mark.parse else hints[each.name]
        said = mark.help[:1].upper() + mark.help[1:]
        option = typer.Argument if each.name in placed else typer.Option
        noun = mark.metavar or each.name.upper()
        parameters.append(
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.name in placed else None,
                annotation=Annotated[word, option(metavar=noun, help=said.removesuffix(".") + ".")],
            )
        )
    if kind.actor:
        parameters.append(_ACTOR)

    def function(*, app: str | None, **given: Any) -> int | Shown:
        by = given.pop(_ACTOR.name, None)
        words = {key: value for key, value in given.items() if value is not None}
        asked = kind(**{key: _value(key, word, marks[key]) for key, word in words.items()})
        with commands.reading(app):
            return shown(asked, asked.run(by))

    made: Any = function
    made.__signature__ = inspect.Signature([*parameters, _APP])
    made.__doc__ = kind.summary()
    app.command(name)(command(f"{app.info.name} {name}", reads=False)(function))


def _value(name: str, word: Any, mark: requests.Field) -> Any:
    """Return the value of a word. Raises `InvalidConfig` that names its option."""
    try:
        return word if mark.parse is None else mark.parse(word)
    except errors.InvalidConfig as error:
        raise errors.InvalidConfig(f"--{name.replace('_', '-')} {error}") from None


_APP = inspect.Parameter("app", inspect.Parameter.KEYWORD_ONLY, annotation=str | None)
_ACTOR = inspect.Parameter(
    "requested_by",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None, typer.Option(metavar="WHO", help="Who requests it, for the record.")
    ],
)


def _print(found: int | Shown, *, as_json: bool) -> int:
    if not isinstance(found, Shown):
        return found
    if as_json:
        output.dump(found.value)
    else:
        found.show()
    return found.code


class Group(TyperGroup):
    """Subcommands of a noun; without one `list`, where it has that and `is_listed` is true.

    Options may stand before the subcommand. A refusal is one line, which names the subcommand that
    an option belongs to.
    """

    is_listed = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the subcommand first. Exits with 2 if there is none of that name."""
        at = self._place(args)
        if at < len(args):
            word = args.pop(at)
            if word not in self.commands:
                text = f"{word!r} is none of {', '.join(self.commands)}"
                self._refuse("", f"{text}{errors.hint(word, self.commands)}")
            args = [word, *args]
        elif args != ["--help"] and self.is_listed and "list" in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def _place(self, args: list[str]) -> int:
        """Return where the subcommand stands: the first word that is no option and no value."""
        flags = {"--help"}
        for each in cast("Any", self.commands).values():
            flags.update(name for own in each.params if getattr(own, "is_flag", False)
                         for name in own.opts)  # fmt: skip
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            at += 1 if args[at] in flags or "=" in args[at] else 2
        return at

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; exit with 2, after one line, if it does not take its arguments."""
        try:
            return super().invoke(ctx)
        except _USAGE as error:
            own = error.ctx.command if error.ctx else self
            usage = " ".join([ctx.command_path.partition(" ")[2], own.name or "", *_words(own)])
            if (option := getattr(error, "option_name", None)) is not None:
                owners = [
                    each.name
                    for each in cast("Any", self.commands).values()
                    if any(option in found.opts for found in each.params)
                ]
                said = f"is an option of {', '.join(owners)}" if owners else "is no option"
                self._refuse(own.name, f"{option} {said}")
            if type(error).__name__ == "MissingParameter":
                self._refuse(own.name, f"it needs the {_word(error.param)}: {usage}")
            self._refuse(own.name, f"{error.format_message().rstrip('.')}: {usage}")

    def _refuse(self, name: str | None, text: str) -> None:
        commands.refuse(" ".join(filter(None, (self.name, name))), text)
        raise typer.Exit(2)


def _words(own: Any) -> list[str]:
    return [_word(each) for each in own.params if each.param_type_name == "argument"]


def _word(parameter: Any) -> str:
    return parameter.metavar or str(parameter.name).upper()


def group(name: str, help_: str, *, is_listed: bool = True) -> typer.Typer:
    """Return the app of a noun's subcommands."""
    kind = Group if is_listed else type("Group", (Group,), {"is_listed": False})
    return typer.Typer(
        name=name, cls=kind, help=help_, no_args_is_help=not is_listed, rich_markup_mode=None
    )
