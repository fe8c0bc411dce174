"""Shorten what the library waits for, and lower what it writes at once, for a test's sake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from queue_workflows import config
from queue_workflows.db import pool, schema
from queue_workflows.dispatch import expansion, run_cache, schedule_rows
from queue_workflows.model_cache import loading
from queue_workflows.runtime import supervisor
from queue_workflows.worker import claimed_job, desk, gpu_models, job_logs, queue_state, shapes

if TYPE_CHECKING:
    import pytest


def shorten_lock_waits(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the library's new connections give up waiting for a lock after these seconds."""
    monkeypatch.setattr(pool, "LOCK_TIMEOUT_S", seconds)


def wait_for_statements(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let statements of the library's new connections take so long at most."""
    monkeypatch.setattr(pool, "STATEMENT_TIMEOUT_S", seconds)


def shorten_schedule_batches(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a scheduler's transaction fire no further instant after these seconds."""
    monkeypatch.setattr(schedule_rows, "BATCH_S", seconds)


def report_migrations_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a migration name at once, not after some seconds, who holds the lock that it needs."""
    monkeypatch.setattr(schema, "LOGGED_S", 0.0)


def store_logs_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a worker store what its handlers print each time after these seconds."""
    for name in ("STORE_S", "BETWEEN_S"):
        monkeypatch.setattr(job_logs, name, seconds)


def stop_limit_s() -> float:
    """Return how long the parent of a worker takes at most to stop."""
    return config.SHUTDOWN_TIMEOUT_S.read() + supervisor.STOP_MARGIN_S + supervisor.KILL_WAIT_S


def shorten_claim_retries(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a worker whose claim failed claim again for the first time after these seconds."""
    monkeypatch.setattr(desk, "RETRY_FIRST_S", seconds)


def claim_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker claim as many jobs ahead as may wait, however long handlers take."""
    monkeypatch.setattr(queue_state.Window, "ahead", property(lambda own: own._slots * own._most))


def let_claimed_jobs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a job that was claimed ahead wait for the handler before it."""
    monkeypatch.setattr(claimed_job, "WAIT_S", 3600.0)


def pause_streams(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the service read an open stream of parts again after these seconds without news."""
    # Only where the extra `service` is installed.
    from queue_workflows.service.routes import sent_events

    monkeypatch.setattr(sent_events, "PAUSE_S", seconds)


def wait_for_gpu_sizes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a gpu worker's first claim, and the tool that it asks, take so long at most."""
    monkeypatch.setattr(gpu_models, "PUBLISH_WAIT_S", seconds)
    monkeypatch.setattr(shapes, "TIMEOUT_S", seconds)


def collect_no_garbage_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an unload of a model free no memory: a collection walks what all tests have left."""
    monkeypatch.setattr(loading, "_release_memory", lambda: None)


def write_less_at_once(monkeypatch: pytest.MonkeyPatch, part: int) -> int:
    """Let a plan write one `part`-th of what it may; return how many bytes of JSON these are."""
    most = expansion.TRANSACTION_BYTES // part
    monkeypatch.setattr(expansion, "TRANSACTION_BYTES", most)
    return most


def read_less_at_once(monkeypatch: pytest.MonkeyPatch, part: int) -> int:
    """Let a plan read one `part`-th of what it may; return how many bytes of JSON these are."""
    most = run_cache.READ_BYTES // part
    monkeypatch.setattr(run_cache, "READ_BYTES", most)
    return most
