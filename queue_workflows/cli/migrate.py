"""Define `queue-workflows migrate`, `prune` and `databases`: keep databases up to date."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import typer

from queue_workflows import db, embedded, errors, history
from queue_workflows.admin import permissions
from queue_workflows.cli import command, define, output
from queue_workflows.db import databases as databases_of
from queue_workflows.db import functions, ledger, schema, statements
from queue_workflows.embedded import running_apps
from queue_workflows.runtime import app_loading
from queue_workflows.types import JsonDict


@define.command(
    "migrate",
    """--to N 0..  The version to migrate to; default: the newest.
    --dry-run  Print what would be done.
    --verify  Name what is missing or differs; change nothing.
    --sql  Print the SQL of it; do nothing.
    --allow-data-loss  With --to an older version: drop existing rows and values.
    --dir DIR  A chain of your own: NNNN_name.sql.
    --table NAME  The ledger of that chain.""",
    reads=False,
)
def migrate(
    to: int | None = None, dry_run: bool = False, verify: bool = False, sql: bool = False,
    allow_data_loss: bool = False, folder: Path | None = None, table: str = ledger.NAME, *,
    app: str | None,
) -> int | define.Shown:  # fmt: skip
    """Bring the schema and its functions up to date, or to version N."""
    chain = ledger.chain(folder)
    app_loading.load_app(app)
    with command.database(create=False) as words:
        db.wait_until_reachable(timeout_s=0)
        plan = _plan(chain, to, folder, table)
        if verify:
            return _verify(words, plan)
        if sql:
            _print(plan)
            return 0
        if not dry_run and plan.is_down:
            _downgrade(plan.target, folder, table, allow_data_loss=allow_data_loss)
        elif not dry_run and (plan.steps or plan.parts):
            done = db.bootstrap(migrations_dir=folder, version_table=table, to_version=plan.target)
            if plan.damaged:
                schema.repair()
            plan = plan._replace(steps=[step for step in plan.steps if step.version in done])
    return _report(words, plan, dry_run=dry_run)


class _Plan(NamedTuple):
    """The steps that the command will take on a database, or has taken."""

    before: int
    target: int
    is_down: bool
    steps: list[ledger.Migration]
    """In the order of their execution."""
    parts: list[functions.Part]
    """Parts to install, because they are not of this code or were changed."""
    damaged: list[functions.Part]
    """The parts among them with an object that was changed after the installation."""
    problems: list[functions.Problem]
    rights: list[str]
    """Wrong rights and owners, each with the remedy; nothing else is left to migrate then."""


def _plan(chain: list[ledger.Migration], to: int | None, folder: Path | None, table: str) -> _Plan:
    before, newest = db.current_schema_version(version_table=table), chain[-1].version
    with db.connect() as conn:
        ours = folder is None and table == ledger.NAME
        if ours:
            ledger.refuse_others(conn)
        if to not in {None, 0, before, *(step.version for step in chain)}:
            raise errors.MigrationFailed(
                f"--to {to}: there is no migration {to}; the newest here is {newest}"
            )
        # A database that is newer than this code stays as it is.
        target = max(newest, before) if to is None else to
        if is_down := target < before:
            steps = [step for step in reversed(chain) if target < step.version <= before]
        else:
            missing = db.pending(migrations_dir=folder, version_table=table)
            steps = [step for step in missing if step.version <= target]
        with_set = ours and not is_down and target >= newest
        problems = functions.problems(conn) if with_set else []
        stale = functions.stale(conn) if with_set else []
        damaged = list(dict.fromkeys(each.part for each in problems if each.is_damage))
        parts = list(dict.fromkeys([*stale, *damaged]))
        rights = _wrong_rights(conn) if with_set and not steps and not parts else []
        return _Plan(before, target, is_down, steps, parts, damaged, problems, rights)


def _wrong_rights(conn: db.Connection) -> list[str]:
    """Return the needless rights of PUBLIC, and functions with another owner than the tables."""
    script = "`queue-workflows connect --for PURPOSE --sql`"
    remedy = f"run what {script} prints for each role, as the owner of the tables"
    found = [f"{text}; {remedy}" for text in permissions.described(permissions.of_public(conn))]
    if (others := permissions.of_another_owner(conn)) is not None:
        found.append("; ".join(others))
    return found


def _verify(words: str, plan: _Plan) -> define.Shown:
    """Report differences from this code's schema and set; the exit code is 1 for any."""
    state, to = ("applied", f" --to {plan.target}") if plan.is_down else ("not applied", "")
    found = [f"migration {step.version:04d}_{step.name} is {state}" for step in plan.steps]
    found += [each.text for each in plan.problems]
    remedy = f"; `queue-workflows migrate{to}` fixes it" if found else ""
    if any(each.is_newer for each in plan.problems):
        remedy = "; upgrade queue_workflows here"
    found += plan.rights
    last = f"{words}: {output.counted(len(found), 'problem')}{remedy}"
    report = {"database": words, "version": plan.before, "problems": found}
    return define.Shown(report, lambda: [*map(output.echo, [*found, last])], int(bool(found)))


