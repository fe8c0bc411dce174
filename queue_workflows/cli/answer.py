"""Define `queue-workflows answer` and `inputs`, and read what people type: answers and inputs."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from queue_workflows import db, errors, runs
from queue_workflows.admin import stored_graph
from queue_workflows.cli import command, define, ids, output
from queue_workflows.dag import answers, payload
from queue_workflows.db import statements
from queue_workflows.runtime import display, signals, stored_json
from queue_workflows.types import JsonDict, Row

OPEN = frozenset({"queued", "running", "awaiting_input"})
SHOWN = 10
"""Options of one question that `inputs` prints; `--json` has all."""
MOST_BYTES = 2**31 - 1
"""Questions of any size are listed."""


@define.command(
    "answer",
    f"RUN  The id of the run that asks. {ids.PREFIX_HELP}",
    """NODE  The input node's id.
    VALUE  JSON if it is, else text; @FILE: a file of either; or a label.
    --unchecked  Submit it without a check against the question.""",
    takes=define.ACT,
)
def answer(run: str, node: str, value: str, unchecked: bool = False) -> define.Shown:
    """Answer an input node. The first answer counts; exit code 1 for a later one."""
    done = _answered(run, node, _text_given(value), check=not unchecked)
    if done["outcome"] != "answered":
        return define.Shown(done, refusals=[done["reason"]])
    where = f"node {done['node_id']} of run {done['run_id']}"
    text = f"{where}: answered {output.compact(done['value'])}"
    return define.Shown(done, lambda: output.echo(text))


def _text_given(text: str) -> str:
    """Return the text of an argument. Raises `InvalidConfig` for a file that cannot be read."""
    try:
        if not text.startswith("@"):
            return text.encode().decode()  # a shell makes surrogates of other bytes
        return Path(text[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise errors.InvalidConfig(f"VALUE {text} cannot be read: {error.strerror}") from None
    except ValueError:
        name = f" {text}" if text.startswith("@") else ""
        raise errors.InvalidConfig(f"VALUE{name} is not UTF-8 text") from None


def _answered(run_id: str, node_id: str, text: str, *, check: bool) -> JsonDict:
    """Answer a node; return the outcome with the keys that `--json` shows. One transaction.

    `outcome`: `answered`, `already answered` (`value` is then the answer that counts, if it was
    taken), `timed out` (`value` is then the default that was taken), `not waiting` or `unknown`.
    `reason`: why it was not taken. Raises `InvalidAnswer`, `InvalidPayload` and `InvalidConfig`.
    """
    done: JsonDict = {
        "run_id": run_id, "node_id": node_id, "outcome": "unknown", "reason": None,
        "submission_id": None, "value": None, "status": None,
    }  # fmt: skip
    value = value_of(text, "VALUE")
    with db.transaction() as conn:
        run_id, run = ids.resolve(conn, run_id, kind="run")
        job: Row | None = None
        # Try the id as it is, then without the escapes with which commands print an id.
        for one in dict.fromkeys((node_id, display.restored(node_id))):
            if job is None and payload.is_storable(run_id) and payload.is_storable(one):
                job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=one)
        if job is None:
            if run is None or run["kind"] != "run":
                return done | {"reason": f"there is no run {run_id!r}"}
            hint = stored_graph.hint(conn, run_id, node_id)
            return done | {"reason": f"run {run_id} has no node {node_id!r} yet{hint}"}
        node_id = job["node_id"]
        done |= {"run_id": run_id, "node_id": node_id, "status": job["status"]}
        if value is not None and answers.type_of(job["input_spec"]) == "string":
            value = value if isinstance(value, str) else text
        meant = answers.meant(job["input_spec"], value) if check else value
        try:
            done["submission_id"] = runs.answer(run_id, node_id, meant, check=check, conn=conn)
        except errors.InputRefused as error:
            later = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id) or job
            return done | _refusal(conn, later, error)
    return done | {"outcome": "answered", "value": meant}


def _refusal(conn: db.Connection, job: Row, error: errors.InputRefused) -> JsonDict:
    """Return the meaning of a refusal; raise it again if the value is wrong."""
    run_id, node_id, status = job["run_id"], job["node_id"], job["status"]
    where = f"node {node_id} of run {run_id}"
    asks = job["node_module"].startswith("__input__")
    if asks and status == "completed":
        target = stored_json.text(stored_json.mapping(job["inputs"]).get("target"))
        value = stored_json.mapping(job["context_delta"]).get(target or "")
        found: JsonDict = {"value": value, "status": status}
        if statements.overview.took_default(conn, run=run_id, node=node_id):
            took = f"and took the default {output.compact(value)}"
            reason = f"{where} was not answered within its time-out, {took}"
            return found | {"outcome": "timed out", "reason": reason}
        first = f" with {output.compact(value)}"
    elif asks and status in OPEN:
        if not statements.overview.has_answer(conn, run=run_id, node=node_id):
            raise error
        found, first = {}, ""
    else:
        return {"outcome": "not waiting", "status": status, "reason": str(error)}
    reason = f"{where} has been answered already{first}; the first answer counts"
    return found | {"outcome": "already answered", "reason": reason}


_KEYS = (
    "run_id", "workflow_name", "node_id", "job_id", "widget", "prompt", "waiting_s", "answered",
    "due_at", "has_default", "default", "input_spec",
)  # fmt: skip


@define.command(
    "inputs",
    """RUN  Only questions of this run.
    --limit N 1..10000  How many at most.""",
)
def waiting(run: str | None = None, limit: int = 100) -> define.Shown:
    """List what runs ask people, the longest wait first."""
    run_id = None
    with db.transaction() as conn:
        if run is not None:
            run_id, found = ids.resolve(conn, run, kind="run")
            if found is None or found["kind"] != "run":
                raise command.Refused(f"there is no run {run!r}")
        rows = statements.pages.questions(
            conn, run=run_id, node=None, after=None, after_seq=None, most=MOST_BYTES, limit=limit
        )
    for row in rows:
        # The question is None until an orchestrator has stored it.
        spec = stored_json.mapping(row["input_spec"])
        row |= {"widget": spec.get("widget"), "prompt": spec.get("prompt")}
    listed = [{key: row[key] for key in _KEYS} for row in rows]
    return define.Shown(listed, lambda: _show(listed, run))


def _show(rows: list[JsonDict], run: str | None) -> None:
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
        choices = options(spec)
        for label, value in choices[:SHOWN]:
            same = isinstance(value, dict) or label == value
            output.echo(f"    {label}" if same else f"    {output.compact(value, 80)}  {label}")
        if len(choices) > SHOWN:
            output.echo(f"    ... and {len(choices) - SHOWN} more: --json lists them")
        if row["due_at"]:
            takes = "it takes its default then" if row["has_default"] else "it fails then"
            output.echo(f"  it waits until {display.moment(row['due_at'])}: {takes}")
        if row["answered"]:
            output.echo("  an answer has come in")


# --- a question on the terminal ----------------------------------------------------------------


def default(spec: JsonDict) -> Any:
    """Return the answer that `--yes` gives.

    It is the step's own `default`, else its first option, all options of a multiple choice, nothing
    for an upload, and true for any other question. Raises `InputRefused` for a question that takes
    a text, a number, a list or an object, since any would be a guess.
    """
    if "default" in spec:
        return spec["default"]
    if values := [value for _, value in options(spec)]:
        return values if spec.get("multiple") else values[0]
    if spec.get("widget") in ("file_upload", "pick_or_upload", "choose_one"):
        return None
    if named := answers.other_type(spec):
        raise errors.InputRefused(f"the question has no default: its answer is of type {named}")
    return True


def options(spec: JsonDict) -> list[tuple[str, Any]]:
    """Return the choices as (label, value), each label one line.

    [] for a question without choices.
    """
    return [(output.line(label), value) for label, value in answers.options(spec)]


def ask(node: Row, stop: signals.StopRequest) -> tuple[bool, Any]:
    """Ask on stderr and stdin until the answer fits.

    Return (True, value), or (False, None) for none. An empty line takes the answer of `--yes`. None
    at the end of the input or when asked to stop.
    """
    spec: JsonDict = node["input_spec"]
    prompt = output.line(spec.get("prompt") or f"{node['node_id']}: your answer?", 500)
    listed = [f"  {number}  {label}\n" for number, (label, _) in enumerate(options(spec), 1)]
    sys.stderr.write(f"{prompt}\n{''.join(listed)}")
    try:
        value = default(spec)
        empty = f"Enter: {value if isinstance(value, str) else repr(value)}"
    except errors.InputRefused:
        empty = answers.other_type(spec)
    while True:
        sys.stderr.write(f"[{output.line(empty, 60)}] > ")
        sys.stderr.flush()
        text = _typed(stop)
        if text is None:
            return False, None
        try:
            found = read(text.strip(), spec)
            answers.check_type(spec, found, node["node_id"])
            answers.check(spec, found, node["node_id"])
        except errors.InputRefused as error:
            output.complain(output.line(error, 500))
        else:
            return True, found


def read(text: str, spec: JsonDict) -> Any:
    """Return the answer of a typed line; raise `InputRefused` if it names no choice."""
    if not text:
        return default(spec)
    choices = options(spec)
    if not choices:
        return text if answers.type_of(spec) == "string" else value_of(text, "answer")
    if spec.get("multiple"):
        return [_choice(part.strip(), choices, spec) for part in text.split(",")]
    return _choice(text, choices, spec)


def _choice(text: str, choices: list[tuple[str, Any]], spec: JsonDict) -> Any:
    if text.isdecimal() and len(text) < 10 and 1 <= int(text) <= len(choices):
        return choices[int(text) - 1][1]
    for label, value in choices:
        if text == label:
            return value
    if spec.get("widget") in ("file_upload", "pick_or_upload"):
        return text  # a file that is not in the library
    to = len(choices)
    raise errors.InputRefused(f"{text!r} is none of the choices: type a number from 1 to {to}")


def _typed(stop: signals.StopRequest) -> str | None:
    # input() would continue to read after a signal, since its handler only sets the flag.
    while not stop.requested.is_set():
        ready, _, _ = select.select([sys.stdin, stop.requested], [], [], signals.RECHECK_S)
        if sys.stdin in ready:
            return sys.stdin.readline() or None
    return None


# --- the inputs of a run -----------------------------------------------------------------------


def inputs(
    given: Iterable[str], accepts: Callable[[str, Any], bool] = lambda _key, _value: True
) -> JsonDict:
    """Return the members of all `k=v` and files; later ones win.

    A value that is not JSON is text. A value is also text if `accepts(key, value)` says so: a
    parameter that is annotated `str` gets `123` as text. Raises `InvalidConfig` that names the
    option and the right form.
    """
    merged: JsonDict = {}
    for text in given:
        if text.startswith("@"):
            merged |= _from_file(text[1:])
            continue
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise errors.InvalidConfig(f"--input {text!r} should be key=value or @file.json")
        merged[key] = value_of(value, f"--input {key}")
        if not accepts(key, merged[key]) and accepts(key, value):
            merged[key] = value
    return merged


def value_of(text: str, what: str) -> Any:
    """Return the text as JSON if it is JSON, else the text itself."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise errors.InvalidConfig(f"{what} is nested too deeply") from None
    except ValueError:
        return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _from_file(name: str) -> JsonDict:
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise errors.InvalidConfig(f"--input @{name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise errors.InvalidConfig(f"--input @{name} is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise errors.InvalidConfig(f"--input @{name} should hold a JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]  a JSON object has string keys
