"""What the gpu fleet knows of its models, and what it cannot serve."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.store import claims

_SIZES = (
    "INSERT INTO gpu_models AS g (model, host_label, est_vram_gb)"
    " SELECT s.model, %(host)s, s.gb FROM unnest(%(models)s::text[], %(sizes)s::float8[])"
    " AS s (model, gb) ORDER BY s.model"
    " ON CONFLICT (model, host_label) DO UPDATE SET est_vram_gb = EXCLUDED.est_vram_gb"
    " WHERE g.est_vram_gb IS DISTINCT FROM EXCLUDED.est_vram_gb"
)


def publish_sizes(conn: db.Connection, host: str, sizes: dict[str, float]) -> None:
    """Say what each model needs on a card, in GB, as this host registers it; 0: unknown."""
    names = list(sizes)
    values: dict[str, Any] = {"host": host, "models": names}
    conn.execute(_SIZES, values | {"sizes": [sizes[name] or None for name in names]})


def learn_load(conn: db.Connection, host: str | None, model: str | None, seconds: float) -> None:
    """Let the moving average of a host's loads of a model follow this one."""
    conn.execute(
        "SELECT queue_workflows_learn(%s, %s, %s::float8, NULL)",
        (host, model, seconds),
        prepare=True,
    )


def claim_detail(who: claims.Claimant) -> dict[str, Any] | None:
    """How a gpu worker claims, for its row of `workers`; None on other queues."""
    if who.queue != "gpu":
        return None
    return {
        "policy": who.policy,
        "newest": who.newest,
        "grace_s": who.grace_s,
        "bound_s": who.bound_s,
    }