def _print(plan: _Plan) -> None:
    """Print the SQL without the ledgers. With functions and triggers it is one transaction."""
    texts = [(step.down or "") if plan.is_down else step.up for step in plan.steps]
    if plan.parts:
        settings = f"{statements.installed_objects.settings.text.decode()};"
        texts = ["BEGIN;", *texts, settings, *(part.text for part in plan.parts), "COMMIT;"]
    for text in texts:
        typer.echo(text)


def _downgrade(target: int, folder: Path | None, table: str, *, allow_data_loss: bool) -> None:
    try:
        db.downgrade(
            to_version=target,
            migrations_dir=folder,
            version_table=table,
            allow_data_loss=allow_data_loss,
        )
    except errors.DataLossRefused as error:
        what = str(error).partition(". Pass ")[0]
        raise errors.DataLossRefused(
            f"{what}: add --allow-data-loss to do it all the same"
        ) from None


def _report(words: str, plan: _Plan, *, dry_run: bool) -> define.Shown:
    versions = [step.version for step in plan.steps]
    installed = [part.name for part in plan.parts]
    result: JsonDict = {
        "database": words, "from_version": plan.before, "to_version": plan.target,
        "applied": [] if plan.is_down else versions, "reverted": versions if plan.is_down else [],
        "installed": installed, "dry_run": dry_run,
    }  # fmt: skip
    done: list[str] = []
    if versions:
        verb = ("would revert" if dry_run else "reverted") if plan.is_down else (
            "would apply" if dry_run else "applied"
        )  # fmt: skip
        done.append(f"{verb} {', '.join(map(str, versions))}")
    if installed:
        verb = "would install" if dry_run else "installed"
        done.append(f"{verb} the {' and '.join(installed)}")
    what = "; ".join(done) or "nothing to do"
    text = f"{words}: version {plan.before} -> {plan.target}: {what}"
    return define.Shown(result, lambda: output.echo(text))


@define.command("prune", "--dry-run  Only count the rows that would be deleted.", reads=False)
def prune(dry_run: bool = False, *, app: str | None) -> define.Shown:
    """Delete rows that are past their retention.

    These are finished runs and jobs, events and logs. The orchestrator does it by itself, every
    NODE_EVENT_PRUNE_INTERVAL_S.
    """
    with command.reading(app) as words:
        gone = history.prunable() if dry_run else history.prune()
    counts = ", ".join(f"{kind.replace('_', ' ')} {n:,}" for kind, n in gone.items() if n)
    text = f"{'would delete' if dry_run else 'deleted'}: {counts or 'nothing'}"
    done = {"database": words, "dry_run": dry_run, "deleted": gone}
    return define.Shown(done, lambda: output.echo(text))


PATH_MAX = 60


@define.command("databases", takes="as_json debug", reads=False)
def databases() -> define.Shown:
    """List the embedded server's databases, one per project."""
    with embedded.ensure(create=False) as server:
        running = running_apps.live(server.data_dir)
        found = [
            {
                "database": each.name, "folder": each.folder, "size_bytes": each.size_bytes,
                "unfinished_runs": each.unfinished,
                "up": [
                    {"pid": up.pid, "app": up.app, "since": up.since}
                    for up in running if up.database == each.name
                ],
            }
            for each in databases_of.listing(server)
        ]  # fmt: skip
    words = f"embedded PostgreSQL in {server.data_dir}"
    return define.Shown(found, lambda: _show_databases(words, found))


def _show_databases(words: str, found: list[JsonDict]) -> None:
    output.echo(words)
    if not found:
        output.echo(f"no database yet: `{command.PROG} up --app MODULE[:CALLABLE]` makes one")
        return
    output.echo()
    output.table(("database", "project", "MB", "unfinished runs", "up"), map(_cells, found))


def _cells(row: JsonDict) -> tuple[object, ...]:
    folder: str = row["folder"] or "(shared)"
    if len(folder) > PATH_MAX:
        folder = "..." + folder[3 - PATH_MAX :]  # its last part distinguishes projects
    up = ", ".join(f"{up['app']} (pid {up['pid']})" for up in row["up"]) or "-"
    return row["database"], folder, round(row["size_bytes"] / 1e6), row["unfinished_runs"], up
