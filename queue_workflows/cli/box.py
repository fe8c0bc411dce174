"""A sample of what a box did, as text."""

from __future__ import annotations

from queue_workflows.types import JsonDict


def cards(row: JsonDict) -> str:
    """`97 % 21.3/24.0 GB, 0 % 0.2/24.0 GB`; `-` for none."""
    each = [
        f"{percent(gpu['use_pct'])} {of(gpu['vram_used_mb'], gpu['vram_total_mb'])}"
        for gpu in row["gpus"]
    ]
    return ", ".join(each) or "-"


def line(row: JsonDict) -> str:
    """A sample in a line: `cpu 98 %, ram 63.1/64.0 GB, swap 2.0 GB, cards 0 % 23.9/24.0 GB`."""
    return (
        f"cpu {percent(row['cpu_percent'])}, ram {of(row['ram_used_mb'], row['ram_total_mb'])},"
        f" swap {gb(row['swap_used_mb'])}, cards {cards(row)}"
    )


def percent(value: float | None) -> str:
    """`97 %`, or `-`."""
    return "-" if value is None else f"{value:.0f} %"


def gb(value: float | None) -> str:
    """MB as `21.3 GB`, or `-`."""
    return "-" if value is None else f"{value / 1024:.1f} GB"


def of(used: float | None, total: float | None) -> str:
    """`21.3/24.0 GB` of MB, or `-`."""
    return "-" if used is None or total is None else f"{used / 1024:.1f}/{total / 1024:.1f} GB"
