"""Policies: what is refused with which message, back-off times, what follows a failure."""

from __future__ import annotations

import random
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import definition, policy
from tests.support import tabled


class Flaky(ConnectionError):
    """An error of the app's own."""


def waits(backoff: Any, attempts: int = 5) -> list[float]:
    return [policy.delay_s(backoff, attempt) for attempt in range(1, attempts + 1)]


def decided(given: dict[str, Any] | None, error: BaseException) -> bool:
    return policy.decide(given, 0, policy.Raised(policy.names_of(error))).retry


def test_a_backoff_grows_as_its_kind_defines() -> None:
    cases: list[Any] = [
        (None, [30, 60, 90, 120, 150]),
        (7, [7] * 5),
        (0, [0] * 5),
        ({"kind": "linear", "base_s": 2}, [2, 4, 6, 8, 10]),
        ({"kind": "exponential", "base_s": 2, "cap_s": 10}, [2, 4, 8, 10, 10]),
        ({"kind": "constant", "base_s": 5}, [5] * 5),
        ({"kind": "exponential", "base_s": 1000}, [1000, 2000, 3600, 3600, 3600]),
    ]
    for backoff, expected in cases:
        with tabled.case(backoff, expected):
            assert waits(backoff) == expected


def test_a_backoff_of_many_attempts_stays_at_its_cap() -> None:
    assert policy.delay_s({"kind": "exponential"}, 10_000) == policy.CAP_S


def test_jitter_takes_from_the_wait_and_can_be_seeded() -> None:
    backoff = {"kind": "constant", "base_s": 100, "jitter": 0.4}
    drawn = [policy.delay_s(backoff, 1, random.Random(seed)) for seed in range(200)]
    assert drawn == [policy.delay_s(backoff, 1, random.Random(seed)) for seed in range(200)]
    assert 60 <= min(drawn) < 65
    assert 95 < max(drawn) <= 100


@pytest.mark.parametrize("raw", [5, True, "retries", [1], 1.5])
def test_a_policy_that_is_no_object_is_refused(raw: Any) -> None:
    with pytest.raises(errors.InvalidWorkflow, match="its policy must be an object"):
        policy.decide(raw, 0, policy.Raised())


@pytest.mark.parametrize(
    "name", ["Flaky", f"{__name__}.Flaky", "ConnectionError", "builtins.OSError", "Exception"]
)
def test_an_error_is_called_by_its_class_or_any_base(name: str) -> None:
    assert decided({"retry_on": [name]}, Flaky())
    assert not decided({"discard_on": [name]}, Flaky())


def test_what_retry_on_does_not_name_is_not_tried_again() -> None:
    assert not decided({"retry_on": ["Flaky"]}, ConnectionError())
    assert decided({"discard_on": ["Flaky"]}, ConnectionError())
    assert decided(None, ConnectionError())


def test_discard_wins_over_retry_and_the_handler_wins_over_both() -> None:
    both = {"retry_on": ["OSError"], "discard_on": ["Flaky"]}
    assert not decided(both, Flaky())
    assert decided(both, OSError())
    asked = policy.Raised(policy.names_of(Flaky()), "retry", 4.0)
    assert policy.decide(both, 0, asked) == policy.Verdict(True, 4.0)


def test_the_wait_counts_the_attempt_that_failed() -> None:
    assert policy.decide({"backoff": {"base_s": 3}}, 2, policy.Raised()).after_s == 9


def test_a_signal_takes_only_a_wait_that_can_be_waited() -> None:
    assert errors.Retry(3).after_s == 3
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a wait of"):
            errors.Snooze(seconds)


def expanded(node: dict[str, Any], **schema: Any) -> dict[str, Any]:
    pipeline = {"nodes": [{"id": "n", **node}], **schema}
    steps = [{"id": "s", "kind": "pipeline", "pipeline": "p"}]
    made = definition.expand({"name": "w", "steps": steps}, lambda _: pipeline)
    return made["nodes"][0].get("policy")


def test_a_nodes_keys_come_before_its_pipelines_defaults_and_null_takes_one_back() -> None:
    found = expanded(
        {"retries": 1, "timeout_s": None}, defaults={"retries": 5, "timeout_s": 9, "priority": 3}
    )
    assert found == {"retries": 1, "priority": 3}


def test_a_node_without_a_policy_leaves_the_definition_as_it_was() -> None:
    assert expanded({}) is None


def test_a_bad_value_is_refused_with_the_node_that_has_it() -> None:
    cases: list[Any] = [
        ({"retries": -1}, "'retries' must be 0 to 1000"),
        ({"retries": True}, "'retries' must be a whole number"),
        ({"retries": "3"}, "'retries' must be a whole number"),
        ({"timeout_s": 0}, "'timeout_s' must be 0.001"),
        ({"timeout_s": float("nan")}, "'timeout_s' must be a number"),
        ({"timeout_s": 10**400}, "'timeout_s' must be 0.001"),
        ({"backoff": -(10**400)}, "'backoff' must be 0"),
        ({"backoff": float("inf")}, "'backoff' must be 0"),
        ({"backoff": -1}, "'backoff' must be 0"),
        ({"backoff": "fast"}, "'backoff' must be a number"),
        ({"backoff": {"kind": "cubic"}}, "unknown kind 'cubic'"),
        ({"backoff": {"base": 3}}, "'base' is none of kind, base_s"),
        ({"backoff": {"jitter": 2}}, "'backoff.jitter' must be 0 to 1"),
        ({"retry_on": ["a b"]}, "'retry_on' lists names of exceptions, not 'a b'"),
        ({"discard_on": [3]}, "'discard_on' lists names"),
        ({"retry_on": 3}, "'retry_on' must be a list"),
        ({"priority": 40000}, "'priority' must be -32768 to 32767"),
        ({"lock_key": ""}, "'lock_key' must have 1 to 200 characters"),
        ({"lock_key": 5}, "'lock_key' must be text"),
    ]
    for node, words in cases:
        with tabled.case(node, words):
            with pytest.raises(errors.InvalidWorkflow, match="pipeline 'p': node 'n': ") as caught:
                expanded(node)
            assert words in str(caught.value)


def test_bad_defaults_are_refused() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="'defaults': 'retry' is none of retries"):
        expanded({}, defaults={"retry": 3})
    with pytest.raises(errors.InvalidWorkflow, match="'defaults': 'retries' must be"):
        expanded({"retries": 1}, defaults={"retries": -3})


def test_an_input_step_without_a_timeout_keeps_default_for_its_widget() -> None:
    step = {"id": "ask", "kind": "input", "widget": "x", "default": {1, 2}}
    assert policy.read_input(step, "s") is None
    with pytest.raises(errors.InvalidWorkflow, match="'timeout_s' must be"):
        policy.read_input(step | {"timeout_s": -1}, "s")
