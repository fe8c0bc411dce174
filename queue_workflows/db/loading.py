"""Load times from rows without ever raising, and JSON by `runtime.json_loading`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import psycopg
from psycopg import abc, adapt, pq
from psycopg.types.json import set_json_loads

from queue_workflows.runtime.json_loading import load_json

_LATEST = datetime.max.replace(tzinfo=timezone.utc)
_EARLIEST = datetime.min.replace(tzinfo=timezone.utc)


def install(context: abc.AdaptContext) -> None:
    """Register the loaders on this connection or map of adapters: for JSON and timestamptz."""
    set_json_loads(load_json, context)
    context.adapters.register_loader("timestamptz", _Moment)


class _Moment(adapt.Loader):
    """Load a timestamptz; return the nearest `datetime` for a time that Python cannot represent.

    Such times are `infinity`, `-infinity`, and times in years after 9999 or before year 1.
    """

    def __init__(self, oid: int, context: abc.AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        kind = psycopg.adapters.get_loader(oid, pq.Format.TEXT)
        assert kind is not None
        self._load = kind(oid, context).load

    def load(self, data: abc.Buffer) -> Any:
        try:
            return self._load(data)
        except psycopg.DataError:
            text = bytes(data)
            return _EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else _LATEST
