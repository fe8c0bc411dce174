"""Define `queue-workflows health`: report by exit code whether this machine's workers live."""

from __future__ import annotations

from typing import Annotated

from queue_workflows import config, errors, workers
from queue_workflows.cli import command, define, options, output
from queue_workflows.types import Row

ALIVE, SILENT, UNKNOWN = "alive", "silent", "unknown"
_SILENT = "no heartbeat"


@define.command("health", reads=False)
def health(
    queue: Annotated[
        list[str] | None, options.option("Q", "A queue that must have a worker; repeatable.")
    ] = None,
    host: Annotated[str | None, options.option("LABEL", "Default: this machine's.")] = None,
    within: Annotated[
        float, options.option("SECONDS", "Largest age of a heartbeat.", min=1.0)
    ] = 60.0,
    strict: Annotated[
        bool, options.flag("--strict", "Exit with 1 also if the database does not answer.")
    ] = False,
    *,
    app: str | None,
) -> define.Shown:
    """Report whether the workers of this machine are alive.

    Exit code 0: all are, 1: one is silent. A database that does not answer proves nothing
    about a worker: the exit code is 0, and the outage is printed.
    """
    label, why = "", ""
    found: dict[str, str] = {}
    try:
        with command.reading(app):
            label = host or config.host_label()
            found = judge(workers.list(absent=False), label, queue or [], within)
    except (errors.DatabaseUnavailable, errors.SchemaTimeout) as error:
        why = str(error)
    state = UNKNOWN if why else SILENT if SILENT in found.values() or not found else ALIVE
    states = ", ".join(f"{name} {how}" for name, how in sorted(found.items()))
    text = f"{state}: {output.line(why, 500) or states or f'no worker of {label}'}"
    return define.Shown(
        {"host_label": label, "state": state, "queues": found, "reason": why},
        lambda: output.echo(text),
        int(state == SILENT or (strict and state == UNKNOWN)),
    )


def judge(rows: list[Row], label: str, queues: list[str], within_s: float) -> dict[str, str]:
    """Return `alive` or `silent` for these queues and for every queue with a worker here.

    A queue whose only workers were reaped is silent if it was named, else it is left out.
    """
    found = dict.fromkeys(queues, SILENT)
    for row in rows:
        reaped = row["state"] == "stopped" or row["death"] not in (None, _SILENT)
        if row["host_label"] != label or reaped:
            continue
        name = row["queue"]
        if queues and name not in queues:
            continue
        alive = row["age_s"] <= within_s
        found[name] = ALIVE if alive or found.get(name) == ALIVE else SILENT
    return found
