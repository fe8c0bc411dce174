"""Test apps: runs to their end in this process, no sleep, no thread. PYTEST_DONT_REWRITE

With pytest, in conftest.py: `pytest_plugins = ["queue_workflows.testing"]`, which brings the
fixtures of `testing.plugin`. Without it: `with testing.harness(app="letters:setup") as flows`.
"""

from __future__ import annotations

from queue_workflows.testing.app_harness import Harness, harness
from queue_workflows.testing.result import Node, Result
from queue_workflows.testing.servers import database

__all__ = ["Harness", "Node", "Result", "database", "harness"]

pytest_plugins = ("queue_workflows.testing.plugin",)
"""Only pytest reads this; nothing here imports it."""
