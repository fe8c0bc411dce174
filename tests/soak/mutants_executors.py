"""Define mutants of workers whose handlers run in executors: deadline, deaths, kills, charges."""

from __future__ import annotations

from typing import Any

from queue_workflows.run import executors, launcher
from queue_workflows.worker import desk
from tests.soak import fault_plan
from tests.soak.mutant import Mutant, replace

LONG = {"long": 12, "wide": 0, "diamond": 0}
"""Many, as a worker without slots ends with its job whatever kills it."""


def _no_deadline() -> None:
    """Let executors run on when their worker is stopped or silent."""
    replace(launcher.Launcher, "hold", lambda *_: True)


def _no_kill() -> None:
    """Never end an executor, for any state of its job's claim."""
    replace(executors.Executors, "kill", lambda *_: None)
    _no_deadline()


def _forget_deaths() -> None:
    """Renew the claim of a job for ever whose executor has died."""
    replace(desk.Desk, "died", lambda *_: None)


def _charge_own_kills() -> None:
    """Count a crash of each job whose executor its own worker has ended."""
    died = desk.Desk.died

    def charged(own: desk.Desk, job: Any, death: executors.Death) -> None:
        job.end = None
        died(own, job, death._replace(by_deadline=False, killed_for=""))

    replace(desk.Desk, "died", charged)


def _hand_back_with_the_launcher() -> None:
    """Count no crash of the jobs whose launcher a signal has killed."""
    lose = executors.Executors.lose

    def uncounted(own: executors.Executors, error: launcher.LauncherLost) -> None:
        lose(own, launcher.LauncherLost("by nobody", by_deadline=error.by_deadline))

    replace(executors.Executors, "lose", uncounted)


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
    "launcher-killers": Mutant(
        "a worker charges no job for a launcher that was killed",
        "deaths by handlers that nobody charged", _hand_back_with_the_launcher,
        load={"kills_launcher": 3}, jobs={"mixed": 12},
    ),
    "own-kills": Mutant(
        "jobs whose executor their own worker ends, at OFF for example, are charged with a crash",
        "crashes charged without evidence", _charge_own_kills, None, "off", LONG,
    ),
}  # fmt: skip
