"""Define `queue-workflows migrate`: migrate the schema, or show what that would do."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from queue_workflows import db, errors
from queue_workflows.cli import command, define, options, output
from queue_workflows.db import functions, ledger, schema, statements
from queue_workflows.runtime import app_loading


@define.command("migrate", reads=False)
def migrate(
    to: Annotated[int | None, options.option("N", "Default: the newest.", min=0)] = None,
    dry_run: Annotated[bool, options.flag("--dry-run", "Print what would be done.")] = False,
    verify: Annotated[
        bool, options.flag("--verify", "Name what is missing or differs; change nothing.")
    ] = False,
    sql: Annotated[bool, options.flag("--sql", "Print the SQL of it; do nothing.")] = False,
    allow_data_loss: Annotated[
        bool,
        options.flag(
            "--allow-data-loss", "With --to an older version: drop existing rows and values."
        ),
    ] = False,
    folder: Annotated[
        Path | None, options.option("DIR", "A chain of your own: NNNN_name.sql.", "--dir")
    ] = None,
    table: Annotated[str, options.option("NAME", "The ledger of that chain.")] = ledger.NAME,
    *,
    app: str | None,
) -> int | define.Shown:
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
        if not dry_run and (plan.steps or plan.parts or plan.damaged):
            plan = _carry_out(plan, folder, table, allow_data_loss=allow_data_loss)
    return _report(words, plan, dry_run=dry_run)


class _Plan(NamedTuple):
    """The steps that the command will take on a database, or has taken."""

    before: int
    target: int
    is_down: bool
    steps: list[ledger.Migration]
    """In the order of their execution."""
    parts: list[functions.Part]
    """Parts of the set of functions and triggers that differ from this code's and are installed."""
    damaged: list[functions.Part]
    """Parts of the set that are installed again, because one of their objects was changed."""
    problems: list[functions.Problem]


def _plan(chain: list[ledger.Migration], to: int | None, folder: Path | None, table: str) -> _Plan:
    before = db.current_schema_version(version_table=table)
    with db.connect() as conn:
        ours = folder is None and table == ledger.NAME
        if ours:
            ledger.refuse_others(conn)
        is_development = ours and schema.development_version(conn) is not None and to is None
        target = chain[-1].version if is_development else _target(chain, to, before)
        is_down = target < before and not is_development
        steps = _steps(chain, target, before, folder, table)
        with_set = ours and not is_down and target >= chain[-1].version
        problems = functions.problems(conn) if with_set else []
        return _Plan(
            before,
            target,
            is_down,
            steps,
            functions.stale(conn) if with_set else [],
            list(dict.fromkeys(each.part for each in problems if each.is_damage)),
            problems,
        )


def _verify(words: str, plan: _Plan) -> define.Shown:
    """Report differences from this code's schema and set; the exit code is 1 for any."""
    found = [f"migration {step.version:04d}_{step.name} is not applied" for step in plan.steps]
    found += [each.text for each in plan.problems]
    remedy = "; `queue-workflows migrate` fixes it"
    if any(each.is_newer for each in plan.problems):
        remedy = "; upgrade queue_workflows here"
    last = f"{words}: {output.counted(len(found), 'problem')}{remedy if found else ''}"
    report = {"database": words, "version": plan.before, "problems": found}
    return define.Shown(report, lambda: [*map(output.echo, [*found, last])], int(bool(found)))


def _print(plan: _Plan) -> None:
    """Print the SQL, but for the ledgers; with functions and triggers, as one transaction."""
    parts = dict.fromkeys([*plan.parts, *plan.damaged])
    texts = [(step.down or "") if plan.is_down else step.up for step in plan.steps]
    if parts:
        settings = f"{statements.installed_objects.settings.text.decode()};"
        texts = ["BEGIN;", *texts, settings, *(part.text for part in parts), "COMMIT;"]
    for text in texts:
        typer.echo(text)


def _carry_out(plan: _Plan, folder: Path | None, table: str, *, allow_data_loss: bool) -> _Plan:
    if plan.is_down:
        _downgrade(plan.target, folder, table, allow_data_loss=allow_data_loss)
        return plan
    done = _upgrade(plan.target, folder, table)
    if plan.damaged:
        schema.repair()
    return plan._replace(steps=[step for step in plan.steps if step.version in done])


def _target(chain: list[ledger.Migration], to: int | None, before: int) -> int:
    """Return the version to reach; a database that is newer than this code stays as it is."""
    newest = chain[-1].version
    if to is None:
        return max(newest, before)
    if to != 0 and to != before and to not in {step.version for step in chain}:
        raise errors.MigrationFailed(
            f"--to {to}: there is no migration {to}; the newest here is {newest}"
        )
    return to


def _steps(
    chain: list[ledger.Migration],
    target: int,
    before: int,
    folder: Path | None,
    table: str,
) -> list[ledger.Migration]:
    """Return the migrations that lead to the target, in order."""
    if target < before:
        return [step for step in reversed(chain) if target < step.version <= before]
    missing = db.pending(migrations_dir=folder, version_table=table)
    return [step for step in missing if step.version <= target]


def _upgrade(target: int, folder: Path | None, table: str) -> list[int]:
    if target >= ledger.chain(folder)[-1].version:
        return db.bootstrap(migrations_dir=folder, version_table=table)
    with tempfile.TemporaryDirectory() as part:
        for path in _files(folder):
            if int(path.name[:4]) <= target:
                shutil.copy(path, part)
        return db.bootstrap(migrations_dir=part, version_table=table)


def _files(folder: Path | None) -> list[Path]:
    from queue_workflows import migrations

    return sorted((folder or migrations.dir()).glob("[0-9][0-9][0-9][0-9]_*.sql"))


def _downgrade(target: int, folder: Path | None, table: str, *, allow_data_loss: bool) -> list[int]:
    try:
        return db.downgrade(
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
    installed = [part.name for part in dict.fromkeys([*plan.parts, *plan.damaged])]
    result: dict[str, Any] = {
        "database": words,
        "from_version": plan.before,
        "to_version": plan.target,
        "applied": [] if plan.is_down else versions,
        "reverted": versions if plan.is_down else [],
        "installed": installed,
        "dry_run": dry_run,
    }
    verbs = ("would revert", "would apply", "would install") if dry_run else (
        "reverted", "applied", "installed",
    )  # fmt: skip
    done = list[str]()
    if versions:
        done.append(f"{verbs[0 if plan.is_down else 1]} {', '.join(map(str, versions))}")
    if installed:
        done.append(f"{verbs[2]} the {' and '.join(installed)}")
    what = "; ".join(done) or "nothing to do"
    text = f"{words}: version {plan.before} -> {plan.target}: {what}"
    return define.Shown(result, lambda: output.echo(text))
