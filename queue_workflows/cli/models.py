"""Define `queue-workflows models`: list the models of gpu workers, load and unload them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queue_workflows import config, db, errors
from queue_workflows import models as api
from queue_workflows.cli import command, options, output, sample_text
from queue_workflows.runtime import display, entry_point, signals, stored_json
from queue_workflows.types import Row

ACTIONS = ("list", "load", "unload")
POLL_S = 0.25
_OVER = frozenset({"done", "failed", "refused"})


def models(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="list, load or unload.")] = "list",
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The model's id; `unload` without one: the loaded model."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="H", help="Host label; default: this machine's, and `list`: all."),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="ID|PID", help="One gpu worker of the machine; default: each of them."
        ),
    ] = None,
    requested_by: Annotated[
        str | None, typer.Option(metavar="WHO", help="Who requests it, for the record.")
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Send the request, and do not wait for the answer.")
    ] = False,
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show the models of gpu workers, or load or unload one.

    Workers act between their jobs. Exit code 0: all did it, 1: one failed, refused or died, 130:
    left by Ctrl-C.
    """

    def run_command() -> int:
        _check(action, model, worker)
        with command.reading(app):
            if action == "list":
                _list(api.list(host), as_json=as_json)
                return 0
            label = host or config.host_label()
            request = _send_request(action, label, model, worker, requested_by)
            if no_wait:
                rows = _requested_workers(request)
            else:
                with command.until_stopped() as stop:
                    rows = _answers(request, stop)
                    if stop.requested.is_set():
                        command.print_message("stopped waiting; the request remains")
                        return entry_point.INTERRUPTED
        _list(rows, as_json=as_json) if as_json or no_wait else _print_answers(rows)
        return 0 if no_wait or all(_state(row) == "done" for row in rows) else 1

    command.execute("models", run_command, debug=debug)


def _check(action: str, model: str | None, worker: str | None) -> None:
    if action not in ACTIONS:
        raise errors.InvalidConfig(f"{action!r} is none of {', '.join(ACTIONS)}")
    if action == "load" and not model:
        raise errors.InvalidConfig("load needs the id of a model: models load MODEL --host H")
    if action == "list" and (model or worker):
        raise errors.InvalidConfig("list takes neither a model nor a worker, only --host")


def _send_request(
    action: str, host: str, model: str | None, worker: str | None, requested_by: str | None
) -> Row:
    # In one transaction: a worker may answer within milliseconds of the commit.
    with db.transaction() as conn:
        known = {str(row["pid"]): row for row in api.list(host, conn=conn)}
        worker_id = known[worker]["worker_id"] if worker in known else worker
        if action == "load":
            return api.load(
                host, model or "", worker_id=worker_id, requested_by=requested_by, conn=conn
            )
        return api.unload(host, model, worker_id=worker_id, requested_by=requested_by, conn=conn)


def _requested_workers(request: Row) -> list[Row]:
    """Return the live workers that a request is for."""
    return [
        row
        for row in api.list(request["host_label"])
        if request["worker_id"] in ("", row["worker_id"]) and row["state"] != "dead"
    ]


def _answers(request: Row, stop: signals.StopRequest) -> list[Row]:
    """Wait until each worker has answered, died or got another request; return the workers."""
    number = request["request_no"]
    rows = {row["worker_id"]: row for row in _requested_workers(request)}
    reported: set[str] = set()
    while True:
        now = {row["worker_id"]: row for row in api.list(request["host_label"])}
        for worker_id, row in rows.items():
            seen = now.get(worker_id, row | {"state": "dead"})
            rows[worker_id] = seen | {"answer": _answer(seen, number)}
            if (
                seen["job_ids"]
                and not reported & {worker_id}
                and _state(rows[worker_id]) == "waiting"
            ):
                reported.add(worker_id)
                command.print_message(f"{_name(seen)} obeys after job {', '.join(seen['job_ids'])}")
        over = all(_state(row) in _OVER for row in rows.values())
        if over or stop.requested.wait(POLL_S):
            return list(rows.values())


def _answer(row: Row, number: int) -> Row:
    request = stored_json.mapping(row["request"])
    own = stored_json.number(request.get("no")) or 0
    if own > number:
        return {"state": "failed", "error": "another request took its place"}
    if own == number and request.get("state") in _OVER:
        return {"seconds": None, "error": None} | request
    if row["state"] == "dead":
        return {"state": "failed", "error": "the worker is dead"}
    return {"state": "waiting"}


def _state(row: Row) -> str:
    return row["answer"]["state"]


def _print_answers(rows: list[Row]) -> None:
    for row in rows:
        answer = row["answer"]
        if answer["state"] == "done":
            what = f"holds {row['model']}" if row["model"] else "holds no model"
            output.echo(f"{_name(row)} {what}, after {output.seconds(answer['seconds'])}")
        else:
            output.echo(f"{_name(row)} {answer['state']}: {output.line(answer['error'])}")


def _name(row: Row) -> str:
    return f"{row['host_label']} pid {row['pid']}"


def _list(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        output.dump(rows)
        return
    output.table(
        ("host", "pid", "state", "model", "held", "load", "needs", "gpus", "request"),
        [
            (
                row["host_label"] if row["card"] is None else f"{row['host_label']} {row['card']}",
                row["pid"],
                row["state"],
                f"{row['model']} (loading)" if row["loading"] else row["model"] or "",
                output.seconds(row["held_s"]),
                output.seconds(row["load_s"]),
                display.number(row["est_vram_gb"], "g", " GB") if row["est_vram_gb"] else "-",
                _gpu_memory(row["gpus"]),
                _request(row["request"]),
            )
            for row in rows
        ],
    )


def _gpu_memory(gpus: Any) -> str:
    """Return the memory in use of each GPU: `21.3/24.0, 0.2/24.0 GB`; `-` without a sample."""
    each = [
        sample_text.of(gpu.get("vram_used_mb"), gpu.get("vram_total_mb")).removesuffix(" GB")
        for gpu in map(stored_json.mapping, stored_json.sequence(gpus))
    ]
    return ", ".join(each) + " GB" if each else "-"


def _request(request: Any) -> str:
    if request is None:
        return ""
    answer = {
        key: output.line(value) for key, value in stored_json.mapping(request).items() if value
    }
    by = f" by {answer['requested_by']}" if "requested_by" in answer else ""
    error = f": {answer['error']}" if "error" in answer else ""
    text = f"{answer.get('action', '-')} {answer.get('model', 'the loaded model')}{by}"
    return f"{text} {answer.get('state', '-')}{error}"
