"""Load two CSV files into three tables, by jobs that may stop anywhere and run again."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import db

INBOX = Path(__file__).parent / "data"
CHUNK = 50
"""Rows per transaction. A cancelled or killed job keeps the chunks that it committed."""
BAD_PCT = 10
"""A file with a higher percentage of bad rows fails: a person has to check it."""

TABLES = """
CREATE SCHEMA IF NOT EXISTS atlas;
CREATE TABLE IF NOT EXISTS atlas.country (code text PRIMARY KEY, name text NOT NULL);
CREATE TABLE IF NOT EXISTS atlas.zone (
    name text PRIMARY KEY, latitude float8 NOT NULL, longitude float8 NOT NULL, comments text);
CREATE TABLE IF NOT EXISTS atlas.country_zone (
    code text REFERENCES atlas.country, zone text REFERENCES atlas.zone, PRIMARY KEY (code, zone));
CREATE TABLE IF NOT EXISTS atlas.rejected (
    file text, line integer, reason text NOT NULL, PRIMARY KEY (file, line));
"""
# Each statement may run twice: a job that runs again inserts no duplicates.
COUNTRY = """
INSERT INTO atlas.country (code, name) VALUES (%(code)s, %(name)s)
    ON CONFLICT (code) DO UPDATE SET name = EXCLUDED.name
"""
ZONE = """
WITH place AS (
    INSERT INTO atlas.zone VALUES (%(zone)s, %(latitude)s, %(longitude)s, %(comments)s)
        ON CONFLICT (name) DO UPDATE SET latitude = EXCLUDED.latitude,
           longitude = EXCLUDED.longitude, comments = EXCLUDED.comments
    RETURNING name)
INSERT INTO atlas.country_zone
SELECT c.code, place.name FROM place, unnest(%(countries)s::text[]) AS c (code)
    ON CONFLICT DO NOTHING
"""
REJECTED = """
INSERT INTO atlas.rejected (file, line, reason) VALUES (%(file)s, %(line)s, %(reason)s)
    ON CONFLICT (file, line) DO UPDATE SET reason = EXCLUDED.reason
"""

Row = dict[str, str]
Known = set[str]
_CODE = re.compile(r"[A-Z]{2}")
_ISO_6709 = re.compile(r"([+-])(\d\d)(\d\d)(\d\d)?([+-])(\d\d\d)(\d\d)(\d\d)?")


def degrees(sign: str, whole: str, minutes: str, seconds: str | None) -> float:
    value = int(whole) + int(minutes) / 60 + int(seconds or 0) / 3600
    return round(-value if sign == "-" else value, 4)


def country(row: Row, _known: Known) -> dict[str, Any]:
    if not _CODE.fullmatch(row["code"]) or not row["name"]:
        raise ValueError(f"no country: {row}")
    return {"code": row["code"], "name": row["name"]}


def zone(row: Row, known: Known) -> dict[str, Any]:
    found = _ISO_6709.fullmatch(row["coordinates"])
    if found is None:
        raise ValueError(f"no coordinates: {row['coordinates']!r}")
    codes = row["countries"].split(",")
    if strangers := sorted(set(codes) - known):
        raise ValueError(f"no such country: {', '.join(strangers)}")
    return {
        "zone": row["zone"],
        "countries": codes,
        "latitude": degrees(*found.groups()[:4]),
        "longitude": degrees(*found.groups()[4:]),
        "comments": row["comments"] or None,
    }


FILES: dict[str, tuple[Callable[[Row, Known], dict[str, Any]], str]] = {
    "countries.csv": (country, COUNTRY),
    "zones.csv": (zone, ZONE),
}
"""The function that reads a row, and the statement that stores it, per file in load order."""


def load_file(*, file: str) -> Generator[float, None, dict[str, int]]:
    """Load a file in chunks. Each `yield` reports progress and lets a cancel end the job."""
    if file not in FILES:
        raise queue_workflows.Discard(f"no file of ours: {file}")
    transform, statement = FILES[file]
    with (INBOX / file).open(newline="", encoding="utf-8") as source:
        reader = csv.DictReader(source)
        rows = [(reader.line_num, row) for row in reader]
    with db.connection() as conn:
        known = {row["code"] for row in conn.execute("SELECT code FROM atlas.country")}
        conn.execute("DELETE FROM atlas.rejected WHERE file = %s", (file,))
    loaded = 0
    for start in range(0, len(rows), CHUNK):
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        for line, row in rows[start : start + CHUNK]:
            try:
                good.append(transform(row, known))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                bad.append({"file": file, "line": line, "reason": str(error)})
        with db.connection() as conn, conn.cursor() as cursor:
            cursor.executemany(statement, good)
            cursor.executemany(REJECTED, bad)
        loaded += len(good)
        yield min(1.0, (start + CHUNK) / len(rows))
    rejected = len(rows) - loaded
    if rejected * 100 > len(rows) * BAD_PCT:
        raise queue_workflows.Discard(f"{rejected} of {len(rows)} rows of {file} are bad")
    return {"loaded": loaded, "rejected": rejected}


def setup() -> None:
    """Register the task and its queue; `--app etl:setup` calls this."""
    queue_workflows.configure(ingest_queues={"etl"}, embedded=True)
    # A disk or a database that is away may come back: four attempts in 2 min.
    queue_workflows.register_ingest_task(
        "load_file",
        load_file,
        retries=3,
        backoff={"kind": "exponential", "base_s": 15},
        timeout_s=600,
    )


def fingerprint(file: str) -> str:
    """Return the hash of a file's content, or a fixed text for a file that does not exist."""
    path = INBOX / file
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "missing"


def prepare() -> None:
    """Create the tables of the engine and of this example if they do not exist."""
    db.bootstrap()
    with db.connection() as conn:
        conn.execute(TABLES)
