"""Say how many examples a property test tries: few in README's command, all with QW_TEST_FULL=1.

CI sets the variable for the run that has the slow tests and the property tests (`-m property`).
No example fails for its time, and none for the time that it takes to make it.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis.strategies import DataObject

FULL = bool(os.environ.get("QW_TEST_FULL"))
SHARE = 4
BUDGET_S = 5.0
"""After this time the examples that are left do nothing, unless one has failed."""
_LAZY = (random.Random, DataObject)
"""What a test draws from while it runs: one that does nothing would draw otherwise than before."""


for name, most in {"quick": 100 // SHARE, "full": 100}.items():
    hypothesis.settings.register_profile(
        name,
        max_examples=most,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("full" if FULL else "quick")


def examples(full: int, quick: int | None = None) -> int:
    """Return the number of examples: `full` in CI; else `quick`, by default a quarter."""
    return full if FULL else quick or max(5, full // SHARE)


def within_budget(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that hypothesis calls for each example, with an end in time."""
    begun, failed = 0.0, False

    @functools.wraps(test)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun, failed
        begun = begun or time.monotonic()
        lazy = any(isinstance(each, _LAZY) for each in (*args, *kwargs.values()))
        if not failed and not lazy and time.monotonic() - begun > BUDGET_S:
            return None
        try:
            return test(*args, **kwargs)
        except BaseException:
            failed = True  # from here on hypothesis shrinks and repeats
            raise

    called.unlimited = test  # pyright: ignore[reportFunctionMemberAccess]
    return test if FULL else called
