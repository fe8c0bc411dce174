"""The page of a run over HTTP: usual, empty, huge and hostile runs, its parts and its actions."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import threading
import zlib
from collections.abc import Generator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import queue_workflows
from queue_workflows import acts, runs
from queue_workflows import db as engine_db
from tests.support import constants, counting_cursor, factories, flow, pages
from tests.support.pages import EVIL, Browser

T0 = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(hours=1)
"""The service deletes old events when it starts."""
pytestmark = pytest.mark.usefixtures("db")


def definition(*entries: dict[str, Any], **deps: str) -> dict[str, Any]:
    """A stored definition of nodes made of `name="dep dep"`, and further entries."""
    rest = {"module": "m", "queue": "cpu", "model": None, "inputs": {}, "skip_if": None}
    nodes = [{"id": name, "deps": text.split(), **rest} for name, text in deps.items()]
    return {"version": 2, "workflow": "w", "nodes": [*nodes, *entries]}


def failed_node(
    conn: engine_db.Connection, run_id: str, name: str, error: str, **columns: Any
) -> str:
    """Insert a node that failed twice, with events, a traceback and a log; return its job's id."""
    job = factories.node(
        conn, run_id, name, status="failed", error=error, attempts=2, max_attempts=2, claim_no=2,
        created_at=T0, started_at=T0 + timedelta(seconds=20),
        finished_at=T0 + timedelta(seconds=50), **columns,
    )  # fmt: skip
    given = {
        "run_id": run_id,
        "node_id": name,
        "job_id": job["id"],
        "worker_id": "w:7:x",
        "host_label": "box-1",
    }
    used = {"gpu_pct": 63, "vram_mb": 2048}
    detail = {"traceback": f"Traceback of {error}", "used": used}
    for at, kind, claim, more in (
        (5, "claimed", 1, {}),
        (15, "retried", 1, {"elapsed_s": 10.0, "error": error}),
        (20, "claimed", 2, {}),
        (50, "failed", 2, {"elapsed_s": 30.0, "error": error, "detail": detail}),
    ):  # fmt: skip
        factories.insert(
            conn, "workflow_node_events", event_type=kind, claim_no=claim,
            created_at=T0 + timedelta(seconds=at), **given, **more,
        )  # fmt: skip
    factories.insert(
        conn, "job_attempt_logs", job_table="workflow_node_jobs", job_id=job["id"], claim_no=2,
        head=f"line 1\nline 2 {error}\n", tail="the end\n", cut_bytes=1234,
    )  # fmt: skip
    return job["id"]


def failed_run(
    conn: engine_db.Connection, error: str = "ValueError: no price", **columns: Any
) -> str:
    """Insert a run of the graph a -> b -> c, in which b failed; return its id."""
    given = {
        "status": "failed", "error": f"node b: {error}", "created_at": T0, "queued_at": T0,
        "started_at": T0, "finished_at": T0 + timedelta(seconds=60), "definition_hash": "h-abc",
        "definition": definition(a="", b="a", c="b"),
        "context": {"wish": "tea", "password": "hidden1"},
    }  # fmt: skip
    run_id = factories.run(conn, **(given | columns))
    factories.node(
        conn, run_id, "a", status="completed", context_delta={"a": 1}, created_at=T0,
        started_at=T0, finished_at=T0 + timedelta(seconds=3),
    )  # fmt: skip
    failed_node(conn, run_id, "b", error, resolved_inputs={"row": 7, "api_key": "hidden2"})
    return run_id


# --- what it shows -----------------------------------------------------------------------------


def test_a_failed_run_says_what_failed_and_what_it_cost(conn: engine_db.Connection) -> None:
    page = pages.opened(f"/runs/{failed_run(conn)}")
    text = pages.words(page)
    assert "failed: node b, ValueError: no price, attempt 2 of 2" in text
    assert "2 attempts, 40 s lost" in text
    assert "1/3 nodes: 1 completed, 1 failed, 1 not started" in text
    assert "1 node has not started: the list of nodes has it." in text
    assert page.count('fill="url(#hatch)" x=') == 2
    assert "wait for a worker wait for its back-off failed or died Time line" in text
    assert page.count('<rect class="warning" ') == 2, "in the legend, and in the time line"
    assert '"wish": "tea"' in text
    assert "hidden1" not in text
    assert "Retry failed nodes" in text
    assert "queue-workflows show" in page


def test_the_list_of_runs_has_how_many_nodes_ended_and_failed(conn: engine_db.Connection) -> None:
    failed_run(conn)
    factories.run(conn, definition=definition(a="", b="a"))
    page = pages.opened("/runs")
    assert "</svg> 1/3</span>, 1 failed</td>" in page
    assert "</svg> 0/2</span></td>" in page
    assert page.count('<rect class="failed" ') == 1


def test_a_failed_run_names_the_node_that_ended_it(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)
    conn.execute("UPDATE workflow_runs SET error = 'node last failed: OSError: full'")
    factories.node(
        conn, run_id, "last", status="failed", error="OSError: full", created_at=T0,
        started_at=T0 + timedelta(seconds=55), finished_at=T0 + timedelta(seconds=60),
    )  # fmt: skip
    text = pages.words(pages.opened(f"/runs/{run_id}"))
    assert "failed: node last, OSError: full 1/3 nodes" in text


def test_a_duration_has_two_units_at_most(conn: engine_db.Connection) -> None:
    took = {
        9.5: "9.5 s", 40: "40 s", 96: "1 min 36 s", 182: "3 min 02 s", 2400: "40 min",
        6780: "1 h 53 min", 86_400: "1 d", 97_200: "1 d 3 h", 1_040_000: "12 d",
    }  # fmt: skip
    for seconds in took:
        begin = T0 - timedelta(seconds=seconds)
        factories.run(conn, status="completed", started_at=begin, finished_at=T0)
    found = re.findall(r'data-label="took">([^<]*)<', pages.opened("/runs"))
    assert sorted(found) == sorted(took.values())


