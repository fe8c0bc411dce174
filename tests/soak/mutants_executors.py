"""Define mutants of workers whose handlers run in executors: deadline, deaths, kills, charges."""

from __future__ import annotations

import functools
from typing import Any

from queue_workflows.executor import launcher_client
from queue_workflows.worker import executors, slot_deaths, slot_runs
from tests.soak import fault_plan
from tests.soak.mutant import Mutant, replace

LONG = {"long": 3, "wide": 0, "diamond": 0}


def _no_deadline() -> None:
    """Let executors run on when their worker is stopped or silent."""
    replace(launcher_client.Launcher, "hold_until", lambda *_: None)


def _no_kill() -> None:
    """Never end an executor, for any state of its job's claim."""
    replace(slot_runs.Runs, "kill", lambda *_: None)
    _no_deadline()


def _forget_deaths() -> None:
    """Renew the claim of a job for ever whose executor has died."""
    replace(slot_runs.Runs, "died", lambda *_: None)


def _charge_for_the_launcher() -> None:
    """Count a crash of each job whose executor ended with the launcher."""
    charge = slot_deaths._charge
    found = executors.Death("its executor ended with the launcher", {})

    def hand_back(deaths: Any, work: Any, reason: str) -> None:
        write = functools.partial(charge, work.lease, deaths._host, found)
        deaths._records.add_ending(work, write)

    replace(slot_deaths.Deaths, "hand_back", hand_back)


MUTANTS = {
    "executor-deadline": Mutant(
        "the launcher has no deadline: executors outlive a worker that is stopped",
        "handlers that outlived their claim", _no_deadline, None, "stop", LONG, 4.0,
    ),
    "executor-kills": Mutant(
        "a worker that lost a claim, or has to end a job, kills no executor",
        "handlers that outlived their claim", _no_kill, None, "freeze", LONG, 4.0,
    ),
    "executor-deaths": Mutant(
        "a worker does nothing about the job of an executor that died",
        "stuck", _forget_deaths, None, fault_plan.KILL_EXECUTOR,
    ),
    "launcher-charges": Mutant(
        "jobs that end with their launcher are charged with a crash",
        "crashes charged without evidence", _charge_for_the_launcher, None,
        fault_plan.KILL_LAUNCHER,
    ),
}  # fmt: skip
