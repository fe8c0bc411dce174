"""Parse a job's policy for failures, waits and priority, and decide whether it is retried."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import errors
from queue_workflows.dag import document_values

BASE_S = 30.0
"""Seconds of wait per earlier attempt before an ordinary failure is retried."""
CAP_S = 3600.0
"""The longest wait of a growing backoff without its own `cap_s`."""
MAX_WAIT_S = 366 * 86400.0
"""The longest wait that is accepted; a longer one is probably a mistake in units."""
MAX_RETRIES = 1000
PRIORITIES = range(-32768, 32768)
"""The range of the column (smallint)."""
KEYS = ("retries", "backoff", "timeout_s", "retry_on", "discard_on", "priority", "lock_key")
KINDS = ("constant", "linear", "exponential")
_BACKOFF_KEYS = ("kind", "base_s", "cap_s", "jitter")
_RIGHT_NAMES = {
    "attempts": "retries", "max_attempts": "retries", "max_retries": "retries",
    "max_tries": "retries", "maximum_attempts": "retries", "retry": "retries", "tries": "retries",
    "delay_s": "backoff", "retry_backoff": "backoff", "retry_delay": "backoff",
    "retry_delay_s": "backoff", "default_retry_delay": "backoff",
    "execution_timeout": "timeout_s", "time_limit": "timeout_s", "timeout_seconds": "timeout_s",
    "autoretry_for": "retry_on", "retry_for": "retry_on",
    "abort_on": "discard_on", "dont_retry_on": "discard_on", "no_retry_on": "discard_on",
    "concurrency_key": "lock_key", "lock": "lock_key", "mutex": "lock_key", "prio": "priority",
}  # fmt: skip
"""Names of the same keys in Celery, Airflow, Temporal and others, and common guesses."""


class Raised(NamedTuple):
    """The facts about a failed attempt that decide about the next one."""

    names: frozenset[str] = frozenset()
    """The classes of the error, bare and qualified."""
    wish: str = ""
    """`retry` or `discard` if the handler requested it, `elsewhere` if the worker does not know the
    node, `no_gpu` if the worker cannot use its GPU, `no_memory` if a model did not fit into memory;
    otherwise its policy decides."""
    after_s: float | None = None
    """The wait that the handler requested."""


class Verdict(NamedTuple):
    """Whether to try again if attempts are left, and after how many seconds."""

    retry: bool
    after_s: float


def read(
    entry: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> dict[str, Any] | None:
    """Return the policy of a node, its own keys before its pipeline's; None if neither has any.

    A key that is null in the node restores the default. Raises `InvalidWorkflow` naming `where`.
    """
    if not isinstance(entry, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidWorkflow(f"{where} must be an object, not {entry!r:.120}")
    found = {**defaults, **{key: entry[key] for key in KEYS if key in entry}}
    checked = {
        key: _CHECKS[key](value, key, where) for key, value in found.items() if value is not None
    }
    return checked or None


def defaults(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the `defaults` of a pipeline; raise `InvalidWorkflow` for an unknown key."""
    raw = schema.get("defaults")
    if raw is None:
        return {}
    where = f"{where}: 'defaults'"
    given = document_values.record(raw, where)
    _refuse_unknown(given, KEYS, where)
    read(given, {}, where)
    return dict(given)


