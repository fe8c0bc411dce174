"""Define `queue-workflows answer` and `inputs`: answer the questions of runs, list open ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from queue_workflows import db, errors, runs
from queue_workflows.admin import item_nodes
from queue_workflows.cli import command, define, ids, input_option, options, output, prompts
from queue_workflows.dag import answers as node_answers
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import Row

OPEN = frozenset({"queued", "running", "awaiting_input"})
SHOWN = 10
"""Options of one question that `inputs` prints; `--json` has all."""


@define.command("answer")
def answer(
    run: Annotated[str, options.argument("RUN", f"The id of the run that asks. {ids.PREFIX_HELP}")],
    node: Annotated[str, options.argument("NODE", "The input node's id.")],
    value: Annotated[
        str,
        options.argument("VALUE", "JSON if it is, else text; @FILE: a file of either; or a label."),
    ],
    unchecked: Annotated[
        bool, options.flag("--unchecked", "Submit it without a check against the question.")
    ] = False,
) -> int | define.Shown:
    """Answer an input node. The first answer counts; exit code 1 for a later one."""
    done = answered(run, node, text_given(value), check=not unchecked)
    is_answered = done["outcome"] == "answered"
    if not is_answered:
        command.refuse("answer", _refused(done))
    text = f"{_named_node(done)}: answered {output.compact(done['value'])}"
    shown = define.Shown(done, lambda: is_answered and output.echo(text))
    return shown._replace(code=0 if is_answered else 1)


def text_given(text: str) -> str:
    """Return the text of an argument. Raises `InvalidConfig` for a file that cannot be read."""
    if text != text.encode(errors="replace").decode():
        raise errors.InvalidConfig("VALUE is not UTF-8 text")
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise errors.InvalidConfig(f"VALUE {text} cannot be read: {error.strerror}") from None
    except ValueError:
        raise errors.InvalidConfig(f"VALUE {text} is not UTF-8 text") from None


def answered(run_id: str, node_id: str, text: str, *, check: bool = True) -> dict[str, Any]:
    """Answer a node; return the outcome with the keys that `--json` shows. One transaction.

    `outcome`: `answered`, `already answered` (`value` is then the answer that counts, if it was
    taken), `timed out` (`value` is then the default that was taken), `not waiting` or `unknown`.
    Raises `InvalidAnswer`, `InvalidPayload` and `AmbiguousId`.
    """
    done: dict[str, Any] = {
        "run_id": run_id, "node_id": node_id, "outcome": "unknown", "reason": None,
        "submission_id": None, "value": None, "status": None,
    }  # fmt: skip
    value = input_option.value_of(text, "VALUE")
    with db.transaction() as conn:
        run_id, run = ids.resolve(conn, run_id, kind="run")
        job = _node(conn, run_id, node_id) if payload.is_storable(run_id) else None
        if job is not None:
            node_id = job["node_id"]
            done |= {"run_id": run_id, "node_id": node_id}
        if job is None:
            known = run is not None and run["kind"] == "run"
            reason = None
            if known:
                hint = item_nodes.hint(conn, run_id, node_id)
                reason = f"run {run_id} has no node {node_id!r} yet{hint}"
            return done | {"reason": reason}
        done["status"] = job["status"]
        if value is not None and node_answers.type_of(job["input_spec"]) == "string":
            value = value if isinstance(value, str) else text
        meant = node_answers.meant(job["input_spec"], value) if check else value
        try:
            done["submission_id"] = runs.answer(run_id, node_id, meant, check=check, conn=conn)
        except errors.InputRefused as error:
            later = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id) or job
            return done | _refusal(conn, later, error)
    return done | {"outcome": "answered", "value": meant}


def _node(conn: db.Connection, run_id: str, node_id: str) -> Row | None:
    """Return the node with this id, or the one whose id is printed so, or None."""
    for one in dict.fromkeys((node_id, display.restored(node_id))):
        job = (
            statements.nodes.get_by_node(conn, run_id=run_id, node_id=one)
            if payload.is_storable(one)
            else None
        )
        if job is not None:
            return job
    return None


def _refusal(conn: db.Connection, job: Row, error: errors.InputRefused) -> dict[str, Any]:
    """Return what a refusal means; raise it again if the value is wrong."""
    asks = job["node_module"].startswith("__input__")
    if asks and job["status"] == "completed":
        target = stored_json.text(stored_json.mapping(job["inputs"]).get("target"))
        waited = bool(
            statements.overview.took_default(conn, run=job["run_id"], node=job["node_id"])
        )
        first = {
            "value": stored_json.mapping(job["context_delta"]).get(target or ""),
            "outcome": "timed out" if waited else "already answered",
        }
        return first | {"reason": str(error), "status": job["status"]}
    if asks and job["status"] in OPEN:
        if not bool(statements.overview.has_answer(conn, run=job["run_id"], node=job["node_id"])):
            raise error
        return {"outcome": "already answered", "reason": str(error)}
    return {"outcome": "not waiting", "reason": str(error), "status": job["status"]}


def _named_node(done: dict[str, Any]) -> str:
    return f"node {done['node_id']} of run {done['run_id']}"


def _refused(done: dict[str, Any]) -> str:
    """Return why an answer was not taken."""
    if done["outcome"] == "timed out":
        took = f"took the default {output.compact(done['value'])}"
        return f"{_named_node(done)} was not answered within its time-out, and {took}"
    if done["outcome"] != "already answered":
        return done["reason"] or f"there is no run {done['run_id']!r}"
    first = f" with {output.compact(done['value'])}" if done["status"] == "completed" else ""
    return f"{_named_node(done)} has been answered already{first}; the first answer counts"


_KEYS = (
    "run_id", "workflow_name", "node_id", "job_id", "widget", "prompt", "waiting_s", "answered",
    "input_spec",
)  # fmt: skip


@define.command("inputs")
def waiting(
    run: Annotated[str | None, options.argument("RUN", "Only those of this run.")] = None,
    limit: Annotated[int, options.option("N", "How many at most.", min=1, max=10000)] = 100,
) -> int | define.Shown:
    """List what runs ask people, the longest wait first."""
    meant, known = (None, True) if run is None else _named(run)
    if not known:
        output.complain(f"{command.PROG} inputs: there is no run {run!r}")
        return 1
    rows = listing(meant, limit=limit)
    return define.Shown(rows, lambda: _show(rows, run))


def listing(run_id: str | None = None, *, limit: int = 100) -> list[dict[str, Any]]:
    """Return the waiting input nodes of live runs, with the keys that `--json` shows.

    `input_spec`, `widget` and `prompt` are None until an orchestrator has stored them. `answered`:
    an answer was submitted and not taken yet.
    """
    with db.transaction() as conn:
        rows = statements.overview.waiting_inputs(conn, run=run_id, limit=limit)
    for row in rows:
        spec = stored_json.mapping(row["input_spec"])
        row |= {"widget": spec.get("widget"), "prompt": spec.get("prompt")}
    return [{key: row[key] for key in _KEYS} for row in rows]


def _named(run_id: str) -> tuple[str, bool]:
    """Return the stored id of the named run, and whether there is such a run."""
    with db.transaction() as conn:
        meant, found = ids.resolve(conn, run_id, kind="run")
    return meant, found is not None and found["kind"] == "run"


def _show(rows: list[dict[str, Any]], run: str | None) -> None:
    if not rows:
        output.echo(f"run {run} waits for no person" if run else "no run waits for a person")
    for row in rows:
        about = f"{row['workflow_name']}, waits for {output.seconds(row['waiting_s'])}"
        where = f"{output.line(row['run_id'])} {output.line(row['node_id'])}"
        output.echo(f"{where} ({output.line(about)})")
        spec = stored_json.mapping(row["input_spec"])
        if row["input_spec"] is None:
            output.echo("  what it asks is not known yet: is an orchestrator running?")
            continue
        output.echo(f"  {output.line(row['prompt'] or row['widget'] or 'no question')}")
        choices = prompts.options(spec)
        for label, value in choices[:SHOWN]:
            text = output.compact(value, 80)
            same = isinstance(value, dict) or label == value
            output.echo(f"    {label}" if same else f"    {text}  {label}")
        if len(choices) > SHOWN:
            output.echo(f"    ... and {len(choices) - SHOWN} more: --json lists them")
        if row["answered"]:
            output.echo("  an answer has come in")
