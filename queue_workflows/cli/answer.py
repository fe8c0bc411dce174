"""`queue-workflows answer` and `inputs`: what runs ask people, and what people say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from queue_workflows import db, dispatcher, errors
from queue_workflows.cli import answers, command, inputs, options, output
from queue_workflows.runtime import process
from queue_workflows.store import nodes, overview
from queue_workflows.types import Row

OPEN = frozenset({"queued", "running", "awaiting_input"})
SHOWN = 10
"""Options of one question that `inputs` prints; `--json` has all."""


def answer(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of the run that asks.")],
    node: Annotated[str, typer.Argument(metavar="NODE", help="The input node's id.")],
    value: Annotated[
        str,
        typer.Argument(
            metavar="VALUE", help="JSON if it is, else text; @FILE: a file of either; or a label."
        ),
    ],
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Hand it in as it is, whatever was asked.")
    ] = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Answer an input node. The first answer counts; exit code 1 for a later one."""

    def body() -> int:
        given = value_given(value)
        with command.reading(app):
            done = answered(run, node, given, check=not unchecked)
        if as_json:
            output.dump(done)
        _say(done, quiet=as_json)
        return 0 if done["outcome"] == "answered" else 1

    command.execute("answer", body, debug=debug)


def value_given(text: str) -> Any:
    """The value that an argument means. Raises `InvalidConfig` for a file that cannot be read."""
    if text != text.encode(errors="replace").decode():
        raise errors.InvalidConfig("VALUE: it is no UTF-8")
    if not text.startswith("@"):
        return inputs.value_of(text, "VALUE")
    try:
        found = Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise errors.InvalidConfig(f"VALUE {text}: {error.strerror}") from None
    except ValueError:
        raise errors.InvalidConfig(f"VALUE {text}: it is no UTF-8") from None
    return inputs.value_of(found.removesuffix("\n"), f"VALUE {text}")


def answered(run_id: str, node_id: str, value: Any, *, check: bool = True) -> dict[str, Any]:
    """Answer a node; what happened, with the keys that `--json` shows. One transaction.

    `outcome`: `answered`, `already answered` (`value` is then the answer that counts, where it has
    been taken), `not waiting` or `unknown`. Raises `InputRefused` for a value that was not asked
    for, `check` only, and `InvalidPayload`.
    """
    done: dict[str, Any] = {
        "run_id": run_id, "node_id": node_id, "outcome": "unknown", "reason": None,
        "submission_id": None, "value": None, "status": None,
    }  # fmt: skip
    for text in (run_id, node_id):
        if text != text.encode(errors="replace").decode():
            return done
    with db.transaction() as conn:
        job = nodes.get_by_node(conn, run_id, node_id)
        if job is None:
            run = overview.find(conn, run_id)
            known = run is not None and run["kind"] == "run"
            reason = f"run {run_id} has no node {node_id!r} yet" if known else None
            return done | {"reason": reason}
        done["status"] = job["status"]
        meant = dispatcher.meant_answer(job["input_spec"], value) if check else value
        try:
            done["submission_id"] = dispatcher.submit_input(
                run_id, node_id, meant, check=check, conn=conn
            )
        except errors.InputRefused as error:
            later = nodes.get_by_node(conn, run_id, node_id) or job
            return done | _refusal(conn, later, error)
    return done | {"outcome": "answered", "value": meant}


def _refusal(conn: db.Connection, job: Row, error: errors.InputRefused) -> dict[str, Any]:
    """What a refusal means; raised again where the value is what is wrong."""
    asks = job["node_module"].startswith("__input__")
    if asks and job["status"] == "completed":
        delta: Any = job["context_delta"]
        given: Any = job["inputs"] or {}
        target: Any = given.get("target")
        first = {"value": delta.get(target), "outcome": "already answered"}
        return first | {"reason": str(error), "status": job["status"]}
    if asks and job["status"] in OPEN:
        if not overview.has_answer(conn, job["run_id"], job["node_id"]):
            raise error
        return {"outcome": "already answered", "reason": str(error)}
    return {"outcome": "not waiting", "reason": str(error), "status": job["status"]}


def _say(done: dict[str, Any], *, quiet: bool) -> None:
    what = f"node {done['node_id']} of run {done['run_id']}"
    if done["outcome"] == "answered":
        if not quiet:
            output.echo(f"{what}: answered {output.line(json.dumps(done['value']))}")
        return
    text = done["reason"] or f"there is no run {done['run_id']!r}"
    if done["outcome"] == "already answered":
        text = f"{what} has been answered already"
        if done["status"] == "completed":
            text += f" with {output.line(json.dumps(done['value']))}"
        text += "; the first answer counts"
    sys.stderr.write(f"{command.PROG} answer: {process.mask(output.line(text, 500))}\n")


_KEYS = (
    "run_id", "workflow_name", "node_id", "job_id", "widget", "prompt", "waiting_s", "answered",
    "input_spec",
)  # fmt: skip


def waiting(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only those of this run.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10000, metavar="N", help="How many at most.")
    ] = 100,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List what runs ask people, the longest wait first."""

    def body() -> int:
        with command.reading(app):
            rows = listing(run, limit=limit)
            if run is not None and not rows and not _is_run(run):
                sys.stderr.write(f"{command.PROG} inputs: there is no run {output.line(run)!r}\n")
                return 1
        if as_json:
            output.dump(rows)
        else:
            _show(rows, run)
        return 0

    command.execute("inputs", body, debug=debug)


def listing(run_id: str | None = None, *, limit: int = 100) -> list[dict[str, Any]]:
    """The waiting input nodes of live runs, with the keys that `--json` shows.

    `input_spec`, `widget` and `prompt` are None until an orchestrator has stored what is asked;
    `answered`: an answer has come in and is not taken yet.
    """
    with db.transaction() as conn:
        rows = overview.waiting_inputs(conn, run_id, limit=limit)
    for row in rows:
        spec: dict[str, Any] = row["input_spec"] or {}
        row |= {"widget": spec.get("widget"), "prompt": spec.get("prompt")}
    return [{key: row[key] for key in _KEYS} for row in rows]


def _is_run(run_id: str) -> bool:
    with db.transaction() as conn:
        found = overview.find(conn, run_id)
    return found is not None and found["kind"] == "run"


def _show(rows: list[dict[str, Any]], run: str | None) -> None:
    if not rows:
        output.echo(f"run {run} waits for no person" if run else "no run waits for a person")
    for row in rows:
        about = f"{row['workflow_name']}, waits for {output.seconds(row['waiting_s'])}"
        output.echo(f"{row['run_id']} {row['node_id']} ({output.line(about)})")
        spec = row["input_spec"]
        if spec is None:
            output.echo("  what it asks is not known yet: is an orchestrator running?")
            continue
        output.echo(f"  {output.line(row['prompt'] or row['widget'] or 'no question')}")
        choices = answers.options(spec)
        for label, value in choices[:SHOWN]:
            text = output.line(json.dumps(value), 80)
            same = isinstance(value, dict) or label == value
            output.echo(f"    {label}" if same else f"    {text}  {label}")
        if len(choices) > SHOWN:
            output.echo(f"    ... and {len(choices) - SHOWN} more: --json lists them")
        if row["answered"]:
            output.echo("  an answer has come in")