def read_input(entry: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return how long an input step waits for its answer, and the `default` answer after that.

    None without `timeout_s`; then `default` belongs to the widget.
    """
    if entry.get("timeout_s") is None:
        return None
    found: dict[str, Any] = {"timeout_s": _seconds(entry["timeout_s"], "timeout_s", where)}
    if "default" in entry:
        found["default"] = document_values.value(entry["default"], f"{where}: 'default'")
    return found


def columns(policy: Mapping[str, Any], *, is_input: bool) -> dict[str, Any]:
    """Return the columns that a checked policy sets; `policy` has its rules for failures.

    An input node's `timeout_s` bounds its wait, not its handler, so it stays in `policy`.
    """
    if is_input:
        return {"policy": dict(policy)}
    found: dict[str, Any] = {
        key: policy[key] for key in ("timeout_s", "priority", "lock_key") if key in policy
    }
    if "retries" in policy:
        found["max_attempts"] = policy["retries"] + 1
    rest = {key: policy[key] for key in ("backoff", "retry_on", "discard_on") if key in policy}
    return found | ({"policy": rest} if rest else {})


def names_of(error: BaseException) -> frozenset[str]:
    """Return the names of an error for `retry_on` and `discard_on`: its class and its bases."""
    names: set[str] = set()
    for cls in type(error).__mro__[:-1]:
        names |= {cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}"}
    return frozenset(names)


def error_names(
    raised: str | type[BaseException] | Iterable[str | type[BaseException]],
) -> list[str]:
    """Return errors by name: builtins by their own, others with their module."""

    def name_of(each: str | type[BaseException]) -> str:
        if isinstance(each, str):
            return each
        if each.__module__ == "builtins" or "<locals>" in each.__qualname__:
            return each.__name__
        return f"{each.__module__}.{each.__qualname__}"

    return [*map(name_of, [raised] if isinstance(raised, (str, type)) else raised)]


def most_attempts(
    max_attempts: int, own: Mapping[str, Any] | None, task: Mapping[str, Any] | None
) -> int:
    """Return how many attempts a job has by its row (`max_attempts`, `own`) or else its task.

    1 is the column's default, so it only counts if `own` has `retries`.
    """
    source = own or {}
    if max_attempts <= 1 and "retries" not in source:
        source = task or {}
    return max(max_attempts, 1 + (source.get("retries") or 0))


def decide(
    policy: Mapping[str, Any] | None,
    attempts: int,
    raised: Raised,
    *,
    task: Mapping[str, Any] | None = None,
) -> Verdict:
    """Return the verdict on a failure after `attempts` earlier ones.

    `task` has values for keys that the policy lacks. Raises `InvalidWorkflow` for a wrong policy.
    """
    found = read(policy or {}, task or {}, "its policy") or {}
    after_s = raised.after_s
    if after_s is None:
        after_s = delay_s(found.get("backoff"), attempts + 1)
    if raised.wish:
        return Verdict(raised.wish == "retry", after_s)
    only = found.get("retry_on")
    retry = only is None or not raised.names.isdisjoint(only)
    return Verdict(retry and raised.names.isdisjoint(found.get("discard_on", ())), after_s)


def delay_s(raw: Any, attempt: int, draw: random.Random | None = None) -> float:
    """Return the seconds to wait after the failed `attempt` (1 is the first).

    With `jitter` j, the wait is drawn evenly from (1 - j) to 1 times its length, never above a cap.
    """
    if not isinstance(raw, dict):  # the default and a constant have no cap
        return min(BASE_S * attempt if raw is None else float(raw), MAX_WAIT_S)
    given = cast("dict[str, Any]", raw)
    kind, wait_s = given.get("kind", "linear"), given.get("base_s", BASE_S)
    if kind == "linear":
        wait_s *= attempt
    elif kind == "exponential":
        wait_s *= 2.0 ** min(attempt - 1, 60)
    wait_s = min(wait_s, given.get("cap_s", MAX_WAIT_S if kind == "constant" else CAP_S))
    if jitter := given.get("jitter"):
        wait_s *= 1 - jitter * (draw or _random).random()
    return wait_s


_random = random.Random()  # noqa: S311  jitter


def _refuse_unknown(given: Iterable[str], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise errors.InvalidWorkflow(
                f"{where}: {name!r:.120} is none of {', '.join(known)}{hint(name, known)}"
            )


def _backoff(raw: Any, key: str, where: str) -> Any:
    if not isinstance(raw, Mapping):
        return _seconds(raw, key, where, least=0.0)
    given = cast("Mapping[str, Any]", raw)
    _refuse_unknown(given, _BACKOFF_KEYS, f"{where}: {key!r}")
    checked = {name: value for name, value in given.items() if value is not None}
    if checked.get("kind", KINDS[0]) not in KINDS:
        raise errors.InvalidWorkflow(
            f"{where}: {key!r}: unknown kind {checked['kind']!r:.120}; it is one of "
            f"{', '.join(KINDS)}"
        )
    for name, value in checked.items():
        if name == "jitter":
            checked[name] = _number(value, f"{key}.{name}", where, 0.0, 1.0)
        elif name != "kind":
            checked[name] = _seconds(value, f"{key}.{name}", where, least=0.0)
    return checked


def _number(
    raw: Any, key: str, where: str, least: float, most: float, kind: type[float] = float
) -> float:
    noun, takes = ("a whole number", int) if kind is int else ("a number", (int, float))
    if isinstance(raw, bool) or not isinstance(raw, takes) or raw != raw:
        raise errors.InvalidWorkflow(f"{where}: {key!r} must be {noun}, not {raw!r:.120}")
    if not least <= raw <= most:  # also refuses NaN, infinity, and an int that no float can hold
        raise errors.InvalidWorkflow(
            f"{where}: {key!r} must be {least:g} to {most:.9g}, not {raw!r:.40}"
        )
    return kind(raw)


def _seconds(raw: Any, key: str, where: str, least: float = 0.001) -> float:
    return _number(raw, key, where, least, MAX_WAIT_S)


def _names(raw: Any, key: str, where: str) -> list[str]:
    listed = [raw] if isinstance(raw, str) else raw
    checked = document_values.items({key: listed}, key, where)
    for name in checked:
        if not isinstance(name, str) or not all(p.isidentifier() for p in name.split(".")):
            raise errors.InvalidWorkflow(
                f"{where}: {key!r} lists names of exceptions, not {name!r:.120}"
            )
    return checked


_CHECKS: dict[str, Callable[[Any, str, str], Any]] = {
    "retries": functools.partial(_number, least=0, most=MAX_RETRIES, kind=int),
    "backoff": _backoff,
    "timeout_s": _seconds,
    "retry_on": _names,
    "discard_on": _names,
    "priority": functools.partial(_number, least=PRIORITIES[0], most=PRIORITIES[-1], kind=int),
    "lock_key": lambda raw, key, where: document_values.needed_text({key: raw}, key, where),
}


def right_name(key: str, known: Iterable[str]) -> str | None:
    """Return the key of `known` that a wrong key probably means, or None."""
    names = list(known)
    if _RIGHT_NAMES.get(key) in names:
        return _RIGHT_NAMES[key]
    return errors.closest(key, names)


def hint(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a wrong key, or an empty text."""
    meant = right_name(key, known)
    return f"; did you mean {meant!r}?" if meant else ""
