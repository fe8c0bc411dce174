"""List the models that gpu workers hold, and request that a worker loads or unloads one."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from queue_workflows import acts, config, db, errors, types
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.types import Row, Rows, Who

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load(
    host: str,
    model: str,
    *,
    worker_id: str | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> Row:
    """Request that gpu workers of a host load a model between jobs; return the request.

    The request replaces an earlier one for the same host or worker. For `by` and `reason` see
    `acts`. With `conn`, join the caller's transaction. Raises before any write `UnknownWorker` for
    a host or worker that is not live, `UnknownModel` for a model that the host does not report.
    """
    return _request("load", host, model, worker_id, who, conn)


def unload(
    host: str,
    model: str | None = None,
    *,
    worker_id: str | None = None,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> Row:
    """Request that gpu workers unload a model, or any model for None, between jobs; see `load`."""
    return _request("unload", host, model, worker_id, who, conn)


def list(host: str | None = None, *, conn: db.Connection | None = None) -> Rows:  # noqa: A001
    """Return the gpu workers seen within a day, of one host or of all, with the model of each.

    `model` is None if none is loaded; `loading`: its load has not finished. `since`, `held_s`: when
    it was loaded, and seconds since then; `load_s`: seconds that the load took; `est_vram_gb`: GPU
    memory that it needs. `card`: the GPU of a worker of `--cards`, else None. `known_models` and
    `gpus` are of the host, `gpus` with `card` alone if there is one. `request`: the last one with
    its `state` (waiting, running, done, failed or refused), `seconds` and `error`, or None.
    """
    _check_names(host=host)
    with db.transaction(conn) as own:
        rows = statements.models.on_workers(
            own, stale_s=config.STALE_WORKER_AFTER_S.read(), host=host
        )
    return [_row(row) for row in rows]


def _own_gpus(row: Row) -> Any:
    """Return the host's GPUs in its latest sample, or only the one that this worker uses."""
    gpus, card = row["gpus"], row["card"]
    if card is None or gpus is None:
        return gpus
    return [
        each for each in stored_json.sequence(gpus) if stored_json.mapping(each).get("id") == card
    ]


def _row(row: Row) -> Row:
    model = stored_json.mapping(row["model"] if row["state"] != "dead" else None)
    held_s = stored_json.number(model.get("held_s"))
    return {
        "worker_id": row["worker_id"],
        "host_label": row["host_label"],
        "pid": row["pid"],
        "card": row["card"],
        "state": row["state"],
        "job_ids": row["job_ids"],
        "model": model.get("id"),
        "loading": model.get("loading", False),
        "since": None if held_s is None else _earlier(row["last_seen"], held_s),
        "held_s": None if held_s is None else held_s + row["age_s"],
        "load_s": model.get("load_s"),
        "est_vram_gb": model.get("est_vram_gb") or None,
        "known_models": sorted(row["known_models"]),
        "gpus": _own_gpus(row),
        "request": row["request"],
        "last_seen": row["last_seen"],
        "age_s": row["age_s"],
    }


def _earlier(instant: datetime, seconds: float) -> datetime | None:
    try:
        return instant - timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        return None


def _request(
    action: str,
    host: str,
    model: str | None,
    worker_id: str | None,
    who: Who,
    conn: db.Connection | None,
) -> Row:
    _check_names(host=host, model=model, worker=worker_id)
    values: dict[str, Any] = {
        "host": host,
        "worker": worker_id or "",
        "action": action,
        "model": model,
    }
    detail = {"model": model, "worker": worker_id}
    with db.transaction(conn) as own:
        _check(own, host, model, worker_id)
        with acts.recorded(own, action, ("machine", host), **who, **detail) as act:
            return statements.models.request(own, requested_by=act.actor, **values)


def _check_names(**names: str | None) -> None:
    for what, text in names.items():
        if text is not None and not types.is_name(text):
            raise errors.InvalidConfig(f"{what} {text!r:.40}: a name has 1 to 400 bytes of UTF-8")


def _check(conn: db.Connection, host: str, model: str | None, worker_id: str | None) -> None:
    rows = statements.models.on_workers(conn, stale_s=config.STALE_WORKER_AFTER_S.read(), host=None)
    live = [row for row in rows if row["state"] != "dead"]
    ours = [row for row in live if row["host_label"] == host]
    if not ours:
        known = ", ".join(sorted({row["host_label"] for row in live})) or "none"
        raise errors.UnknownWorker(
            f"host {host!r} has no live gpu worker; hosts with one: {known}"
            f"{errors.hint(host, {row['host_label'] for row in live})}"
        )
    if worker_id is not None and worker_id not in [row["worker_id"] for row in ours]:
        known = ", ".join(row["worker_id"] for row in ours)
        raise errors.UnknownWorker(f"host {host!r} has no gpu worker {worker_id!r} but {known}")
    registered = {name for row in ours for name in row["known_models"]}
    if model is not None and registered and model not in registered:
        known = ", ".join(sorted(registered))
        raise errors.UnknownModel(
            f"host {host!r} does not know model {model!r}; it knows {known}"
            f"{errors.hint(model, registered)}"
        )
