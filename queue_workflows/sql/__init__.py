"""Hold the SQL of the engine as package data, and expand its fragments and common texts.

`queries/` has the statements by noun, `functions/` and `triggers/` the set that `db.functions`
installs, and `privileges.sql` the rights to its functions. Statements with variable names of tables
or databases are composed in `db/`, since a name cannot be a parameter;
`tests/unit/test_sql_in_files.py` lists them.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

FOLDER = Path(__file__).parent
QUERIES = FOLDER / "queries"
JOB_TABLES = ("ingest_jobs", "workflow_node_jobs")
TABLES_LINE: Final = f"-- tables: {' '.join(JOB_TABLES)}\n"
"""Below it stands a function or statement over `ingest_jobs`, which is written for each table."""
_OF_NODES: Final = {
    "ingest_jobs": "workflow_node_jobs",
    "ingest_job_events": "workflow_node_events",
    "ingest_job_ready": "node_job_ready",
    "queue_workflows_ingest_": "queue_workflows_node_",
}
_OF_INGEST = re.compile(rf"\b(?:(?:{'|'.join([*_OF_NODES][:3])})\b|{[*_OF_NODES][3]})")
_ONLY = re.compile(r"^(.*?) *-- (nodes|ingest) only$\n?", re.MULTILINE)
_BOTH = re.compile(r"^ *-- both:\n(.*?) *-- end\n", re.MULTILINE | re.DOTALL)
_FRAGMENT = re.compile(
    r"^-- fragment: (\w+)\(([\w, ]*)\)\n(?:--[^\n]*\n)+(.*?)\n(?=\n|\Z)", re.MULTILINE | re.DOTALL
)
_USE = re.compile(r"\{(?:(ingest|node):)?([a-z_]+)\(((?:(?!\{[a-z_:]+\().)*?)\)\}")
_TWINS = re.compile(rf"^{TABLES_LINE}(.*?^(?:END )?\$\$;\n)", re.MULTILINE | re.DOTALL)


def written(text: str) -> str:
    """Return the text of a file with all that stands for more written out.

    `{name(a, b)}` is the fragment of that name in `fragments.sql`, and `{node:name(a, b)}` that for
    the table of nodes. What is between the lines `-- both:` and `-- end` is written for each job
    table, joined by UNION ALL. A function below `TABLES_LINE` is written for each table.
    """
    text = _BOTH.sub(_for_both, _with_fragments(text))
    return _TWINS.sub(lambda found: "\n".join(of_table(found[1], one) for one in JOB_TABLES), text)


def of_table(text: str, table: str) -> str:
    """Rewrite a text about `ingest_jobs` for `table`; return it.

    A line that ends in `-- nodes only` or `-- ingest only` is dropped for the other table.
    """
    family = "ingest" if table == JOB_TABLES[0] else "nodes"
    text = _ONLY.sub(lambda found: f"{found[1]}\n" if found[2] == family else "", text)
    if family == "ingest":
        return text
    return _OF_INGEST.sub(lambda found: _OF_NODES[found[0]], text)


def _for_both(found: re.Match[str]) -> str:
    return "UNION ALL\n".join(of_table(found[1], table) for table in JOB_TABLES)


@functools.cache
def _fragments() -> dict[str, tuple[list[str], str]]:
    """Return the parameters and the text of each fragment."""
    source = (FOLDER / "fragments.sql").read_text(encoding="utf-8")
    return {name: (given.split(", "), text) for name, given, text in _FRAGMENT.findall(source)}


def _with_fragments(text: str) -> str:
    while _USE.search(text):  # the inner ones first
        text = _USE.sub(_used, text)
    return text


def _used(found: re.Match[str]) -> str:
    names, text = _fragments()[found[2]]
    values = dict(zip(names, found[3].split(", ", len(names) - 1), strict=True))
    text = _with_fragments(re.sub(r"\w+", lambda word: values.get(word[0], word[0]), text))
    if _ONLY.search(text):
        text = f"\n{text}\n"  # no other text on a line that is perhaps left out
    return of_table(text, JOB_TABLES[found[1] == "node"]) if found[1] else text
