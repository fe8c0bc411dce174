"""Read the settings of failure alerts; refuse wrong ones before anything starts."""

from __future__ import annotations

import shlex
import shutil
from typing import NamedTuple

from queue_workflows import config, errors
from queue_workflows.types import FailureHook


class Settings(NamedTuple):
    """Who is told about failures, and how often. Times in seconds."""

    hook: FailureHook | None
    command: tuple[str, ...]
    """The program and its arguments; () for none."""
    per_minute: int
    timeout_s: float
    max_age_s: float
    poll_s: float

    @property
    def wanted(self) -> bool:
        """Return whether anybody is told."""
        return self.hook is not None or bool(self.command)


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
    )


def _command(text: str) -> tuple[str, ...]:
    name = config.ON_FAILED.variables[0]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise errors.InvalidConfig(
            f"{name}={text!r:.200}: {error}; write a program and its arguments, quoted as in a "
            "shell"
        ) from None
    if words and shutil.which(words[0]) is None:
        raise errors.InvalidConfig(
            f"{name}={text!r:.200}: there is no executable {words[0]!r:.200}; name a program on "
            "PATH or the path of one, or `sh -c '...'` for a line of shell"
        )
    return tuple(words)
