"""`examples/etl` runs as its README describes, in an environment of its own."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support import commands, http_service

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (
    "SELECT (SELECT count(*) FROM atlas.country), (SELECT count(*) FROM atlas.zone),"
    " (SELECT count(*) FROM atlas.country_zone), (SELECT count(*) FROM atlas.rejected)"
)


class Import:
    """A copy of the example, and the rows of its run in a database of its own."""

    def __init__(self, folder: Path, dsn: str, conn: psycopg.Connection[Any]) -> None:
        self.folder = folder
        self.dsn = dsn
        self.conn = conn

    def run(self, exit_code: int = 0) -> list[str]:
        """What it prints."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "QUEUE_WORKFLOWS_DB_URL": self.dsn,
            **{k: v for k, v in os.environ.items() if k.startswith(("COVERAGE_", "PYTHONPATH"))},
        }
        done = subprocess.run(
            [sys.executable, "-W", "error", "etl"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stdout.splitlines()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.conn.execute(query.encode()).fetchall()

    def edit(self, file: str, line: int, text: str) -> None:
        path = self.folder / "etl" / "data" / file
        lines = path.read_text(encoding="utf-8").splitlines()
        lines[line - 1] = text
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def etl(fresh_database: str, tmp_path: Path) -> Iterator[Import]:
    shutil.copytree(ROOT / "examples" / "etl", tmp_path / "etl")
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        yield Import(tmp_path, fresh_database, conn)


def read(file: str) -> list[dict[str, str]]:
    path = ROOT / "examples" / "etl" / "data" / file
    with path.open(newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source))


def test_every_row_of_the_files_is_a_row_of_the_tables_and_twice_is_once(etl: Import) -> None:
    countries, zones = read("countries.csv"), read("zones.csv")
    pairs = Counter(code for row in zones for code in row["countries"].split(","))
    wanted = [(len(countries), len(zones), pairs.total(), 0)]
    assert wanted[0][:2] == (249, 312)
    said = etl.run()
    assert said[0].startswith("countries.csv: completed, {'loaded': 249, 'rejected': 0}, job ")
    assert said[1].startswith("zones.csv: completed, {'loaded': 312, 'rejected': 0}, job ")
    assert "Portugal: Atlantic/Azores, Atlantic/Madeira, Europe/Lisbon" in said
    assert etl.rows(COUNTS) == wanted
    lisbon = "SELECT latitude, longitude, comments FROM atlas.zone WHERE name = 'Europe/Lisbon'"
    assert etl.rows(lisbon) == [(38.7167, -9.1333, "Portugal (mainland)")]
    by_code = dict(etl.rows("SELECT code, count(*) FROM atlas.country_zone GROUP BY code"))
    assert by_code == pairs
    assert etl.run() == said, "the same files are the same jobs"
    states = "SELECT status, lock_key, count(*) FROM ingest_jobs GROUP BY 1, 2"
    assert etl.rows(states) == [("completed", "atlas", 2)]
    etl.rows("UPDATE ingest_jobs SET idempotency_key = NULL RETURNING id")
    etl.run()
    assert etl.rows(COUNTS) == wanted, "a file that is loaded again doubles nothing"


def test_bad_rows_are_stored_with_file_line_and_reason(etl: Import) -> None:
    etl.edit("zones.csv", 2, "AD,somewhere,Europe/Andorra,")
    etl.edit("zones.csv", 5, '"AL,XX",+4120+01950,Europe/Tirane,')
    etl.edit("zones.csv", 7, "AQ")
    etl.edit("countries.csv", 3, "UAE,United Arab Emirates")
    said = etl.run()
    assert "{'loaded': 248, 'rejected': 1}" in said[0]
    # AE is no country any more, and each zone that names it has to wait for it.
    bad = etl.rows("SELECT file, line, reason FROM atlas.rejected ORDER BY file, line")
    assert bad[0][:2] == ("countries.csv", 3)
    by_line = {line: reason for file, line, reason in bad if file == "zones.csv"}
    assert by_line[2] == "no coordinates: 'somewhere'"
    assert by_line[3] == "no such country: AE"
    assert by_line[5] == "no such country: XX"
    assert 7 in by_line
    assert f"'rejected': {len(by_line)}" in said[1]
    shutil.copytree(ROOT / "examples" / "etl", etl.folder / "etl", dirs_exist_ok=True)
    etl.run()
    assert etl.rows(COUNTS)[0][3] == 0, "mended files leave nothing aside"


def test_a_file_that_is_mostly_bad_is_dead_at_once_with_the_reason(etl: Import) -> None:
    path = etl.folder / "etl" / "data" / "countries.csv"
    path.write_text("code,name\nAD,Andorra\n" + "x,y\n" * 9, encoding="utf-8")
    said = etl.run(exit_code=1)
    assert etl.run(exit_code=1) == said, "a dead job stays dead until somebody retries it"
    assert said[0].startswith(
        "countries.csv: failed, Discard: 9 of 10 rows of countries.csv are bad"
    )
    (dead,) = etl.rows("SELECT attempts, max_attempts, error FROM ingest_jobs WHERE task_name ="
                       " 'load_file' AND args ->> 'file' = 'countries.csv'")  # fmt: skip
    assert dead[0] == 1
    assert etl.rows("SELECT count(*) FROM atlas.country") == [(1,)], "what is good stays"


def test_it_runs_through_the_http_service(etl: Import) -> None:
    """As its README describes; the tables are created by a first run."""
    etl.run()
    etl.rows("DELETE FROM atlas.country_zone RETURNING code")
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=etl.dsn) as cli,
        http_service.served(
            cli, app="etl:setup", workers='[{"queue": "etl"}]', cwd=etl.folder / "etl"
        ) as service,
    ):
        body = {"queue": "etl", "task": "load_file", "lock_key": "atlas"}
        ids = [
            service.post("/api/v1/jobs/trigger", body | {"args": {"file": file}}).json()["job_id"]
            for file in ("countries.csv", "zones.csv", "nothing.csv")
        ]
        over = [service.ended(job_id) for job_id in ids]
    assert [each["status"] for each in over] == ["succeeded", "succeeded", "failed"]
    assert over[2]["error"] == "Discard: no file of ours: nothing.csv"
    assert etl.rows(COUNTS)[0][:2] == (249, 312)
    assert etl.rows("SELECT count(*) FROM atlas.country_zone")[0][0] > 300