def test_all_nodes_that_run_are_counted(
    conn: engine_db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = factories.run(conn)
    claim = {
        "claim_no": 1, "worker_id": "w:7:x", "claimed_by": "box-1",
        "started_at": T0, "lease_expires_at": T0 + timedelta(days=1),
    }  # fmt: skip
    for name in ("a", "b", "c"):
        factories.node(conn, run_id, name, status="running", **claim)
    constants.put(monkeypatch, "service.dashboard.timeline.MOST", 2)
    assert "runs: 3 nodes on box-1" in pages.words(pages.opened(f"/runs/{run_id}"))


def test_the_commands_of_a_run_whose_id_begins_with_a_dash(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn, id="-x")
    page = pages.opened(f"/runs/{run_id}", node="b")
    assert "queue-workflows show --node b -- -x<" in page


def test_the_panel_of_a_node(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)

    async def use(browser: Browser) -> None:
        text = pages.words(await browser.open(f"/runs/{run_id}", node="b"))
        assert "ValueError: no price" in text
        assert "Traceback of ValueError: no price" in text
        assert "line 2 ValueError: no price" in text
        assert "[... 1,234 bytes cut ...]" in text
        assert "63 %" in text
        assert "2.0 GB" in text
        assert "No samples: they last a day" in text
        assert '"row": 7' in text
        assert "hidden2" not in text
        assert "Retry from here" in text
        first = pages.words(await browser.open(f"/runs/{run_id}", node="b", attempt=1))
        assert "Log of attempt 1 No log." in first
        for attempt, status in ((2, 200), (1, 404)):
            query = {"name": "log", "node": "b", "attempt": attempt}
            reply = await browser.http.get(f"/ui/runs/{run_id}/value", params=query)
            assert reply.status_code == status
            assert ("line 2 ValueError: no price\n" in reply.text) is (status == 200)
        waiting = pages.words(await browser.open(f"/runs/{run_id}", node="c"))
        assert "Not started: b failed." in waiting
        unknown = pages.words(await browser.open(f"/runs/{run_id}", 404, node="nothing"))
        assert f"run {run_id} has no node nothing" in unknown

    pages.browse(use)


def test_the_panel_has_the_record_of_a_death_and_what_the_node_streamed(
    conn: engine_db.Connection,
) -> None:
    run_id = failed_run(conn)
    (row,) = conn.execute("SELECT id FROM workflow_node_jobs WHERE node_id = 'b'").fetchall()
    for seq, part in enumerate(({"word": "tea", "password": "hidden6"}, {"big": "y" * 5000}), 1):
        factories.insert(
            conn, "job_parts", job_table="workflow_node_jobs", job_id=row["id"], claim_no=2,
            seq=seq, name=EVIL, part=part,
        )  # fmt: skip
    factories.insert(
        conn, "workflow_node_events", event_type="death", claim_no=2, run_id=run_id, node_id="b",
        job_id=row["id"], created_at=T0 + timedelta(seconds=49), error="killed by SIGKILL",
        detail={"signal": 9, "max_rss_mb": 812},
    )  # fmt: skip

    async def use(browser: Browser, sees: bool) -> None:
        page = await browser.open(f"/runs/{run_id}", node="b")
        text = pages.words(page)
        for value in ("death: killed by SIGKILL", '"max_rss_mb": 812', '"word": "tea"', "5,011"):
            assert (value in text) is sees, value
        assert "hidden6" not in page
        assert ("&lt;script&gt;" in page) is sees

    for scope, sees in (("read", True), ("look", False)):
        pages.browse(lambda browser, sees=sees: use(browser, sees), scope)


def test_the_panel_of_a_node_follows_it(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, definition=definition(a="", b="a"), definition_hash="h-live")
    over = failed_run(conn)

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}", node="b")
        assert f'hx-get="/ui/runs/{run_id}?node=b"' in page
        fragment = await browser.part(f"/runs/{run_id}", node="b")
        assert "Not queued yet" in pages.words(fragment)
        failed_node(conn, run_id, "b", "ValueError: no price")
        # A fragment is kept for a second, by its address.
        later = await browser.part(f"/runs/{run_id}", node="b", attempt=2)
        assert "line 2 ValueError: no price" in pages.words(later)
        ended = await browser.open(f"/runs/{over}", node="b")
        assert f'hx-get="/ui/runs/{over}?' not in ended

    pages.browse(use)


def test_of_many_dependencies_those_that_are_not_done_are_first(
    conn: engine_db.Connection,
) -> None:
    names = [f"n{number:02d}" for number in range(60)]
    graph = definition(**dict.fromkeys(names, ""), last=" ".join(names))
    run_id = factories.run(conn, definition=graph, definition_hash="h-many-deps")
    for name in names[:-1]:
        factories.node(conn, run_id, name, status="completed")
    factories.node(conn, run_id, "n59", queue="gpu")
    text = pages.words(pages.opened(f"/runs/{run_id}", node="last"))
    assert "completed or skipped: n59 queued n00 completed" in text


def test_why_a_node_waits_is_about_this_node(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, definition=definition(a="", b=""), definition_hash="h-why")
    factories.node(conn, run_id, "a", queue="gpu")
    factories.node(conn, run_id, "b")

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}", node="b")
        link = re.search(r'href="/ui(/runs/[^"]*/why\?[^"]*)"', page)
        assert link is not None
        text = pages.words(await browser.open(html.unescape(link[1])))
        assert "b queued" in text and "no live worker serves queue cpu" in text
        assert "queue gpu" not in text
        none = await browser.open(f"/runs/{run_id}/why", job="nothing")
        assert "No node waits for a worker." in pages.words(none)
        refused = await browser.open(f"/runs/{run_id}/why", 400, job="\0")
        assert "the URL has a NUL character" in refused and "Go to Now" in refused

    pages.browse(use)


def test_of_many_queued_nodes_the_first_are_explained(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn)
    for number in range(12):
        factories.node(conn, run_id, f"n{number:02d}")

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}/why")
        assert f"<h1>Why run {run_id} waits</h1>" in page, "it is a page without JavaScript"
        assert f"queue-workflows why {run_id}</code>" in page
        for text in (page, await browser.part(f"/runs/{run_id}/why")):
            assert text.count("no live worker serves queue cpu") == 10
            assert "n09 queued" in pages.words(text)
            assert "and 2 more nodes" in text

    pages.browse(use)


