"""`queue-workflows migrate`: bring the schema to a version, or say what that would do."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from queue_workflows import config, db, errors
from queue_workflows.cli import command, options, output
from queue_workflows.db import schema


def migrate(
    to: Annotated[int | None, typer.Option(min=0, metavar="N", help="Default: the newest.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL of it; do nothing.")] = False,
    allow_data_loss: Annotated[
        bool, typer.Option("--allow-data-loss", help="With --to below: drop what is there.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="A chain of your own: NNNN_name.sql."),
    ] = None,
    table: Annotated[
        str, typer.Option(metavar="NAME", help="The ledger of that chain.")
    ] = schema.LEDGER,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Bring the database's schema up to date, or to version N."""

    def body() -> int:
        chain = schema.chain(folder)
        config.load_app(app)
        with command.database(create=False) as words:
            db.wait_until_reachable(timeout_s=0)
            before = db.current_schema_version(version_table=table)
            target = _target(chain, to, before)
            steps = _steps(chain, target, before, folder, table)
            down = target < before
            if sql:
                for step in steps:
                    typer.echo((step.down or "") if down else step.up)
                return 0
            done = [step.version for step in steps]
            if not dry_run and steps:
                done = (
                    _downgrade(target, folder, table, allow_data_loss=allow_data_loss)
                    if down
                    else _upgrade(steps, folder, table)
                )
            _report(words, before, target, done, dry_run=dry_run, as_json=as_json)
        return 0

    command.execute("migrate", body, debug=debug)


def _target(chain: list[schema.Migration], to: int | None, before: int) -> int:
    """The version to reach; a database that is newer than this code stays as it is."""
    newest = chain[-1].version
    if to is None:
        return max(newest, before)
    if to != 0 and to != before and to not in {step.version for step in chain}:
        raise errors.MigrationFailed(
            f"--to {to}: there is no migration {to}; the newest here is {newest}"
        )
    return to


def _steps(
    chain: list[schema.Migration], target: int, before: int, folder: Path | None, table: str
) -> list[schema.Migration]:
    """What leads to the target, in the order in which it is done."""
    if target < before:
        return [step for step in reversed(chain) if target < step.version <= before]
    missing = db.pending(migrations_dir=folder, version_table=table)
    return [step for step in missing if step.version <= target]


def _upgrade(steps: list[schema.Migration], folder: Path | None, table: str) -> list[int]:
    chain = schema.chain(folder)
    if steps[-1].version == chain[-1].version:
        return db.bootstrap(migrations_dir=folder, version_table=table)
    with tempfile.TemporaryDirectory() as part:
        for path in _files(folder):
            if int(path.name[:4]) <= steps[-1].version:
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


def _report(
    words: str, before: int, target: int, done: list[int], *, dry_run: bool, as_json: bool
) -> None:
    down = target < before
    result: dict[str, Any] = {
        "database": words,
        "from_version": before,
        "to_version": target,
        "applied": [] if down else done,
        "reverted": done if down else [],
        "dry_run": dry_run,
    }
    if as_json:
        output.dump(result)
        return
    verb = (
        ("would revert" if dry_run else "reverted")
        if down
        else ("would apply" if dry_run else "applied")
    )
    what = f"{verb} {', '.join(map(str, done))}" if done else "nothing to do"
    output.echo(f"{words}: version {before} -> {target}: {what}")
