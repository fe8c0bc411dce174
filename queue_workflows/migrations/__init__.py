"""Hold the engine's migrations as package data: `NNNN_name.sql`, each with a `.down.sql`."""

from __future__ import annotations

from pathlib import Path


def dir() -> Path:  # noqa: A001  the contract names it
    """Return the folder of the migrations."""
    return Path(__file__).parent
