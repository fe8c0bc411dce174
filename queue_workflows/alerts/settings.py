"""Read the settings of failure alerts; refuse wrong ones before anything starts."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from queue_workflows import config, errors
from queue_workflows.types import FailureHook


class Settings(NamedTuple):
    """Where alerts go, and how often. Times in seconds."""

    hook: FailureHook | None
    command: tuple[str, ...]
    """The program and its arguments; () for none."""
    per_minute: int
    timeout_s: float
    max_age_s: float
    poll_s: float
    on_failure: Mapping[str, FailureHook] = MappingProxyType({})
    """The functions of schedules, by name."""

    @property
    def has_hook(self) -> bool:
        """Return whether there is a function to call."""
        return self.hook is not None or bool(self.on_failure)

    @property
    def wanted(self) -> bool:
        """Return whether there is a function or a command."""
        return self.has_hook or bool(self.command)

    def hooks_of(self, alert: Mapping[str, Any]) -> list[FailureHook]:
        """Return the functions that an alert goes to: that of its schedule, and that of the app."""
        own = self.on_failure.get(alert["schedule"])
        return [hook for hook in (own, self.hook) if hook is not None]


def read() -> Settings:
    """Return the settings in force.

    Raises `InvalidConfig` that names the variable, its value and what is allowed.
    """
    return Settings(
        config.get_config().on_failed,
        _command(config.ON_FAILED.read()),
        config.ALERTS_PER_MINUTE.read_within(1, 600),
        config.ALERT_TIMEOUT_S.read_within(0.1, 300.0),
        config.ALERT_MAX_AGE_S.read_within(60.0, 604800.0),
        config.ALERT_POLL_S.read_within(0.1, 60.0),
        {
            one.name: one.on_failure
            for one in config.get_config().ingest_schedule
            if getattr(one, "on_failure", None) is not None
        },
    )


def _command(text: str) -> tuple[str, ...]:
    name = config.ON_FAILED.variables[0]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise errors.InvalidConfig(
            f"{name}={text!r:.200} cannot be read: {error}; write a program and its arguments, "
            "quoted as in a shell"
        ) from None
    if words and shutil.which(words[0]) is None:
        raise errors.InvalidConfig(
            f"{name}={text!r:.200} names no executable: {words[0]!r:.200}; name a program on "
            "PATH or the path of one, or `sh -c '...'` for a line of shell"
        )
    return tuple(words)
