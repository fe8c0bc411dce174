"""Define the options of declared functions: id, dependencies, condition and policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from queue_workflows import errors
from queue_workflows.dag import key_names
from queue_workflows.dag import policy as policies
from queue_workflows.declare import building, handles


class Backoff(TypedDict, total=False):
    """The growth of the wait before another attempt; `jitter` is its random share."""

    kind: Literal["constant", "linear", "exponential"]
    base_s: float
    cap_s: float
    jitter: float


class Policy(TypedDict, total=False):
    """The policy of a node's jobs; each key is stored in the definition as it is given.

    `retry_on`, `discard_on`: errors by class or name; a class is stored by its name.
    """

    retries: int
    backoff: float | Backoff
    timeout_s: float
    retry_on: Iterable[str | type[BaseException]]
    discard_on: Iterable[str | type[BaseException]]
    priority: int
    lock_key: str


class FailedItem(TypedDict):
    """An item that failed in a map which lets some fail: its key and its error."""

    key: str
    error: str


_POLICY = frozenset(Policy.__annotations__)


def of_call(
    name: str,
    step_id: str | None,
    after: Iterable[object],
    skip_if: object,
    policy: Mapping[str, Any],
) -> building.Options:
    """Return the options of the next call of a declared function."""
    if isinstance(after, (str, Mapping, handles.Handle)):
        raise errors.InvalidWorkflow(f"{name!r}: after=[...] takes a list of outputs")
    return building.Options(step_id, tuple(after), skip_if, checked(name, policy))


def checked(name: str, policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy as definitions have it. Raises `InvalidConfig` for an unknown key."""
    for key in policy:
        if key not in _POLICY:
            raise errors.InvalidConfig(
                f"{name!r}: unknown option {key!r}; known are {', '.join(sorted(_POLICY))}"
                f"{key_names.hint(key, policies.KEYS)}"
            )
    named = {"retry_on", "discard_on"} & policy.keys()
    return {**policy, **{key: policies.error_names(policy[key]) for key in sorted(named)}}
