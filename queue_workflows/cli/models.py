"""Define `queue-workflows models`: list the models of gpu workers, load and unload them."""

from __future__ import annotations

from typing import Annotated, Any

from queue_workflows import config, db, errors
from queue_workflows import models as api
from queue_workflows.cli import command, define, options, output, sample_text
from queue_workflows.runtime import display, entry_point, signals, stored_json
from queue_workflows.types import Row

POLL_S = 0.25
_OVER = frozenset({"done", "failed", "refused"})


app = define.group("models", "Show the models of gpu workers, or load or unload one.")
Host = Annotated[str | None, options.option("H", "Host label; default: this machine's.")]
Worker = Annotated[
    str | None, options.option("ID|PID", "One gpu worker of the machine; default: each of them.")
]
By = Annotated[str | None, options.option("WHO", "Who requests it, for the record.")]
NoWait = Annotated[
    bool, options.flag("--no-wait", "Send the request, and do not wait for the answer.")
]


@app.command("list")
@define.command("models list")
def list_(
    model: Annotated[str | None, options.argument("MODEL", "None.", hidden=True)] = None,
    host: Annotated[str | None, options.option("H", "Only of this host label.")] = None,
) -> define.Shown:
    """List the gpu workers with their models."""
    if model is not None:
        raise errors.InvalidConfig("list takes neither a model nor a worker, only --host")
    rows = api.list(host)
    return define.Shown(rows, lambda: _list(rows))


def _asking(action: str, help_: str, doc: str) -> None:
    """Add a subcommand that asks workers to act on a model; `help_`: of its argument."""

    def ask(
        model: Annotated[str | None, options.argument("MODEL", help_)] = None,
        host: Host = None,
        worker: Worker = None,
        requested_by: By = None,
        no_wait: NoWait = False,
        *,
        app: str | None,
    ) -> int | define.Shown:
        if action == "load" and not model:
            raise errors.InvalidConfig("load needs the id of a model: models load MODEL --host H")
        with command.reading(app):
            label = host or config.host_label()
            request = _send_request(action, label, model, worker, requested_by)
            return _outcome(request, no_wait=no_wait)

    ask.__doc__ = doc
    ask.__annotations__["model"] = Annotated[str | None, options.argument("MODEL", help_)]
    app.command(action)(define.command(f"models {action}", reads=False)(ask))


_asking(
    "load",
    "The model's id.",
    "Load a model, between two jobs of each worker.\n\n"
    "Exit code 0: all did it, 1: one failed, refused or died, 130: left by Ctrl-C.",
)
_asking(
    "unload",
    "Its id; default: the loaded model.",
    "Unload a model, between two jobs of each worker; the exit codes are those of `load`.",
)


def _outcome(request: Row, *, no_wait: bool) -> int | define.Shown:
    if no_wait:
        rows = _requested_workers(request)
        return define.Shown(rows, lambda: _list(rows))
    with command.until_stopped() as stop:
        rows = _answers(request, stop)
        if stop.requested.is_set():
            command.print_message("stopped waiting; the request remains")
            return entry_point.INTERRUPTED
    is_done = all(_state(row) == "done" for row in rows)
    return define.Shown(rows, lambda: _print_answers(rows), 0 if is_done else 1)


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


def _list(rows: list[Row]) -> None:
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