def test_the_machine_under_an_attempt(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)
    now = datetime.now(timezone.utc)
    conn.execute("UPDATE workflow_node_jobs SET started_at = now() WHERE node_id = 'b'")
    begin, end = now - timedelta(minutes=9), now - timedelta(minutes=1)
    job = factories.node(
        conn, run_id, "d", status="failed", claim_no=1, error="died", created_at=begin
    )
    given = {
        "run_id": run_id,
        "node_id": "d",
        "job_id": job["id"],
        "claim_no": 1,
        "host_label": "box-1",
    }
    for kind, at in (("claimed", begin), ("death", end), ("failed", end)):
        factories.insert(conn, "workflow_node_events", event_type=kind, created_at=at, **given)
    for minute in range(1, 8):
        sample = {
            "cpu_percent": 10 * minute,
            "ram_used_mb": 1024 * minute,
            "ram_total_mb": 65536,
            "gpus": [],
        }
        factories.insert(
            conn, "hw_samples", host_label="box-1", every_s=60, slot=minute, sample=sample,
            sampled_at=begin + timedelta(minutes=minute),
        )  # fmt: skip
    page = pages.opened(f"/runs/{run_id}", node="d")
    assert "CPU: mean 40.0, peak 70.0 of 100.0 %" in pages.words(page)
    assert "RAM: mean 4.0, peak 7.0 of 64.0 GB" in pages.words(page)
    assert page.count('class="death"') == 2


def test_the_graph_and_its_list_have_the_states(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)
    page = pages.opened(f"/runs/{run_id}", show="graph")
    assert re.findall(r'class="box is-(\w+)"', page) == ["completed", "failed", "waiting"]
    assert page.count('<path d="M168 15') == 1
    assert 'role="img"' not in page, "it has links"
    assert "<title>b: failed</title>" in page
    listed = pages.words(pages.opened(f"/runs/{run_id}", show="list"))
    assert "b ✕ failed a c ○ not started b" in listed
    lit = pages.opened(f"/runs/{run_id}", show="graph", lit="b")
    assert "Its path is marked: 2 others before and behind b" in pages.words(lit)
    assert re.findall(r'<path class="lit" d="(.*?)"', lit) == ["M168 15h56M392 15h56"]
    assert re.findall(r'<path class="lit" d="(.*?)"', page) == [""]


def test_a_wide_graph_has_a_minimap_and_fits_on_request(conn: engine_db.Connection) -> None:
    chain = {f"n{n}": f"n{n - 1}" if n else "" for n in range(12)}
    run_id = factories.run(conn, definition=definition(**chain), definition_hash="h-wide")

    async def use(browser: Browser) -> None:
        for zoom, has_minimap in ((100, True), (25, False), (0, False)):
            page = await browser.open(f"/runs/{run_id}", show="graph", zoom=zoom)
            assert ('<use href="#picture"/>' in page) is has_minimap, zoom
            assert page.count('id="picture"') == 1
            assert ('<svg width="100%"' in page) is (zoom == 0)
            part = await browser.part(f"/runs/{run_id}", show="graph", zoom=zoom)
            assert part.count('class="box') == 12

    pages.browse(use)


def test_the_boxes_of_maps_have_counts(conn: engine_db.Connection) -> None:
    page = pages.opened(f"/runs/{map_of(conn)}", show="graph")
    assert "\N{WHITE CIRCLE} cut 1580/2000" in pages.words(page)
    assert 'class="deep"' in page


def test_a_run_that_has_not_started(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, status="queued", mode="node")

    async def use(browser: Browser) -> None:
        text = pages.words(await browser.open(f"/runs/{run_id}"))
        assert "waits: no orchestrator has started it yet" in text
        assert "No node has started yet" in text
        assert "No graph yet" in pages.words(await browser.open(f"/runs/{run_id}", show="graph"))
        why = pages.words(await browser.open(f"/runs/{run_id}/why"))
        assert "No node waits for a worker." in why

    pages.browse(use)


def test_what_a_running_run_waits_for(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, definition=definition(a="", b="", c=""), definition_hash="h-3")
    for name in ("a", "b"):
        factories.node(conn, run_id, name, queue="gpu", required_model="sdxl")
    factories.node(conn, run_id, "c", status="awaiting_input", node_module="__input__x")

    async def use(browser: Browser) -> None:
        text = pages.words(await browser.open(f"/runs/{run_id}"))
        assert "waits: 3 nodes, 2 of them for a gpu worker with sdxl, 1 for an answer" in text
        assert "waits for an answer" in text
        why = pages.words(await browser.open(f"/runs/{run_id}/why"))
        assert "no live worker serves queue gpu" in why
        assert "c asks it waits for an answer" in why
        live = await browser.part(f"/runs/{run_id}")
        assert "waits: 3 nodes" in pages.words(live)
        assert "3 of its nodes wait and are cancelled, 0 run and are asked to stop." in live

    pages.browse(use)


def test_an_unknown_id_says_so_and_names_near_ones(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)
    page = pages.opened(f"/runs/{run_id[:13]}", status=404)
    assert f"no run {run_id[:13]}: it never was here, or it was deleted after its" in pages.words(
        page
    )
    assert f'href="/ui/runs/{run_id}"' in page
    for odd in ("nothing", "%00"[1:], "ü" * 300, "a b\nc"):
        pages.opened(f"/runs/{quote(odd, safe='')}", status=404)


def test_the_scope_look_sees_no_values(conn: engine_db.Connection, tmp_path: Path) -> None:
    secret = "a value that nobody sees"
    run_id = failed_run(conn, secret, out_dir=str(tmp_path))
    conn.execute("UPDATE workflow_runs SET context = jsonb_build_object('x', %s::text)", [secret])

    async def use(browser: Browser) -> None:
        for query in ({}, {"node": "b"}, {"node": "a"}, {"show": "graph"}, {"show": "list"}):
            page = await browser.open(f"/runs/{run_id}", **query)
            assert secret not in html.unescape(page), query
        assert "failed" in await browser.open(f"/runs/{run_id}")
        for below in (
            "value?name=inputs",
            "again",
            "files",
            "file?path=a",
            "value?name=log&node=b&attempt=2",
            "why",
        ):
            reply = await browser.http.get(f"/ui/runs/{run_id}/{below}")
            assert reply.status_code == 403, below

    pages.browse(use, "look")


# --- hostile and huge --------------------------------------------------------------------------


