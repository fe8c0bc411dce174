"""Check runs whose graphs grow, and jobs with steps: nothing twice, in order, the right values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.soak import evidence, growing_workflows, journal, step_tasks

OVER = ("completed", "failed", "cancelled")
SLACK_S = 0.02
"""How exactly the database's time is known on the journal's clock."""
Found = Iterator[str]
Seen = evidence.Evidence
Nodes = dict[str, dict[str, Any]]


def grown(seen: Seen) -> Found:
    """Find completed runs with other nodes, rounds, children or values than their workflow says."""
    by_run: dict[str, Nodes] = defaultdict(dict)
    for job in seen.jobs.values():
        if job["run_id"]:
            by_run[job["run_id"]][job["node_id"]] = job
    children: dict[str, list[str]] = defaultdict(list)
    for run_id, run in seen.runs.items():
        if run["parent"] in seen.books.runs:
            children[run["parent"]].append(run_id)
    for run_id, name in seen.books.runs.items():
        run, nodes = seen.runs.get(run_id), by_run[run_id]
        if run is None or run["status"] not in OVER:
            continue
        for child in children[run_id]:
            if seen.runs[child]["status"] not in OVER:
                yield f"run {run_id} is over, and its child {child} is not"
        if run["status"] == "completed":
            judge = {growing_workflows.MAPS: _mapped, growing_workflows.GROWS: _grew}.get(name)
            wrong = judge(seen, nodes, run, children[run_id]) if judge else ()
            yield from (f"run {run_id} ({name}): {each}" for each in wrong)


def _mapped(seen: Seen, nodes: Nodes, run: dict[str, Any], _: list[str]) -> Found:
    keys = growing_workflows.ITEMS
    done, skipped = {"list/n", "each", "join/n"}, set[str]()
    for key in keys:
        ran = [node for node, _ in growing_workflows.handlers_of(key)]
        done |= {f"each[{key}]/{node}" for node in (*ran, "ready", "again")}
        skipped |= {f"each[{key}]/{node}" for node in growing_workflows.skipped_of(key)}
        yield from _item(seen, nodes, key)
    yield from _others(nodes, done, skipped)
    for node in sorted(skipped & nodes.keys()):
        if seen.by_job.get(nodes[node]["id"]):
            yield f"{node} ran, and is skipped"
    got = (nodes["join/n"]["result"] or {}).get("got") if "join/n" in nodes else None
    wanted = [[*keys], [growing_workflows.value_of(key) for key in keys]]
    if got != wanted:
        yield f"the join got {got}, not {wanted}"
    spans = [span for key in keys if (span := _open(seen, nodes, key))]
    for since, _until in spans:
        others = sum(a <= since < b for a, b in spans)
        if others > growing_workflows.AT_ONCE:
            yield f"{others} items were open at once"
    begun = [line.at for line in seen.by_job.get(nodes["join/n"]["id"], [])]
    if begun and spans and min(begun) < max(until for _, until in spans):
        yield "the join began before all items had ended"


def _open(seen: Seen, nodes: Nodes, key: str) -> tuple[float, float] | None:
    """Return from when to when an item was open: its first line, and the end of its last node."""
    first, last = _span(seen, nodes, f"each[{key}]/a"), _span(seen, nodes, f"each[{key}]/b")
    return (first[0], last[1]) if first and last else None


def _span(seen: Seen, nodes: Nodes, name: str) -> tuple[float, float] | None:
    """Return when a node's handler began first, and when that of its last claim ended."""
    if name not in nodes:
        return None
    lines, claim = seen.by_job.get(nodes[name]["id"], []), nodes[name]["claim_no"]
    ends = [line.at for line in lines if line.word == "end" and line.claim == claim]
    return (min(line.at for line in lines), max(ends)) if ends else None


