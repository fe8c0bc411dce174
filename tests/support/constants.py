"""Give constants of the package other values in the processes that a test starts.

What nobody has a reason to change is no setting. Some tests cannot wait so long, so their commands
get the values before they do anything, and so do the processes that those start.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import fork_server
from tests.support.at_start import sitecustomize

if TYPE_CHECKING:
    import pytest


def env(values: Mapping[str, float]) -> dict[str, str]:
    """Return the variables for constants by name, such as `claim.recovery.MAX_CRASHES`."""
    for name, given in values.items():
        assert isinstance(value(name), float if isinstance(given, float) else (int, float)), name
    before = f"{sitecustomize.__name__}:{sitecustomize.set_all.__name__}"
    return {sitecustomize.VARIABLE: json.dumps(values), fork_server.BEFORE: before}


def value(name: str) -> Any:
    """Return a constant, by name as for `env`."""
    module, _, constant = f"queue_workflows.{name}".rpartition(".")
    return getattr(importlib.import_module(module), constant)


def put(monkeypatch: pytest.MonkeyPatch, name: str, given: Any) -> None:
    """Give a constant, by name as for `env`, another value in this process until the test ends."""
    module, _, constant = f"queue_workflows.{name}".rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), constant, given)


def for_children(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment in which each interpreter sets the constants that it names."""
    if sitecustomize.VARIABLE not in given:
        return given
    folder = str(Path(sitecustomize.__file__).parent)
    path = filter(None, [folder, given.get("PYTHONPATH")])
    return {**given, "PYTHONPATH": os.pathsep.join(path)}