def test_ids_of_any_characters(conn: engine_db.Connection) -> None:
    ids = ["a/b", "50%", "#x", "a?b=c", "-x", "<b>", "../..", "a\nb", "\u00fc&amp;"]
    for run_id in ids:
        failed_run(conn, id=run_id)

    async def use(browser: Browser) -> None:
        for run_id in ids:
            where = f"/runs/{quote(run_id, safe='')}"
            page = await browser.open(where)
            assert "failed: node b" in pages.words(page)
            found = re.findall(r'href="(/ui/runs/[^"]*|\?node[^"]*)"', page)
            links = {html.unescape(one) for one in found}
            assert len(links) > 4
            for link in links:
                assert link.startswith((f"/ui{where}", "?node=")), link
                link = f"/ui{where}{link}" if link.startswith("?") else link
                assert (await browser.http.get(link)).status_code == 200, link
            reply = await browser.send(page, f"{where}/retry")
            assert reply.status_code == 303, reply.text

    pages.browse(use)


def test_hostile_values_in_every_column(conn: engine_db.Connection) -> None:
    value = {EVIL: EVIL, "deep": [[EVIL]]}
    run_id = failed_run(
        conn, EVIL, workflow_name=EVIL, out_dir=f"/{EVIL}", context=value, definition_hash=EVIL,
        definition={"nodes": [{"id": EVIL, "module": EVIL, "deps": [EVIL, 7]}, {"id": 3}, []]},
        parent_run_id=EVIL, parent_node_id=EVIL,
    )  # fmt: skip
    failed_node(
        conn, run_id, EVIL, EVIL, resolved_inputs=value, context_delta=value, node_module=EVIL,
        progress=value, pipeline_name=EVIL,
    )  # fmt: skip
    conn.execute("UPDATE workflow_node_events SET host_label = %s, worker_id = %s", [EVIL, EVIL])
    conn.execute(
        """UPDATE workflow_node_events SET detail = '{"used": {"ram_mb": 1e400, "vram_mb": []}}'"""
        " WHERE event_type = 'failed'"
    )
    asking = factories.node(
        conn, run_id, "ask", status="awaiting_input", node_module="__input__x",
        input_spec={"prompt": EVIL, "options": [EVIL, {"label": EVIL, "value": value}]},
    )  # fmt: skip
    factories.insert(
        conn,
        "operator_acts",
        actor=EVIL,
        action=EVIL[:100],
        kind="run",
        subject=run_id,
        reason=EVIL,
    )

    async def use(browser: Browser) -> None:
        for query in (
            {},
            {"node": EVIL},
            {"node": "ask"},
            {"node": "b"},
            {"show": "graph"},
            {"show": "list"},
        ):
            page = await browser.open(f"/runs/{run_id}", **query)
            assert "&lt;script&gt;" in page
        await browser.part(f"/runs/{run_id}")
        for below in ("why", "again"):
            await browser.open(f"/runs/{run_id}/{below}")
        await browser.open(f"/runs/{run_id}/files", 404)
        for name in (EVIL, "\0", "\ud800"):
            reply = await browser.http.get(
                f"/ui/runs/{run_id}", params={"node": name.encode("utf-8", "surrogatepass")}
            )
            assert reply.status_code in (200, 400, 404), reply.text
        for query in ({"node": EVIL}, {"node": "a", "state": EVIL}, {"node": "a", "start": EVIL}):
            reply = await browser.http.get(f"/ui/runs/{run_id}/map", params=query)
            assert reply.status_code in (404, 422)
            assert "<script>alert" not in reply.text

    pages.browse(use)
    assert asking["status"] == "awaiting_input"


def test_names_that_are_long_or_hide_something(conn: engine_db.Connection) -> None:
    names = ["\u202efdp.exe", "\u200bzero", "x" * 900, "../../etc", "a/b/c", "a[k]/b", "50%#?&"]
    entries = [{"id": name, "module": "m", "deps": []} for name in names]
    run_id = factories.run(conn, definition=definition(*entries), definition_hash="h-names")
    for name in names:
        factories.node(conn, run_id, name)

    async def use(browser: Browser) -> None:
        queries = [{}, {"show": "graph"}, {"show": "list"}, *({"node": name} for name in names)]
        for query in queries:
            page = await browser.open(f"/runs/{run_id}", **query)
            text = pages.words(page)
            assert "\u202e" not in text and "\u200b" not in text, query
            assert len(page) < 60_000, query
        page = await browser.open(f"/runs/{run_id}")
        assert "\\u202efdp.exe" in pages.words(page)
        links = {html.unescape(one) for one in re.findall(r'href="(\?node=[^"]*)"', page)}
        assert len(links) == len(names)
        for link in links:
            assert (await browser.http.get(f"/ui/runs/{run_id}{link}")).status_code == 200, link

    pages.browse(use)


def many_nodes(conn: engine_db.Connection, count: int, jobs: int | None = None) -> str:
    """Insert a run with so many nodes, of which all or the first ones have jobs that are over."""
    graph = definition(
        **{
            f"step-{n % 7}/node-{n:04d}": "" if n < 7 else f"step-{n % 7}/node-{n - 7:04d}"
            for n in range(count)
        }
    )
    run_id = factories.run(
        conn, definition=graph, definition_hash=f"many-{count}", queued_at=T0, created_at=T0
    )
    conn.execute(
        "INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status,"
        " created_at, started_at, finished_at, claim_no, context_delta)"
        " SELECT gen_random_uuid(), %s,"
        " format('step-%%s/node-%%s', n %% 7, lpad(n::text, 4, '0')), 'm', 'cpu',"
        " CASE WHEN n = 3 THEN 'failed' ELSE 'completed' END, %s, %s + n * interval '1 second',"
        " %s + n * interval '2 seconds', 1, jsonb_build_object('x', repeat('y', 1000))"
        " FROM generate_series(0, %s) n",
        [run_id, T0, T0, T0, (jobs or count) - 1],
    )
    return run_id


def test_five_hundred_nodes_fit_on_a_page(conn: engine_db.Connection) -> None:
    run_id = many_nodes(conn, 500)

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}")
        assert page.count('<th scope="row"><a href="?node=') == 500
        assert len(page) < 150_000
        assert len(zlib.compress(page.encode())) < 30_000
        graph = await browser.open(f"/runs/{run_id}", show="graph")
        assert graph.count('class="box') == 500
        assert len(graph) < 150_000
        assert len(zlib.compress(graph.encode())) < 40_000
        assert len(await browser.open(f"/runs/{run_id}", show="list")) < 150_000

    pages.browse(use)


