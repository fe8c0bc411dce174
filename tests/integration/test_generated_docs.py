"""The generated pages say what the code and the migrated database say."""

from __future__ import annotations

import difflib
import inspect

import pytest

from queue_workflows import config, errors
from tests.support import catalog, docgen

REMEDY = "generate it again: python -m tests.support.docgen"


@pytest.mark.parametrize(
    "page",
    [
        "docs/configuration.md",
        "docs/commands.md",
        "docs/diagnose.md",
        "docs/errors.md",
        "docs/job-events.md",
        "docs/exit-codes.md",
        "docs/metrics-reference.md",
        "docs/schema.md",
        "docs/schema.sql",
        "docs/architecture.md",
        "docs/http-reference.md",
        "docs/decisions/index.md",
        "CLAUDE.md",
    ],
)
def test_page_is_what_the_generator_makes(dsn: str, page: str) -> None:
    made = docgen.pages(dsn)[page].splitlines()
    committed = (docgen.ROOT / page).read_text(encoding="utf-8").splitlines()
    difference = "\n".join(
        difflib.unified_diff(committed, made, page, "generated", lineterm="", n=0)
    )
    assert not difference, f"{REMEDY}\n{difference}"


def test_every_knob_and_argument_is_on_the_page() -> None:
    text = docgen.configuration()
    missing = [name for name in config.KNOBS if f"`QUEUE_WORKFLOWS_{name}`" not in text]
    missing += [
        n for n in inspect.signature(config.configure).parameters if f"| `{n}` |" not in text
    ]
    assert not missing


def test_every_channel_has_a_sender(dsn: str) -> None:
    channels = catalog.read(dsn).channels
    assert {"node_job_ready", "ingest_job_ready", "worker_control"} <= channels.keys()
    assert all(channels.values())


def test_a_table_nobody_described_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(catalog.PURPOSES, "workers")
    with pytest.raises(KeyError, match="'workers'"):
        catalog.read(dsn)


def test_an_event_nobody_described_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A key that `delitem` puts back is the last one, and the page keeps the order.
    events = {name: event for name, event in catalog.EVENTS.items() if name != "parked"}
    monkeypatch.setattr(catalog, "EVENTS", events)
    with pytest.raises(AssertionError, match="'parked'"):
        docgen.event_page(catalog.read(dsn))


def test_an_error_without_a_remedy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.UnknownTask, "__doc__", "Nobody has registered the task.")
    with pytest.raises(AssertionError, match=r"errors\.UnknownTask"):
        docgen.error_page()


def test_a_sqlstate_nobody_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docgen, "SQLSTATES", {})
    with pytest.raises(KeyError, match="QW001"):
        docgen.error_page()
