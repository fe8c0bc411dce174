"""Each operation that is described has a public function that takes its fields."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer.main

from queue_workflows import cli, client, queues
from queue_workflows.requests import catalog, request

KINDS = [kind for kind in request.OPERATIONS if kind.noun]
PAGED = {catalog.ListJobs, catalog.ListRuns, catalog.ListActs, catalog.Submit}
"""The service calls their nouns itself."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PAGED])
def test_the_noun_takes_the_fields(kind: Any) -> None:
    module, _, name = kind.noun.partition(".")
    noun = getattr(importlib.import_module(f"queue_workflows.{module}"), name)
    placed = request.placed(kind)
    given = {each.name: None for each in fields(kind) if each.name not in placed}
    inspect.signature(noun).bind(*placed, **given)


def test_what_is_not_given_is_not_sent() -> None:
    call = catalog.LimitQueue("q", rate=None).call(request.row)
    assert (call.path, call.body) == ("/api/v1/queues/q/limits", {"rate": None})
    assert catalog.PreviewSchedule("s").call(request.row).query == {"limit": 1000}
    assert catalog.FollowJob("j", after="1-2").call(request.row).query == {}


def test_a_limit_that_is_not_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(queues, "limit", lambda *given, **more: taken.append((given, more)))
    catalog.LimitQueue("q", max_running=2).run()
    assert taken == [(("q",), {"partition": None, "max_running": 2, "by": None, "reason": None})]


def test_each_operation_has_a_method_of_the_client() -> None:
    own = client.Client("http://service")
    groups = (own, own.jobs, own.runs, own.workers, own.queues, own.schedules, own.acts)
    verbs = [each for group in groups for each in vars(type(group)).values()]
    assert {verb.kind for verb in verbs if hasattr(verb, "kind")} >= set(request.OPERATIONS)


LISTS: dict[str, Any] = {
    "runs": catalog.ListRuns, "jobs list": catalog.ListJobs, "jobs delete": catalog.ListJobs,
    "acts": catalog.ListActs,
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_command_has_an_option_for_each_filter_of_a_list(name: str) -> None:
    noun, _, verb = name.partition(" ")
    root: Any = typer.main.get_command(cli.load([]))
    chosen = root.commands[noun].commands[verb] if verb else root.commands[noun]
    filters = {each.name for each in fields(LISTS[name])} - {"limit"}
    assert len(filters) >= 5
    assert filters <= {each.name for each in chosen.params}
