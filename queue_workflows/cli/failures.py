"""Define `queue-workflows failures`: list failures in groups, show a group, or mark it as seen."""

from __future__ import annotations

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


def _found(
    since: str | None, until: str | None, queue: str | None, workflow: str | None,
    machine: str | None, text: str | None, newest: int, *, seen: bool,
) -> api.Found:  # fmt: skip
    """Return the groups that the options of `_FILTER` choose."""
    return api.list(
        since=define.parsed("--since", clock.parse_since, since),
        until=define.parsed("--until", clock.parse_since, until),
        queue=queue, workflow=workflow, machine=machine, text=text, newest=newest, seen=seen,
    )  # fmt: skip


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
    found = _found(since, until, queue, workflow, machine, text, newest, seen=all)
    groups = found.groups[:limit]

    def show() -> None:
        output.table(_HEAD, map(_cells, groups))
        if len(found.groups) > limit:
            output.complain(f"and {output.counted(len(found.groups) - limit, 'group')} more")
        if found.hidden:
            hidden = output.counted(found.hidden, "group")
            output.complain(f"without {hidden} marked as seen; --all lists all")
        if not found.is_whole and found.back_to is not None:
            far = f"back to {display.moment(found.back_to)}; --newest {api.MOST} reads more"
            output.complain(f"these are of the newest {found.examined:,} failed jobs, {far}")

    listed = [{key: group[key] for key in group if key != "members"} for group in groups]
    return define.Shown(listed, show)


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
    found = _found(since, until, queue, workflow, machine, text, newest, seen=True)
    chosen = _chosen(group, found, newest)
    rows = chosen["members"]
    trace = api.traceback(rows[0])

    def show() -> None:
        output.echo(f"{output.counted(len(rows), 'failure')} of {output.line(chosen['signature'])}")
        for each in display.lines(trace or rows[0]["error"] or api.NO_ERROR):
            output.echo(f"  {each}")
        output.table(_MEMBERS, map(_member_cells, rows[:limit]))
        if len(rows) > limit:
            output.complain(f"and {len(rows) - limit} more: --limit N shows them")

    return define.Shown(chosen | {"traceback": trace, "members": rows[:limit]}, show)


@define.command("seen", _GROUP, "--undo  Show it again.", takes=define.ACT, app=app)
def seen(group: str, undo: bool = False) -> define.Shown:
    """Hide a group from the list until it fails again."""
    chosen = _chosen(group, api.list(newest=api.MOST, seen=True), api.MOST)
    name = chosen["signature"]
    api.mark_seen(name, None if undo else chosen["last_at"])
    done = {"id": chosen["id"], "signature": name, "seen": not undo}
    how = "it is listed" if undo else "it is hidden until it fails again"
    return define.Shown(done, lambda: output.echo(f"{output.line(name)}: {how}"))


def _chosen(word: str, found: api.Found, newest: int) -> JsonDict:
    chosen = [each for each in found.groups if word and each["id"].startswith(word)]
    if len(chosen) != 1:
        what = "no group has" if not chosen else f"{len(chosen)} groups have"
        raise errors.InvalidConfig(
            f"{what} an id that begins with {word!r:.40} among the newest {newest:,} failures; "
            "`queue-workflows failures` lists the groups"
        )
    return chosen[0]


def _cells(group: JsonDict) -> tuple[object, ...]:
    machines = group["machines"]
    where = f"{len(machines)} machines"
    if len(machines) == 1:
        where = machines[0] if group["unplaced"] else f"all on {machines[0]}"
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