def _item(seen: Seen, nodes: Nodes, key: str) -> Found:
    """Find a node of an item that began too early, or whose result is not that of its round."""
    before, ended = "", 0.0
    for node, wanted in growing_workflows.handlers_of(key):
        name = f"each[{key}]/{node}"
        result = (nodes[name]["result"] or {}) if name in nodes else {}
        for field, value in wanted.items():
            if result.get(field) != value:
                yield f"{name} has the {field} {result.get(field)}, not {value}"
        span = _span(seen, nodes, name)
        if span is not None:
            if before and span[0] < ended:
                yield f"{name} began before {before} had ended"
            before, ended = name, span[1]


def _grew(seen: Seen, nodes: Nodes, run: dict[str, Any], children: list[str]) -> Found:
    arm = growing_workflows.KINDS[run["kind"]]
    skipped = {"done/film", "done/still"} - {f"done/{arm}"}
    rounds = {f"again/turn#{number + 1}" for number in range(growing_workflows.ROUNDS)}
    done = {"first/n", "done", f"done/{arm}", "child", "again", "last/n", *rounds}
    more = {node for node in nodes if node.startswith("again/turn#")} - rounds
    yield from _others(nodes, done, skipped | more)
    for node in skipped & nodes.keys():
        if seen.by_job.get(nodes[node]["id"]):
            yield f"{node} ran, and the branch chose {arm}"
    if len(children) != 1:
        yield f"it has {len(children)} child runs"
    result = (nodes["last/n"]["result"] or {}) if "last/n" in nodes else {}
    got, wanted = (result.get("seen"), result.get("count")), (arm, growing_workflows.ROUNDS)
    if got != wanted:
        yield f"the last node got {got}, not {wanted}"


def _others(nodes: Nodes, done: set[str], skipped: set[str]) -> Found:
    for wanted, names in (("completed", done), ("skipped", skipped)):
        for name in sorted(names):
            status = nodes[name]["status"] if name in nodes else "missing"
            if status != wanted:
                yield f"{name} is {status}, not {wanted}"
    if more := nodes.keys() - done - skipped:
        yield f"it has the nodes {', '.join(sorted(more))} too"


def stepped(seen: Seen) -> Found:
    """Find steps that ran again after they were recorded, or whose result changed."""
    for job_id, job in seen.jobs.items():
        if job["what"] != "stepped":
            continue
        lines = seen.by_job.get(job_id, [])
        for name in ("first", "second"):
            ran = _lines_of(lines, "step", name)
            kept = _lines_of(lines, "kept", name)
            if not kept:
                continue
            claim, token = kept[0]
            if token not in [each for _, each in ran]:
                yield f"job {job_id}: step {name} has {token}, which no execution returned"
            if later := [each for each, _ in ran if each > claim]:
                yield f"job {job_id}: step {name} of claim {claim} ran again in {later}"
            results = [each for _, each in kept]
            if job["status"] == "completed":
                results.append(job["result"].get(name))
            if {*results} != {token}:
                yield f"job {job_id}: step {name} has returned {results}"


def _lines_of(lines: list[journal.Line], word: str, name: str) -> list[tuple[int, str]]:
    """Return the claim and the token of each line of this word about a step."""
    about = [line for line in lines if line.word == word and line.what.startswith(f"{name} ")]
    return [(line.claim, line.what.split()[1]) for line in about]


def waited(seen: Seen) -> Found:
    """Find jobs that woke before their sleep was over, or that got another event than the first."""
    for job_id, job in seen.jobs.items():
        if job["what"] not in ("waits", step_tasks.LISTENS):
            continue
        lines = seen.by_job.get(job_id, [])
        begun = [line.at for line in lines if line.word == "start"]
        woke = [line.at for line in lines if line.word == "woke"]
        if woke and min(woke) - min(begun) < step_tasks.SLEEP_S - SLACK_S:
            yield f"job {job_id}: it slept {min(woke) - min(begun):.2f} s"
        if job["status"] != "completed":
            continue
        where = job["run_id"] or job_id
        accepted = seen.books.events.get(where, [])
        if len(accepted) > 1:
            yield f"job {job_id}: {len(accepted)} events were accepted"
        got = job["result"].get("got")
        if where not in seen.books.perhaps_sent and [got] != accepted[:1]:
            yield f"job {job_id}: it got {got!r}, and {accepted} was accepted"
