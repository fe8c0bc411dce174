"""Define `queue-workflows failures`: list failures in groups, show a group, or mark it as seen."""

from __future__ import annotations

from typing import Any

from queue_workflows import errors
from queue_workflows import failures as api
from queue_workflows.cli import define, output
from queue_workflows.runtime import clock, display
from queue_workflows.types import JsonDict, Row

app = define.group("failures", "List failures in groups, show a group, or mark it as seen.")
_TIME = "90m, 24h, 7d ago, or an ISO time (with its zone)"
_FILTER = f"""--since TIME  Failed since: {_TIME}.
    --until TIME  Failed until: {_TIME}.
    --queue Q  Only jobs of this queue.
    --workflow NAME  Only of this workflow or task.
    --machine HOST  Only on this machine.
    --text TEXT  Only errors that contain this text.
    --newest N 1..{api.MOST}  How many failed jobs are examined, the newest ones."""
_GROUP = "GROUP  The id of a group, or its start."
_HEAD = ("group", "failed", "last (UTC)", "where", "what", "error")
_MEMBERS = ("job", "failed (UTC)", "of", "queue", "machine")


def _given(
    since: str | None, until: str | None, queue: str | None, workflow: str | None,
    machine: str | None, text: str | None, newest: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of `failures.list` that the options of `_FILTER` give."""
    return {
        "since": define.parsed("--since", clock.parse_since, since),
        "until": define.parsed("--until", clock.parse_since, until),
        "queue": queue, "workflow": workflow, "machine": machine, "text": text, "newest": newest,
    }  # fmt: skip


@define.command(
    "list",
    _FILTER,
    "--all  Also groups that were marked as seen, and have not failed since.",
    "--limit N 1..10000  How many groups at most.",
    app=app,
)
def list_(
    since: str | None = None, until: str | None = None, queue: str | None = None,
    workflow: str | None = None, machine: str | None = None, text: str | None = None,
    newest: int = api.NEWEST, all: bool = False, limit: int = 50,  # noqa: A002
) -> define.Shown:  # fmt: skip
    """List failures of jobs and schedules in groups of one cause, the last one first."""
    given = _given(since, until, queue, workflow, machine, text, newest)
    found = api.list(seen=all, **given)
    groups = found.groups[:limit]

    def show() -> None:
        output.table(_HEAD, map(_cells, groups))
        if len(found.groups) > limit:
            output.complain(f"and {output.counted(len(found.groups) - limit, 'group')} more")
        if found.hidden:
            output.complain(f"{output.counted(found.hidden, 'group')} were seen: --all lists them")
        if not found.is_whole and found.back_to is not None:
            far = f"back to {display.moment(found.back_to)}; --newest {api.MOST} reads more"
            output.complain(f"these are of the newest {found.examined:,} failed jobs, {far}")

    return define.Shown(groups, show)


@define.command(
    "show", _GROUP, _FILTER, "--limit N 1..10000  How many of its failures at most.", app=app
)
def show_(
    group: str, since: str | None = None, until: str | None = None, queue: str | None = None,
    workflow: str | None = None, machine: str | None = None, text: str | None = None,
    newest: int = api.NEWEST, limit: int = 50,
) -> define.Shown:  # fmt: skip
    """Show the failures of a group, the newest first, and the traceback of the newest.

    `queue-workflows jobs retry` takes their ids.
    """
    given = _given(since, until, queue, workflow, machine, text, newest)
    chosen = _group(group, given)
    rows = api.members(chosen["id"], **given)
    trace = api.traceback(rows[0]) if rows else None
    shown = chosen | {"traceback": trace, "members": rows[:limit]}

    def show() -> None:
        output.echo(f"{output.counted(len(rows), 'failure')} of {output.line(chosen['signature'])}")
        for text in display.lines(trace or chosen["last"]["error"] or api.NO_ERROR):
            output.echo(f"  {text}")
        output.table(_MEMBERS, map(_member_cells, rows[:limit]))
        if len(rows) > limit:
            output.complain(f"and {len(rows) - limit} more: --limit N shows them")

    return define.Shown(shown, show)


@define.command("seen", _GROUP, _FILTER, "--undo  Show it again.", takes=define.ACT, app=app)
def seen(
    group: str, since: str | None = None, until: str | None = None, queue: str | None = None,
    workflow: str | None = None, machine: str | None = None, text: str | None = None,
    newest: int = api.NEWEST, undo: bool = False,
) -> define.Shown:  # fmt: skip
    """Hide a group from the list until it fails again."""
    chosen = _group(group, _given(since, until, queue, workflow, machine, text, newest))
    name = chosen["signature"]
    if undo:
        api.unmark_seen(name)
    else:
        api.mark_seen(name, chosen["last_at"])
    done = {"id": chosen["id"], "signature": name, "seen": not undo}
    how = "it is listed" if undo else "it is hidden until it fails again"
    return define.Shown(done, lambda: output.echo(f"{output.line(name)}: {how}"))


def _group(word: str, given: dict[str, Any]) -> JsonDict:
    groups = api.list(seen=True, **given).groups
    chosen = [each for each in groups if word and each["id"].startswith(word)]
    if len(chosen) != 1:
        what = "no group" if not chosen else f"{len(chosen)} groups"
        raise errors.InvalidConfig(
            f"{what} of the newest {given['newest']:,} failures begin with {word!r:.40}: "
            "`queue-workflows failures` lists them"
        )
    return chosen[0]


def _cells(group: JsonDict) -> tuple[object, ...]:
    machines = group["machines"]
    where = f"all on {machines[0]}" if len(machines) == 1 else f"{len(machines)} machines"
    return (
        group["id"], group["count"], display.moment(group["last_at"], zone=False),
        where if machines else "-", ", ".join(group["names"][:3]), group["signature"],
    )  # fmt: skip


def _member_cells(row: Row) -> tuple[object, ...]:
    what = row["name"] if row["node_id"] is None else f"{row['name']} {row['node_id']}"
    return (
        row["id"], display.moment(row["at"], zone=False), what, row["queue"] or "-",
        row["host_label"] or "-",
    )  # fmt: skip
