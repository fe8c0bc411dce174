"""`--help` has a whole sentence per command, and a text for every option and argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from queue_workflows import cli

ROOT: Any = typer.main.get_command(cli.app)


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
