"""Define commands with their options, their database and their output.

A function that `command` decorates takes its own options, the common ones that it names, and the
`asked` fields of an operation. It returns an exit code or `Shown`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar, cast

import typer
from typer.core import TyperGroup

from queue_workflows import acts, config, db, errors
from queue_workflows.cli import command as commands
from queue_workflows.cli import output
from queue_workflows.runtime import entry_point, exit_codes, logs

if TYPE_CHECKING:
    from queue_workflows.requests import request as requests

T = TypeVar("T")
PERMISSION_DENIED = "42501"
ACT = "by reason app as_json debug db"
"""The common options of a command that changes something on request."""
COMMON: dict[str, tuple[Any, Any, str]] = {
    "by": (str | None, None, "--by WHO  Who does it, for the record. Default: your login."),
    "reason": (str | None, None, "--reason TEXT  Why, for the record."),
    "log_level": (
        str, "info",
        f"--log-level LEVEL {'|'.join(entry_point.LOG_LEVELS)}  How much is logged.",
    ),
    "log_format": (
        str | None, None,
        f"--log-format FORMAT {'|'.join(logs.FORMATS)}  The form of logs, instead of LOG_FORMAT.",
    ),
    "app": (str | None, None, "--app MODULE[:CALLABLE]  The app (or env QUEUE_WORKFLOWS_APP)."),
    "as_json": (bool, False, "--json  Print JSON: stable keys, ISO times."),
    "debug": (bool, False, "--debug  Show whole tracebacks."),
    "db": (
        str | None, None,
        "--db NAME  A database of the embedded server; default: the one of the app's folder.",
    ),
}  # fmt: skip
"""The type, the default and the line of each common option."""
_USAGE: Any = typer.BadParameter.__mro__[1]


class Shown(NamedTuple):
    """A result of a command, with the value for `--json` and a function that prints for people."""

    value: Any
    show: Callable[[], object] = lambda: None
    code: int = 0
    refusals: Sequence[str] = ()
    """Parts of the request that failed, a line each for stderr; with any, the exit code is 1."""


def parsed(option: str, parse: Callable[[str], T], word: str | None) -> T | None:
    """Return the meaning of the word of an option, None without one; its error names the option."""
    try:
        return None if word is None else parse(word)
    except errors.InvalidConfig as error:
        raise errors.InvalidConfig(f"{option} {error}") from None


def listed(rows: list[T], head: Sequence[str], cells: Callable[[T], Sequence[object]]) -> Shown:
    """Return rows, which people get as a table."""
    return Shown(rows, lambda: output.table(head, map(cells, rows)))


def command(
    name: str,
    *options: str,
    takes: str = "app as_json debug db",
    reads: bool = True,
    app: typer.Typer | None = None,
    operation: type[requests.Request[Any]] | None = None,
) -> Callable[[Callable[..., int | Shown]], Callable[..., None]]:
    """Return a decorator that makes a function the command of this name; `app`: of this group.

    `options`: a line for each of its parameters, in their order, such as `--limit N 1..99  Text.`
    or `--format FORMAT tree|json  Text.`, which takes only these words; without a name it is an
    argument. A line that is indented continues the one before. `takes`: the common options.
    `reads`: it is called once the database has replied and has the schema; else it opens the
    database itself. `operation`: its fields are options, too; `asked` has the ones that were given.
    """

    def decorate(function: Callable[..., int | Shown]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters
        chosen = [each for each in COMMON if each in takes.split()]
        fields = [] if operation is None else _fields(operation, own)

        @functools.wraps(function)
        def wrapper(**given: Any) -> None:
            common = {key: given.pop(key) for key in chosen}
            given |= {key: value for key, value in common.items() if key in own}
            if "db" in common:
                config.get_config().embedded_db = common["db"] or ""

            def run() -> int:
                if operation is not None:
                    given["asked"] = _asked(operation, {key: given.pop(key) for key, *_ in fields})
                with acts.acting(common.get("by"), reason=common.get("reason"), via="cli"):
                    if not reads:
                        return print_out(function(**given))
                    with commands.reading(common["app"]):
                        return print_out(function(**given))

            full_name = f"{app.info.name} {name}" if app else name
            print_out = functools.partial(_print, full_name, as_json=common.get("as_json", False))
            _execute(full_name, run, debug=common["debug"])

        listed = [each for key, each in own.items() if key not in (*COMMON, "asked")]
        lines = [
            line
            for text in options
            for line in re.sub(r"\n\s+", " ", inspect.cleandoc(text)).splitlines()
        ]
        described = [
            (each.name, each.annotation, each.default, line)
            for each, line in zip(listed, lines, strict=True)
        ]
        described += [(key, *COMMON[key]) for key in chosen]
        parameters = [parameter(*each) for each in (*fields, *described)]
        made: Any = wrapper
        made.__signature__ = inspect.Signature(parameters)
        made.__annotations__ = {each.name: each.annotation for each in parameters}
        if app is not None:
            app.command(name)(wrapper)
        return wrapper

    return decorate


def _fields(
    operation: type[requests.Request[Any]], own: Collection[str]
) -> list[tuple[str, Any, Any, str]]:
    """Return name, type, default and line of the fields of an operation that are not in `own`.

    Fields in the route's path become arguments. `limit` is left out: it is a page size over HTTP.
    """
    from queue_workflows.requests import request  # late: few commands have an operation

    placed, hints = request.placed(operation), typing.get_type_hints(operation)
    found: list[tuple[str, Any, Any, str]] = []
    for key, mark in request.marks(operation).items():
        if key in (*COMMON, *own, "limit"):
            continue
        text = f"{mark.help}: {mark.forms}" if mark.forms else mark.help.removesuffix(".")
        line = f"{mark.metavar or key.upper()}  {text[:1].upper()}{text[1:]}."
        if key in placed:
            found.append((key, str, inspect.Parameter.empty, line))
        else:
            kind = str | None if mark.parse else mark.kind or hints[key]
            found.append((key, kind, None, f"{_option(key)} {line}"))
    return found


def _asked(operation: type[requests.Request[Any]], words: dict[str, Any]) -> dict[str, Any]:
    """Return the meaning of the words for fields of an operation, without those not given."""
    from queue_workflows.requests import request

    found = {key: word for key, word in words.items() if word is not None and word != []}
    for key in found:
        if parse := request.marks(operation)[key].parse:
            found[key] = parsed(_option(key), parse, found[key])
    return found


def _option(field: str) -> str:
    """Return the option of a field: `--task` of `task_name`."""
    return "--" + field.removesuffix("_name").replace("_", "-")


def parameter(name: str, kind: Any, default: Any, line: str) -> inspect.Parameter:
    """Return the parameter from which typer makes the option or argument of this line."""
    head, _, text = line.partition("  ")
    words, more = head.split(), dict[str, Any]()
    option = words.pop(0) if words[0].startswith("--") else None
    if words and ".." in words[-1]:
        bounds = zip(("min", "max"), words.pop().split(".."), strict=True)
        more |= {key: float(word) if "." in word else int(word) for key, word in bounds if word}
    if words and "|" in words[-1] and words[-1].islower():
        known = words.pop().split("|")
        text = f"{text.removesuffix('.')}: {', '.join(known)}."
        more["callback"] = _one_of(known, str(option))
    elif kind is float:
        more["callback"] = _finite(str(option))
    more |= {"metavar": words[0] if words else None, "help": text}
    made = typer.Option(option, **more) if option else typer.Argument(**more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made]
    )


def _one_of(known: Sequence[str], option: str) -> Callable[[typer.Context, Any], Any]:
    """Return a function that makes an option's word lower case; it exits with 2 if unknown."""

    def checked(ctx: typer.Context, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [checked(ctx, each) for each in cast("list[str]", value)]
        if value is None or value.lower() in known:
            return value and value.lower()
        text = f"{option} {value!r:.80} is none of {', '.join(known)}{errors.hint(value, known)}"
        _refuse(ctx.command_path, text)

    return checked


def _finite(option: str) -> Callable[[typer.Context, float], float]:
    """Return a check that exits with 2 for NaN and infinity, which pass the bounds of an option."""

    def checked(ctx: typer.Context, value: float) -> float:
        if not math.isfinite(value):
            _refuse(ctx.command_path, f"{option} {value} is not a finite number")
        return value

    return checked


def _refuse(path: str, text: str) -> NoReturn:
    """Print why a command does not take its arguments, and exit with 2.

    `path`: the names of the program and of the command, as `command_path` has them.
    """
    commands.refuse(path.partition(" ")[2], text)
    raise typer.Exit(exit_codes.REFUSED)


def _execute(name: str, run_command: Callable[[], int], *, debug: bool) -> NoReturn:
    """Run a command and exit with its code; an error of ours is one line on stderr."""

    def guarded() -> int:
        try:
            return run_command()
        except commands.Refused as refusal:
            commands.refuse(name, str(refusal))
            return exit_codes.FAILED
        except db.OperationalError as error:
            raise errors.DatabaseUnavailable(why_away(error)) from error
        except db.Error as error:
            if error.sqlstate == PERMISSION_DENIED:
                raise  # it has another remedy: `entry_point.run_main` names the GRANT
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # For example a counter at the maximum of its type, which no command can raise.
            raise errors.RowRefused(f"the database refused it: {lines[0]}") from error

    raise typer.Exit(entry_point.run_main(f"{commands.PROG} {name}", guarded, debug=debug))


def why_away(error: db.OperationalError) -> str:
    """Return which database did not answer, and why, on one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A server's error names the cause first; a failed connection last, after each try.
    return f"{db.describe()}: {lines[-1] if error.sqlstate is None else lines[0]}"


def _print(name: str, found: int | Shown, *, as_json: bool) -> int:
    if not isinstance(found, Shown):
        return found
    for text in found.refusals:
        commands.refuse(name, text)
    if as_json:
        output.dump(found.value)
    else:
        found.show()
    return exit_codes.FAILED if found.refusals else found.code


class Commands(TyperGroup):
    """Commands that refuse wrong arguments in one line, which names the command of an option."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; exit with 2, after one line, if it does not take its arguments."""
        try:
            return super().invoke(ctx)
        except _USAGE as error:
            kind = type(error).__name__
            if kind == "NoArgsIsHelpError":
                raise  # its text is the help
            # An option without its value is refused without the context of its command.
            here = self.commands.get(ctx.invoked_subcommand, self)
            own = cast("Any", error.ctx.command if error.ctx else here)
            path = f"{ctx.command_path} {ctx.invoked_subcommand}"
            path = error.ctx.command_path if error.ctx else path
            if kind == "NoSuchOption":
                _refuse(path, self._unknown(error.option_name, own, path))
            words = [_word(each) for each in own.params if each.param_type_name == "argument"]
            usage = ": " + " ".join([path.partition(" ")[2], *words]) if words else ""
            if kind == "MissingParameter":
                _refuse(path, f"it needs the {_word(error.param)}{usage}")
            text = error.format_message().rstrip(".")
            if isinstance(error.__cause__, ValueError):  # of pydantic, from typer 0.29 on
                text += f"; got {cast('Any', error.__cause__).errors()[0]['input']!r:.80}"
            _refuse(path, f"{text}{usage}")

    def _unknown(self, option: str, own: Any, path: str) -> str:
        """Return in words that the command `own` lacks an option, and which commands have it."""
        siblings: Any = getattr(own, "commands", self.commands)
        owners = [
            each.name
            for each in siblings.values()
            if any(option in found.opts for found in each.params)
        ]
        if owners:
            return f"{option} is an option of {', '.join(owners)}"
        known = [name for each in own.params for name in each.opts]
        meant = errors.hint(option, known) or f"; `{path} --help` lists them"
        return f"{option} is no option{meant}"


class Group(Commands):
    """Subcommands of a noun; without one `list`, unless it prints the help then.

    Options may stand before the subcommand.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the subcommand first. Exits with 2 if none has that name."""
        at = self._place(args)
        if at < len(args):
            word = args.pop(at)
            if word not in self.commands:
                text = f"{word!r} is none of {', '.join(self.commands)}"
                _refuse(ctx.command_path, f"{text}{errors.hint(word, self.commands)}")
            args = [word, *args]
        elif args != ["--help"] and not self.no_args_is_help:
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def _place(self, args: list[str]) -> int:
        """Return the place of the subcommand, the first word that is not an option or its value."""
        flags = {"--help"}
        for each in cast("Any", self.commands).values():
            flags.update(name for own in each.params if getattr(own, "is_flag", False)
                         for name in own.opts)  # fmt: skip
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            at += 1 if args[at] in flags or "=" in args[at] else 2
        return at


def _word(parameter: Any) -> str:
    return parameter.metavar or str(parameter.name).upper()


def group(name: str, help_: str, *, is_listed: bool = True) -> typer.Typer:
    """Return the app of a noun's subcommands; `is_listed`: without one it lists."""
    return typer.Typer(
        name=name, cls=Group, help=help_, no_args_is_help=not is_listed, rich_markup_mode=None
    )
