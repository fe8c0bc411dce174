"""The table of differences from 0.3.0: complete rows, and every name in it exists."""

from __future__ import annotations

import importlib
import re

import pytest

from queue_workflows import config
from queue_workflows.__main__ import main
from tests.support import tabled
from tests.support.commands import ROOT

SECTION = (ROOT / "docs" / "differences-0-3-0.md").read_text()
LINES = [line for line in SECTION.splitlines() if line.startswith("|")]
ROWS = [line.strip("| ").split(" | ") for line in LINES if not line.startswith("| ---")]
TOPICS = (
    "schedule once", "idle worker exits with 79", "warm model", "requeues all running jobs",
    "completed, failed or cancelled", "Dispatcher functions", "`node_module`", "stay forever",
    "frozen", "poison", "ClaimLost", "PUBLIC", "23514", "masked", "Two schedulers",
    "NodeTaken", "ForeignKeyViolation", "TRUNCATE", "requeue_inflight_for_control",
)  # fmt: skip


def test_each_row_has_what_was_what_is_and_what_to_do() -> None:
    assert len(ROWS) > 25
    for row in ROWS:
        assert len(row) == 3, row
        assert all(len(cell) > 4 for cell in row), row


def test_the_table_names() -> None:
    for topic in TOPICS:
        with tabled.case(topic):
            assert topic in SECTION


def test_every_function_and_knob_of_the_table_exists() -> None:
    functions = re.findall(r"`(\w+)\.(\w+)\(\)`", SECTION)
    assert functions
    for module, name in functions:
        assert callable(getattr(importlib.import_module(f"queue_workflows.{module}"), name))
    knobs = {word.partition("=")[0] for word in re.findall(r"`([A-Z][A-Z_]+(?:=\w+)?)`", SECTION)}
    for knob in knobs - {"INSERT", "UPDATE", "PUBLIC", "OFF", "ON"}:
        assert isinstance(getattr(config, knob), config.Knob), knob


def test_the_switches_of_the_table_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from queue_workflows import scheduler

    with pytest.raises(SystemExit):
        scheduler.main(["--help"])
    assert "--boot-kick" in capsys.readouterr().out
    assert main(["migrate", "--help"]) == 0
    assert "--allow-data-loss" in capsys.readouterr().out