def test_more_nodes_are_shown_by_step_and_failed_ones_alone(conn: engine_db.Connection) -> None:
    run_id = many_nodes(conn, 600)

    async def use(browser: Browser) -> None:
        text = pages.words(await browser.open(f"/runs/{run_id}"))
        assert "600 nodes: the steps, and the first nodes that failed" in text
        assert "step-1 \N{MULTIPLICATION SIGN} 86 ✓ completed" in text
        assert "step-3/node-0003 ✕ failed" in text
        graph = await browser.open(f"/runs/{run_id}", show="graph")
        assert "Steps only: the graph has 600 nodes." in graph
        assert graph.count('class="box') == 7

    pages.browse(use)


def test_a_step_in_which_nodes_have_no_job_yet_is_not_completed(
    conn: engine_db.Connection,
) -> None:
    run_id = many_nodes(conn, 600, jobs=14)
    page = pages.opened(f"/runs/{run_id}", show="graph")
    for step, state in (("step-1", "waiting"), ("step-3", "failed")):
        assert f"<title>{step}: {state}</title>" in page
    assert "\N{WHITE CIRCLE} step-1 2/86" in pages.words(page)


def test_a_node_inside_of_a_box_lights_the_box(conn: engine_db.Connection) -> None:
    large, mapped = many_nodes(conn, 600), map_of(conn)

    async def use(browser: Browser) -> None:
        for run_id, node, box in (
            (large, "step-1/node-0001", "step-1"), (mapped, "cut[clip-7]/encode", "cut"),
        ):  # fmt: skip
            page = await browser.open(f"/runs/{run_id}", show="graph", lit=node)
            assert f"Its path is marked: 0 others before and behind {box}" in pages.words(page)
            assert (f'{run_id}?node={box}">' in page) is (box == "cut")
        nothing = await browser.open(f"/runs/{mapped}", show="graph", lit="nothing")
        assert "The graph has no node nothing." in pages.words(nothing)

    pages.browse(use)


def test_of_many_steps_the_first_are_shown(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, queued_at=T0, created_at=T0)
    conn.execute(
        "INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status,"
        " created_at, started_at, finished_at, claim_no, context_delta)"
        " SELECT gen_random_uuid(), %(run)s, format('step%%s', n), 'm', 'cpu', 'completed',"
        " %(at)s, %(at)s + n * interval '1 second', %(at)s + n * interval '2 seconds', 1, '{}'"
        " FROM generate_series(0, 599) n",
        {"run": run_id, "at": T0},
    )
    page = pages.opened(f"/runs/{run_id}")
    assert "600/600 nodes: 600 completed" in pages.words(page)
    assert "600 nodes: the first steps, and" in pages.words(page)
    assert page.count('<tr><th scope="row">') == 250
    assert "step249 " in pages.words(page)


def test_attempts_beyond_the_newest_events_are_not_there_silently(
    conn: engine_db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = failed_run(conn)
    assert "older ones are not shown" not in pages.words(pages.opened(f"/runs/{run_id}"))
    constants.put(monkeypatch, "service.dashboard.run_page.EVENTS", 2)
    assert "older ones are not shown" in pages.words(pages.opened(f"/runs/{run_id}"))
    text = pages.words(pages.opened(f"/runs/{run_id}", node="b"))
    assert "The newest ones; older ones are not shown." in text


def test_a_large_value_is_a_download_without_what_is_redacted(conn: engine_db.Connection) -> None:
    import random

    big = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=600_000))
    run_id = failed_run(conn, context={"big": big, "token": "hidden3"})
    conn.execute(
        "UPDATE workflow_node_jobs SET resolved_inputs ="
        " jsonb_build_object('big', %s::text, 'secret', 'hidden4') WHERE node_id = 'b'",
        [big],
    )

    async def use(browser: Browser) -> None:
        for query in ({}, {"node": "b"}):
            page = await browser.open(f"/runs/{run_id}", **query)
            assert len(page) < 100_000
            assert big[:1000] not in page
        for query in ({"name": "inputs"}, {"name": "inputs", "node": "b"}):
            reply = await browser.http.get(f"/ui/runs/{run_id}/value", params=query)
            assert reply.headers["content-disposition"].startswith("attachment")
            assert json.loads(reply.text)["big"] == big
            assert "hidden" not in reply.text
        for where in ("/runs/nothing", f"/runs/{run_id}"):
            await browser.open(f"{where}/value", 404, name="inputs", node="nothing")
        await browser.open("/runs/nothing/value", 404, name="inputs")

    pages.browse(use)


def test_a_value_that_is_small_only_as_stored_is_not_rendered(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)
    value = "jsonb_build_object('big', repeat('y', 2000000))"  # 23 kB as stored
    conn.execute(f"UPDATE workflow_runs SET context = {value}")
    conn.execute(f"UPDATE workflow_node_jobs SET resolved_inputs = {value} WHERE node_id = 'b'")

    async def use(browser: Browser) -> None:
        for query in ({}, {"node": "b"}):
            text = pages.words(await browser.open(f"/runs/{run_id}", **query))
            assert "Download" in text
            assert "characters" not in text

    pages.browse(use)


