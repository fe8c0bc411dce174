"""`--help` has a whole sentence per command, and a text for every option and argument."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import queue_workflows
from queue_workflows import cli

ROOT: Any = typer.main.get_command(cli.load([]))


def commands() -> Iterator[tuple[str, Any]]:
    for name, command in ROOT.commands.items():
        for below, nested in getattr(command, "commands", {}).items():
            yield f"{name} {below}", nested
        yield name, command


COMMANDS = dict(commands())


@pytest.mark.parametrize("argv", [["--help"], ["jobs", "--help"]])
def test_no_summary_is_cut_off(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(listed) > 3 and not [line for line in listed if line.endswith("...")]


def test_the_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    sections = [part.splitlines() for part in capsys.readouterr().out.strip().split("\n\n")]
    listed = {lines[0]: [line.split()[0] for line in lines[1:]] for lines in sections}
    groups = {f"{title}:": [*group] for title, group in cli.GROUPS.items()}
    assert {title: listed.get(title) for title in groups} == groups
    assert [title for title in listed if title in groups] == [*groups]
    assert ROOT.commands.keys() == cli.COMMANDS.keys()


def test_a_command_that_is_loaded_alone_is_the_same_as_among_all() -> None:
    for name, command in ROOT.commands.items():
        alone: Any = typer.main.get_command(cli.load([name, "--help"]))
        assert alone.commands.keys() == {name}
        assert described(alone.commands[name]) == described(command)


def described(command: Any) -> Any:
    parameters = [(each.name, each.opts, each.help) for each in command.params]
    below = getattr(command, "commands", {})
    return command.help, parameters, {name: described(each) for name, each in below.items()}


def test_a_command_imports_no_other_command() -> None:
    code = "import sys; from queue_workflows import cli; cli.load(['prune']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("queue_workflows.cli.")}
    assert "queue_workflows.cli.migrate" in loaded
    modules = {f"queue_workflows.cli.{each.partition('.')[0]}" for each in cli.COMMANDS.values()}
    assert loaded & modules == {"queue_workflows.cli.migrate"}


def test_everything_that_may_be_typed_is_explained() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            assert getattr(parameter, "help", None), (name, parameter.name)


def test_the_usage_names_arguments_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert cli.main([*name.split(), "--help"]) == 0
        usage = capsys.readouterr().out.split("\n\n")[0]
        assert "[[" not in usage
        arguments = usage.partition("[OPTIONS]")[2]
        assert arguments == arguments.upper(), name


REFUSALS = {
    "BadParameter", "InvalidConfig", "InvalidPayload", "UnknownQueue", "UnknownWorker", "refuse",
}  # fmt: skip


def _texts_of_errors(path: Path) -> Iterator[str]:
    """Yield the text that each call of an error or of `refuse` begins with, values as `{}`."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not call.args or name not in REFUSALS:
            continue
        text = call.args[-1]
        if isinstance(text, ast.Constant):
            yield str(text.value)
        elif isinstance(text, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in text.values
            )


@pytest.mark.parametrize("package", ["cli", "worker", "alerts", "event_export", "telemetry"])
def test_a_message_about_an_option_is_a_sentence(package: str) -> None:
    """Not `--job 7: its machine is unknown`: the option is the subject of a verb."""
    label = re.compile(r"(--[a-z-]+|[A-Z][A-Z_]+|\{\})([ =]\{\}|[ =]@\{\}|[ =][A-Z])?: ")
    found = [
        f"{path.name}: {text}"
        for path in (Path(queue_workflows.__path__[0]) / package).rglob("*.py")
        for text in _texts_of_errors(path)
        if label.match(text) and text != "{}: {}"
    ]
    assert found == []
