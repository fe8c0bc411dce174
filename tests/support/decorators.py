"""Decorators of another module, whose names the decorated functions do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the list of what a generator yields."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return [*function(*args, **kwargs)]

    return wrapper