def test_the_redactor_of_an_app_runs_outside_of_transactions(
    conn: engine_db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, asking = failed_run(conn), factories.run(conn)
    factories.node(
        conn, asking, "ask", status="awaiting_input", node_module="__input__choose_one",
        input_spec={"widget": "choose_one", "options": ["tea"]},
    )  # fmt: skip
    read_only, inside = engine_db.read_only, set[int]()
    found: list[bool] = []

    @contextlib.contextmanager
    def noted() -> Generator[engine_db.Connection]:
        with read_only() as own:
            inside.add(threading.get_ident())
            try:
                yield own
            finally:
                inside.discard(threading.get_ident())

    def redactor(value: Any) -> Any:
        found.append(threading.get_ident() in inside)
        return value

    monkeypatch.setattr(engine_db, "read_only", noted)
    monkeypatch.setattr(queue_workflows.get_config(), "redactor", redactor)

    async def use(browser: Browser) -> None:
        for path in (
            f"/runs/{run_id}", f"/runs/{run_id}?node=b", "/inbox", "/runs?input=wish%3D1",
            f"/runs/{run_id}/value?name=log&node=b&attempt=2",
            f"/inbox/question?run={asking}&node=ask",
        ):  # fmt: skip
            found.clear()
            await browser.open(path)
            assert set(found) == {False}, path

    pages.browse(use)


# --- maps --------------------------------------------------------------------------------------


def map_of(conn: engine_db.Connection, total: int = 2000) -> str:
    """Insert a run with a map of which every hundredth item failed and the last fifth waits."""
    entry = {
        "id": "cut",
        "module": "__map__",
        "deps": [],
        "map": {
            "body": [
                {"id": "encode", "module": "m", "deps": []},
                {"id": "upload", "module": "m", "deps": ["encode"]},
            ]
        },
    }
    run_id = factories.run(conn, definition=definition(entry), definition_hash=f"map-{total}")
    factories.node(conn, run_id, "cut", node_module="__map__", blocked_reason="items")
    opened_items, failed = total * 8 // 10, total // 100
    factories.insert(
        conn, "workflow_run_maps", run_id=run_id, node_id="cut", generation=0, at_once=10, refill=1,
        may_fail=total, total=total, done_items=opened_items - failed, failed_items=failed,
        open_items=0, next_position=opened_items, nodes=total,
    )  # fmt: skip
    conn.execute(
        "INSERT INTO workflow_map_items (run_id, map_id, position, key, item, state, error)"
        " SELECT %(run)s, 'cut', n, format('clip-%%s', n), to_jsonb(n),"
        " CASE WHEN n >= %(opened)s THEN 'waiting'"
        " WHEN n < 80 * %(failed)s AND n %% 80 = 7 THEN 'failed' ELSE 'done' END,"
        " CASE WHEN n < 80 * %(failed)s AND n %% 80 = 7 THEN format('row %%s has no price', n) END"
        " FROM generate_series(0, %(last)s) n",
        {"run": run_id, "opened": opened_items, "failed": failed, "last": total - 1},
    )
    return run_id


def test_the_items_of_a_map(conn: engine_db.Connection) -> None:
    run_id = map_of(conn)
    factories.node(conn, run_id, "cut[clip-7]/encode", status="failed", error="x")

    async def use(browser: Browser) -> None:
        assert "0/2000" not in await browser.open(f"/runs/{run_id}")
        page = await browser.open(f"/runs/{run_id}/map", node="cut")
        text = pages.words(page)
        assert "done 1,580 | failed 20 | running 0 | waiting 400" in text
        assert "20 \N{MULTIPLICATION SIGN} row # has no price" in text
        assert "7 clip-7 failed row 7 has no price" in text
        assert "clip-8 " not in text
        assert len(re.findall(r'<rect class="is-failed"', page)) == 20
        assert len(page) < 60_000
        group = re.search(r'href="([^"]*error=[^"]*)"', page)
        assert group is not None
        found = await browser.http.get(html.unescape(group[1]))
        assert pages.words(found.text).count("has no price") >= 20
        done = await browser.open(f"/runs/{run_id}/map", node="cut", state="done")
        following = re.search(r'rel="next" href="([^"]*)"', done)
        assert following is not None
        second = await browser.http.get(html.unescape(following[1]))
        assert "clip-52 " in pages.words(second.text)
        keyed = pages.words(
            await browser.open(f"/runs/{run_id}/map", node="cut", state="all", q="-1999")
        )
        assert "clip-1999 waiting" in keyed
        nothing = pages.words(
            await browser.open(f"/runs/{run_id}/map", node="cut", q="no such key")
        )
        assert "No item matches" in nothing
        item = pages.words(await browser.open(f"/runs/{run_id}/map", node="cut", key="clip-7"))
        assert "row 7 has no price" in item
        assert "cut[clip-7]/encode failed" in item
        await browser.open(f"/runs/{run_id}/map", 404, node="gone")

    pages.browse(use)


def test_a_node_of_an_item_names_the_nodes_of_the_item_that_it_waits_for(
    conn: engine_db.Connection,
) -> None:
    run_id = map_of(conn)

    async def use(browser: Browser) -> None:
        text = pages.words(await browser.open(f"/runs/{run_id}", node="cut[clip-1999]/upload"))
        assert "Not queued yet" in text
        assert "cut[clip-1999]/encode waiting" in text
        assert "Its item also has to be open" in text
        await browser.open(f"/runs/{run_id}", 404, node="cut[no-such-key]/upload")

    pages.browse(use)


def test_no_item_is_open_in_a_run_that_is_over(conn: engine_db.Connection) -> None:
    run_id = map_of(conn)
    conn.execute("UPDATE workflow_run_maps SET next_position = 2000, open_items = 400")

    async def use(browser: Browser) -> None:
        query = {"node": "cut", "state": "all", "start": 1990}
        text = pages.words(await browser.open(f"/runs/{run_id}/map", **query))
        assert "running 400 | waiting 0" in text and "clip-1999 running" in text
        conn.execute("UPDATE workflow_runs SET status = 'cancelled', finished_at = now()")
        text = pages.words(await browser.open(f"/runs/{run_id}/map", **query))
        assert "running 0 | waiting 400" in text and "clip-1999 waiting" in text
        assert "cut 1,580 20 0 2,000" in pages.words(await browser.open(f"/runs/{run_id}"))

    pages.browse(use)


def test_a_map_whose_errors_all_differ_has_its_whole_strip(conn: engine_db.Connection) -> None:
    run_id = map_of(conn, 22_000)
    # Letters alone: numbers do not make an error another one.
    conn.execute(
        "UPDATE workflow_map_items SET state = 'done', error = NULL WHERE position >= 21000"
    )
    conn.execute(
        "UPDATE workflow_map_items SET state = 'failed',"
        " error = translate(md5(position::text), '0123456789', 'ghijklmnop') WHERE position < 21000"
    )
    conn.execute("UPDATE workflow_run_maps SET failed_items = 21000, done_items = 1000")
    page = pages.opened(f"/runs/{run_id}/map", node="cut")
    assert len(re.findall(r'<rect class="is-done"', page)) == 2
    text = pages.words(page)
    assert "and 9,950 more kinds of errors" in text
    assert "Of the first 10,000 failed items." in text


def test_the_address_of_items_with_an_error_shows_nothing_that_is_redacted(
    conn: engine_db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = map_of(conn)
    conn.execute("UPDATE workflow_map_items SET error = 'no price of Smith' WHERE error > ''")
    monkeypatch.setattr(queue_workflows.get_config(), "redactor", None)
    queue_workflows.set_redactor(lambda value: str(value).replace("Smith", "N"))
    page = pages.opened(f"/runs/{run_id}/map", node="cut")
    assert "20 \N{MULTIPLICATION SIGN} no price of N" in pages.words(page)
    assert "Smith" not in page


def test_the_scope_look_cannot_guess_errors_of_items(conn: engine_db.Connection) -> None:
    run_id = map_of(conn)
    page = pages.opened(
        f"/runs/{run_id}/map", scope="look", node="cut", state="failed", error="row # nothing"
    )
    assert "has no price" not in page
    assert "clip-7" in page


# --- outputs -----------------------------------------------------------------------------------


@pytest.fixture
def out(
    conn: engine_db.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """A run with files below a folder of OUT_ROOTS; its id and its folder."""
    root = tmp_path / "root"
    folder = root / "run"
    (folder / "a").mkdir(parents=True)
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUT_ROOTS", str(root))
    (folder / "a" / "x.png").write_bytes(b"\x89PNG\r\n")
    (folder / "a" / "x.svg").write_text("<svg onload='alert(1)'/>")
    (folder / "a" / "x.html").write_text("<script>alert(1)</script>")
    with (folder / "big.png").open("wb") as file:
        file.truncate(10 * 1024 * 1024 + 1)
    (folder / "t.csv").write_text("name,price\n" + "".join(f"row {n},{n}\n" for n in range(300)))
    (folder / "t.json").write_text(json.dumps({"a": EVIL}))
    (folder / "b.bin").write_bytes(bytes(200_000))
    (folder / EVIL.replace("/", "")).write_text("x")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("the key")
    (folder / "link").symlink_to(secret)
    (folder / "key.txt").symlink_to(secret / "key.txt")
    os.mkfifo(folder / "pipe.txt")
    return failed_run(conn, out_dir=str(folder)), folder


def test_files_are_listed_shown_and_downloaded(out: tuple[str, Path]) -> None:
    run_id, _ = out

    async def use(browser: Browser) -> None:
        where = f"/runs/{run_id}/files"
        page = await browser.open(where)
        assert "t.csv" in page
        assert "link" not in re.findall(r">(\w+)/?</a>", page)
        assert "key.txt" not in page
        assert "pipe.txt" not in page
        table = await browser.open(where, path="t.csv")
        assert "row 99" in table
        assert "row 100" not in table
        assert "&lt;script&gt;" in await browser.open(where, path="t.json")
        image = await browser.open(where, path="a/x.png")
        source = re.search(r'<img class="output" src="([^"]*)"', image)
        assert source is not None
        reply = await browser.http.get(html.unescape(source[1]))
        assert reply.headers["content-type"] == "image/png"
        assert "content-disposition" not in reply.headers
        for name in ("a/x.svg", "a/x.html"):
            assert "not shown here" in await browser.open(where, path=name)
        for name in ("a/x.svg", "a/x.html", "b.bin"):
            for inline in ("0", "1"):
                reply = await browser.http.get(
                    f"/ui/runs/{run_id}/file", params={"path": name, "inline": inline}
                )
                assert reply.headers["content-type"] == "application/octet-stream"
                assert reply.headers["content-disposition"].startswith("attachment")
                assert reply.headers["x-content-type-options"] == "nosniff"
        assert len(reply.content) == 200_000
        for query in ({"path": "a/x.png"}, {"path": "big.png", "inline": "1"}):
            reply = await browser.http.get(f"/ui/runs/{run_id}/file", params=query)
            assert reply.headers["content-disposition"].startswith("attachment"), query

    pages.browse(use)


def test_a_file_that_is_not_shown_whole_says_so(out: tuple[str, Path]) -> None:
    run_id, folder = out
    (folder / "few.csv").write_text("name,price\ntea,7\n")
    # The part that is read ends behind `123` of the tenth row.
    (folder / "long.csv").write_text("name,price\n" + f"{'y' * 6544},1234567\n" * 20)

    async def use(browser: Browser) -> None:
        where = f"/runs/{run_id}/files"
        few = await browser.open(where, path="few.csv")
        assert "<td>7</td>" in few and "the file has more" not in few
        long = await browser.open(where, path="long.csv")
        assert re.findall(r"<td>(\d+)</td>", long) == ["1234567"] * 9
        for page in (long, await browser.open(where, path="t.csv")):
            assert "The first 100 rows and 50 columns at most; the file has more." in page
        image = await browser.open(where, path="big.png")
        assert "Images above 10 MB are not shown here." in image and "<img" not in image

    pages.browse(use)


def test_a_folder_of_too_many_entries_says_so(out: tuple[str, Path]) -> None:
    run_id, folder = out
    many = folder / "many"
    many.mkdir()
    for number in range(1001):
        (many / f"{number}").symlink_to("nothing")
    text = pages.words(pages.opened(f"/runs/{run_id}/files", path="many"))
    assert "The folder has more than 1,000 entries" in text


def test_nothing_outside_is_read(out: tuple[str, Path]) -> None:
    run_id, _ = out
    paths = ["../../secret/key.txt", "link/key.txt", "key.txt", "link", "pipe.txt", "/etc/passwd"]
    paths += ["a/../../x", "t.csv/x", "", "no such", "a" * 300, "a/" * 2000]

    async def use(browser: Browser) -> None:
        for path in paths:
            for below in ("file", "files") if path else ("file",):
                where = f"/ui/runs/{run_id}/{below}"
                reply = await browser.http.get(where, params={"path": path})
                assert reply.status_code in (404, 414, 422), (path, below, reply.text)
                assert "the key" not in reply.text

    pages.browse(use)


def test_a_folder_that_a_link_replaces(out: tuple[str, Path], tmp_path: Path) -> None:
    run_id, folder = out
    folder.rename(folder.with_name("old"))
    folder.symlink_to(tmp_path / "secret")
    text = pages.words(pages.opened(f"/runs/{run_id}/files", status=404))
    assert "the key" not in text


def test_without_roots_only_the_folder_of_the_engine_is_shown(
    conn: engine_db.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", str(tmp_path / "outputs"))
    inside = tmp_path / "outputs" / "r1"
    inside.mkdir(parents=True)
    (inside / "x.txt").write_text("hello")
    good = failed_run(conn, out_dir=str(inside))
    bad = failed_run(conn, out_dir="/etc")

    async def use(browser: Browser) -> None:
        assert "hello" in await browser.open(f"/runs/{good}/files", path="x.txt")
        text = pages.words(await browser.open(f"/runs/{bad}/files", 404))
        assert "set OUT_ROOTS to a folder around it" in text
        await browser.open(f"/runs/{bad}/file", 404, path="passwd")

    pages.browse(use)


# --- actions -----------------------------------------------------------------------------------


def test_cancel_and_retry_name_who_did_it(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, definition=definition(a=""), definition_hash="h-1")
    factories.node(conn, run_id, "a")

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}")
        assert "1 of its nodes wait and are cancelled, 0 run and are asked to stop." in pages.words(
            page
        )
        reply = await browser.send(page, f"/runs/{run_id}/cancel", reason="wrong inputs")
        assert reply.status_code == 303
        after = (await browser.http.get(reply.headers["location"])).text
        assert "The run is cancelled." in after
        assert "cancel by ann: wrong inputs" in pages.words(after)
        again = await browser.send(page, f"/runs/{run_id}/cancel")
        assert again.status_code == 303
        reply = await browser.send(after, f"/runs/{run_id}/retry")
        assert reply.status_code == 303

    pages.browse(use)
    assert [act["action"] for act in acts.list(subject=run_id)] == ["retry", "cancel"]
    found = runs.get(run_id)
    assert found is not None
    assert found["status"] == "queued"


def test_a_cancel_names_the_child_runs_that_are_not_over(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn)
    for status in ("completed", "failed", "running"):
        factories.run(conn, parent_run_id=run_id, parent_node_id="c", status=status)

    async def use(browser: Browser) -> None:
        text = pages.words(await browser.open(f"/runs/{run_id}"))
        assert "0 run and are asked to stop, 1 child run too." in text
        for _ in range(20):
            factories.run(conn, parent_run_id=run_id, parent_node_id="c")
        text = pages.words(await browser.open(f"/runs/{run_id}"))
        assert "are asked to stop, the child runs that are not over too." in text

    pages.browse(use)


def test_retry_from_a_node_and_refusals(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn)

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}", node="b")
        reply = await browser.send(page, f"/runs/{run_id}/retry", node="nothing")
        assert reply.status_code in (404, 422)
        assert "has no node" in pages.words(reply.text)
        page = await browser.open(f"/runs/{run_id}", node="b")
        assert (await browser.send(page, f"/runs/{run_id}/retry")).status_code == 303
        assert flow.status(run_id) == "queued"
        looks = await browser.open(f"/runs/{run_id}", node="b")
        assert "Retry from here" not in looks

    pages.browse(use)


def test_a_node_that_asks_leads_to_its_question(conn: engine_db.Connection) -> None:
    run_id = factories.run(conn, definition=definition(ask=""), definition_hash="h-ask")
    factories.node(
        conn, run_id, "ask", status="awaiting_input", node_module="__input__choose_one",
        inputs={"target": "answer"},
        input_spec={"widget": "choose_one", "prompt": "Which?", "options": ["tea", "coffee"]},
    )  # fmt: skip

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/runs/{run_id}", node="ask")
        assert "Which?" in page
        link = re.search(r'href="/ui(/inbox/question[^"]*)"', page)
        assert link is not None
        question = await browser.open(html.unescape(link[1]))
        sent = await browser.send(question, "/inbox/answer", choice="0")
        assert sent.status_code == 303

    pages.browse(use)
    (row,) = conn.execute("SELECT value FROM workflow_input_submissions").fetchall()
    assert row["value"] == "tea"


def test_run_again_with_changed_inputs(conn: engine_db.Connection) -> None:
    run_id = failed_run(conn, context={"wish": "tea"})
    hidden = failed_run(conn, context={"password": "hidden5"}, definition_hash="h-2")
    large = failed_run(conn, context={"text": "y" * 100_000}, definition_hash="h-2")

    async def use(browser: Browser) -> str:
        page = await browser.open(f"/runs/{run_id}/again")
        assert "&#34;wish&#34;: &#34;tea&#34;" in page
        for bad in ("[1]", "nothing", ""):
            reply = await browser.send(page, f"/runs/{run_id}/again", inputs=bad)
            assert reply.status_code == 422
            shown = f"This is what you typed: {bad} Go to Now"
            assert (shown in pages.words(reply.text)) == (bad != ""), "it is not lost"
            page = await browser.open(f"/runs/{run_id}/again")
        reply = await browser.send(page, f"/runs/{run_id}/again", inputs='{"wish": "coffee"}')
        assert reply.status_code == 303, reply.text
        after = (await browser.http.get(reply.headers["location"])).text
        assert f"of run {run_id}" in pages.words(after)
        assert "hidden5" not in await browser.open(f"/runs/{hidden}/again")
        assert len(await browser.open(f"/runs/{large}/again")) < 20_000
        return reply.headers["location"].split("/runs/")[1].split("?")[0]

    made = runs.get(pages.browse(use))
    assert made is not None
    assert (made["workflow_name"], made["context"]) == ("w", {"wish": "coffee"})


def test_a_page_takes_six_statements_at_most(
    conn: engine_db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page reads on one connection, whose statements are counted."""
    run_id, mapped, large = failed_run(conn), map_of(conn), many_nodes(conn, 600)
    counts: list[int] = []
    read_only = engine_db.read_only

    @contextlib.contextmanager
    def counted() -> Generator[engine_db.Connection]:
        with read_only() as own:
            factory, counter = own.cursor_factory, counting_cursor.Counter(own)
            try:
                yield own
            finally:
                own.cursor_factory = factory
                counts.append(counter.statements)

    monkeypatch.setattr(engine_db, "read_only", counted)

    async def use(browser: Browser) -> None:
        for below, query in (
            (run_id, {}), (run_id, {"show": "graph", "lit": "b"}), (run_id, {"node": "b"}),
            (run_id, {"node": "c"}), (large, {}), (large, {"show": "graph"}),
            (f"{mapped}/map", {"node": "cut"}), (f"{mapped}/map", {"node": "cut", "key": "clip-7"}),
        ):  # fmt: skip
            await browser.open(f"/runs/{below}", **query)
            assert 1 < counts[-1] <= 6, (below, query)

    pages.browse(use)
