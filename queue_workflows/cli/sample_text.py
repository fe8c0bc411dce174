"""Format a sample of a machine as text."""

from __future__ import annotations

from typing import Any

from queue_workflows.runtime import display, stored_json
from queue_workflows.types import JsonDict


def gpus(row: JsonDict) -> str:
    """Return `97 % 21.3/24.0 GB, 0 % 0.2/24.0 GB`; `-` for none."""
    each = [
        f"{percent(gpu.get('use_pct'))} {of(gpu.get('vram_used_mb'), gpu.get('vram_total_mb'))}"
        for gpu in map(stored_json.mapping, stored_json.sequence(row.get("gpus")))
    ]
    return ", ".join(each) or "-"


def line(row: JsonDict) -> str:
    """Return a sample as a line: `cpu 98 %, ram 63.1/64.0 GB, swap 2.0 GB, gpus 0 % ...`."""
    return (
        f"cpu {percent(row.get('cpu_percent'))},"
        f" ram {of(row.get('ram_used_mb'), row.get('ram_total_mb'))},"
        f" swap {gb(row.get('swap_used_mb'))}, gpus {gpus(row)}"
    )


def percent(value: Any) -> str:
    """Return `97 %`, or `-`."""
    return display.number(value, ".0f", " %")


def gb(value: Any) -> str:
    """Return MB as `21.3 GB`, or `-`."""
    mb = stored_json.number(value)
    return "-" if mb is None else f"{mb / 1024:.1f} GB"


def of(used: Any, total: Any) -> str:
    """Return MB as `21.3/24.0 GB`, or `-`."""
    used_mb, total_mb = stored_json.number(used), stored_json.number(total)
    if used_mb is None or total_mb is None:
        return "-"
    return f"{used_mb / 1024:.1f}/{total_mb / 1024:.1f} GB"
