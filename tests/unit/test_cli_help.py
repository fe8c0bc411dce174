"""`--help` has a whole sentence per command, and a text for every option and argument."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

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
    listed = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert len(listed) > 3 and not [line for line in listed if line.endswith("...")]


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
    assert "queue_workflows.cli.prune" in loaded
    modules = {f"queue_workflows.cli.{each.partition('.')[0]}" for each in cli.COMMANDS.values()}
    assert loaded & modules == {"queue_workflows.cli.prune"}


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_that_may_be_typed_is_explained(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert getattr(parameter, "help", None), parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_names_arguments_in_capitals(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    usage = capsys.readouterr().out.split("\n\n")[0]
    assert "[[" not in usage
    arguments = usage.partition("[OPTIONS]")[2]
    assert arguments == arguments.upper()
