"""Policies at their edges: the ends of each range, columns of a job, names of errors, attempts."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import policy
from tests.support import tabled


def read(**entry: Any) -> Any:
    return policy.read(entry, {}, "here")


def test_the_ends_of_each_range_are_taken() -> None:
    cases: list[Any] = [
        ("retries", 0), ("retries", 1000), ("timeout_s", 0.001), ("timeout_s", 366 * 86400.0),
        ("backoff", 0.0), ("backoff", 366 * 86400.0), ("priority", -32768), ("priority", 32767),
        ("lock_key", "x" * 200), ("retry_on", ["a.B"]), ("discard_on", []),
        ("backoff", {"kind": "constant", "base_s": 0.0, "cap_s": 0.0, "jitter": 0.0}),
        ("backoff", {"jitter": 1.0}), ("backoff", {}),
    ]  # fmt: skip
    for key, value in cases:
        with tabled.case(key, value):
            assert read(**{key: value}) == {key: value}


def test_what_is_beside_them_is_refused() -> None:
    cases: list[Any] = [
        ("retries", 1001, "0 to 1000"), ("timeout_s", 0.0009, "0.001 to"),
        ("timeout_s", 366 * 86400.0 + 1, "to 31622400"), ("timeout_s", True, "a number"),
        ("backoff", -0.1, "0 to"), ("backoff", True, "a number"), ("retries", False, "whole"),
        ("priority", -32769, "-32768 to 32767"), ("priority", 32768, "-32768 to 32767"),
        ("lock_key", "x" * 201, "1 to 200"), ("retry_on", [""], "lists names"),
        ("retry_on", ["a", "b."], "lists names"), ("retry_on", [None], "lists names"),
        ("backoff", {"base_s": -1}, "'backoff.base_s' must be 0 to"),
        ("backoff", {"cap_s": "1"}, "'backoff.cap_s' must be a number"),
        ("backoff", {"jitter": -0.1}, "'backoff.jitter' must be 0 to 1"),
        ("backoff", {"jitter": 1.1}, "'backoff.jitter' must be 0 to 1"),
    ]  # fmt: skip
    for key, value, said in cases:
        with tabled.case(key, value, said):
            with pytest.raises(errors.InvalidWorkflow) as refused:
                read(**{key: value})
            assert said in str(refused.value)


def test_null_in_a_backoff_and_in_a_policy_counts_as_missing() -> None:
    assert read(backoff={"kind": None, "base_s": None, "cap_s": None, "jitter": None}) == {
        "backoff": {}
    }
    assert read(retries=None, other=3) is None
    assert policy.read({}, {}, "here") is None


def test_one_name_is_a_list_of_one() -> None:
    assert read(retry_on="ValueError") == {"retry_on": ["ValueError"]}


def test_defaults_are_the_keys_of_a_policy() -> None:
    assert policy.defaults({}, "p") == {}
    assert policy.defaults({"defaults": {"retries": 2, "priority": None}}, "p") == {
        "retries": 2,
        "priority": None,
    }
    with pytest.raises(errors.InvalidWorkflow, match=r"p: 'defaults'.*object is needed"):
        policy.defaults({"defaults": [1]}, "p")


def test_an_input_waits_for_its_timeout_and_takes_its_default_then() -> None:
    assert policy.read_input({"timeout_s": 5}, "s") == {"timeout_s": 5.0}
    assert policy.read_input({"timeout_s": 5, "default": (1, 2)}, "s") == {
        "timeout_s": 5.0,
        "default": [1, 2],
    }
    assert policy.read_input({"timeout_s": None, "default": 1}, "s") is None


def test_a_policy_sets_columns_and_keeps_what_decides_on_failures() -> None:
    given = {"retries": 2, "timeout_s": 5.0, "priority": 1, "lock_key": "k", "backoff": 3.0}
    assert policy.columns({**given, "retry_on": ["A"], "discard_on": ["B"]}, is_input=False) == {
        "timeout_s": 5.0,
        "priority": 1,
        "lock_key": "k",
        "max_attempts": 3,
        "policy": {"backoff": 3.0, "retry_on": ["A"], "discard_on": ["B"]},
    }
    assert policy.columns({"priority": 1}, is_input=False) == {"priority": 1}
    assert policy.columns(given, is_input=True) == {"policy": given}


class Own(ValueError):
    """An error of an app."""


def test_errors_are_named_by_class_or_text() -> None:
    def local() -> type[Exception]:
        class Inner(Exception):
            """One that cannot be imported."""

        return Inner

    assert policy.error_names(ValueError) == ["ValueError"]
    assert policy.error_names("a.B") == ["a.B"]
    assert policy.error_names([Own, "x", local()]) == [f"{__name__}.Own", "x", "Inner"]


def test_the_names_of_an_error_are_those_of_its_bases_without_object() -> None:
    names = policy.names_of(Own())
    assert {"Own", "ValueError", "Exception", "BaseException", f"{__name__}.Own"} <= names
    assert "object" not in names
    assert "builtins.object" not in names


def test_a_job_has_the_attempts_of_its_row_or_its_task() -> None:
    cases: list[Any] = [
        (1, None, None, 1), (1, None, {"retries": 4}, 5), (1, {}, {"retries": 4}, 5),
        (3, None, {"retries": 4}, 3), (1, {"retries": 0}, {"retries": 4}, 1),
        (1, {"retries": 2}, {"retries": 4}, 3), (2, {"retries": 0}, None, 2),
        (2, {"retries": 4}, None, 5), (1, None, {"retries": None}, 1), (0, None, None, 1),
        (2, None, {"retries": 9}, 2), (0, None, {"retries": 4}, 5),
    ]  # fmt: skip
    for max_attempts, own, task, attempts in cases:
        with tabled.case(max_attempts, own, task, attempts):
            assert policy.most_attempts(max_attempts, own, task) == attempts


def test_a_failure_is_decided_by_the_job_before_its_task() -> None:
    raised = policy.Raised(frozenset({"A"}))
    assert policy.decide({"backoff": 5}, 0, raised, task={"backoff": 9}) == (True, 5.0)
    assert policy.decide(None, 0, raised, task={"backoff": 9}) == (True, 9.0)
    assert policy.decide(None, 0, raised, task={"discard_on": ["A"]}) == (False, 30.0)
    assert policy.decide(None, 2, policy.Raised(wish="discard")) == (False, 90.0)
    assert policy.decide(None, 0, policy.Raised(after_s=0.0)) == (True, 0.0)


def test_a_wait_grows_to_its_cap() -> None:
    cases: list[Any] = [
        ({"kind": "exponential", "base_s": 1e-12, "cap_s": 1e9}, 61, 1e-12 * 2.0**60),
        ({"kind": "exponential", "base_s": 1e-12, "cap_s": 1e9}, 62, 1e-12 * 2.0**60),
        ({"kind": "exponential", "base_s": 1e-12, "cap_s": 1e9}, 60, 1e-12 * 2.0**59),
        ({"base_s": 100}, 40, 3600.0), ({}, 3, 90.0),
        (None, 200_000, 6_000_000.0), (None, 2_000_000, 366 * 86400.0),
        ({"kind": "constant", "base_s": 5000}, 1, 5000.0),
    ]  # fmt: skip
    for raw, attempt, wait_s in cases:
        with tabled.case(raw, attempt, wait_s):
            assert policy.delay_s(raw, attempt) == wait_s


def test_a_jitter_of_one_draws_from_nothing_to_the_whole_wait() -> None:
    drawn = [policy.delay_s({"base_s": 10, "jitter": 1.0}, 1) for _ in range(200)]
    assert 0.0 < min(drawn) < 1.0
    assert 9.0 < max(drawn) <= 10.0
