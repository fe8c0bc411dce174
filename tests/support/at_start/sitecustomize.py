"""Give constants of the package other values, in every Python process of a test's environment.

An interpreter imports a module of this name when it starts, if PYTHONPATH leads to it. A script
that is forked calls `set_all`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os

VARIABLE = "QW_TEST_CONSTANTS"


def set_all() -> None:
    """Set the constants that the environment of this process names, as far as this code has them.

    The package may be of an older version.
    """
    for name, value in json.loads(os.environ.get(VARIABLE, "{}")).items():
        module, _, constant = f"queue_workflows.{name}".rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):
            setattr(importlib.import_module(module), constant, value)


if __name__ == "sitecustomize":
    set_all()
