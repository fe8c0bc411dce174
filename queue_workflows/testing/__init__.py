"""Test an app in this process: run its workflows to their end, without threads or sleeps.

With pytest, in conftest.py: `pytest_plugins = ["queue_workflows.testing"]`, which brings the
fixtures of `testing.plugin`. Without it: `with testing.harness(app="letters:setup") as flows`.

PYTEST_DONT_REWRITE: an app may have imported this before pytest loads it.
"""

from __future__ import annotations

from queue_workflows.testing.app_harness import Harness, harness
from queue_workflows.testing.result import Node, Result
from queue_workflows.testing.servers import database

__all__ = ["Harness", "Node", "Result", "database", "harness"]

pytest_plugins = ("queue_workflows.testing.plugin",)
"""Only pytest reads this; it is not imported here."""
