"""Every file, function, statement and setting that docs/architecture.md names exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import queue_workflows
from queue_workflows import cli, config
from queue_workflows.db import statements

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(queue_workflows.__path__[0])
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SCHEMA = (ROOT / "docs" / "schema.sql").read_text(encoding="utf-8")
FUNCTIONS = "\n".join(path.read_text() for path in (PACKAGE / "sql" / "functions").glob("*.sql"))
TRIGGERS = "\n".join(path.read_text() for path in (PACKAGE / "sql" / "triggers").glob("*.sql"))
CHANNELS = {"ingest_job_ready", "node_job_ready", "job_cancel", "orchestrator_work"}
TERMS = {"import-linter", "pyproject.toml", "cancel_event", "-- name:"}
"""Names in backticks that are no names of code."""


def _is_file(name: str) -> bool:
    return name.rpartition("/")[0] != "" and any(
        (at / name).exists() for at in (ROOT, PACKAGE, PACKAGE.parent)
    )


def _is_root_file(name: str) -> bool:
    return (PACKAGE / name).is_file() or (ROOT / name).is_file()


def _is_python(name: str) -> bool:
    """Return whether `name` is a module below the package, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["queue_workflows", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def _is_sql_function(name: str) -> bool:
    return re.search(rf"\bFUNCTION {name.removesuffix('()')}\(", FUNCTIONS) is not None


def _is_statement(name: str) -> bool:
    noun, _, statement = name.partition(":")
    return hasattr(getattr(statements, noun, None), statement)


def _is_table(name: str) -> bool:
    return re.search(rf"^CREATE TABLE (?:\w+\.)?{name} \(", SCHEMA, re.MULTILINE) is not None


def _is_channel(name: str) -> bool:
    """Return whether the SQL texts notify a channel of this name."""
    return name in CHANNELS and f"'{name}'" in FUNCTIONS + TRIGGERS


def _is_trigger(name: str) -> bool:
    return re.search(rf"\bTRIGGER {name} ", TRIGGERS) is not None


def _is_command(name: str) -> bool:
    if name.startswith("python -m "):
        return _is_file(name.removeprefix("python -m ").replace(".", "/") + ".py")
    return name.removeprefix("queue-workflows ") in cli.COMMANDS


KINDS: dict[str, Callable[[str], bool]] = {
    r"[\w.]+(/[\w.]+)*/[\w.]*": _is_file,
    r"\w+\.(py|md)": _is_root_file,
    r"[a-z]\w*_\w*\(\)": _is_sql_function,
    r"\w+:\w+": _is_statement,
    r"(queue-workflows|python -m) [\w.]+": _is_command,
    r"[a-z_]+": lambda name: _is_table(name) or _is_channel(name) or _is_trigger(name),
    r"\w+(\.\w+)+": _is_python,
}


def exists(name: str) -> bool:
    """Return whether the page may use this name: it has a known form, and code has the name."""
    for form, found in KINDS.items():
        if re.fullmatch(form, name):
            return found(name)
    return False


def _names() -> list[str]:
    text = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    text = text.partition("made by docgen")[0] + text.partition("end of layers")[2]
    return sorted(set(re.findall(r"`([^`\n]+)`", text)) - TERMS)


def test_the_names_exist() -> None:
    names = _names()
    assert len(names) > 100
    missing = [name for name in names if not exists(name)]
    assert not missing, "docs/architecture.md has names that code does not have"


def test_the_table_of_layers_has_every_module() -> None:
    table = PAGE.partition("made by docgen")[2].partition("end of layers")[0]
    shown = re.findall(r"\| `(\w+)` \|", table)
    modules = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    modules += [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert sorted(shown) == sorted(modules)


def test_the_page_names_knobs_that_there_are() -> None:
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", re.sub(r"`[^`]*`", "", PAGE)))
    assert named >= {"CANCEL_GRACE_S"}
    assert named <= set(config.KNOBS)


@pytest.mark.parametrize(
    "name",
    [
        "claim.claims.renown",
        "claim.clams",
        "worker.desk.Desk.run_never",
        "claims:renew_edges",
        "clams:renew",
        "queue_workflows_nodestep()",
        "sql/queries/clams.sql",
        "cli/nothing.py",
        "nothing.py",
        "ingest_job",
        "queue-workflows conceal",
        "python -m tests.support.nothing",
        "some words",
    ],
)
def test_a_wrong_name_is_found(name: str) -> None:
    assert not exists(name)
