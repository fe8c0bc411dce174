"""The dashboard: sessions, forms, headers, and what its pages show, without JavaScript."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import secrets
import shutil
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import acts, db, history, runs
from tests.support import asgi_service, constants, factories, http_service, tabled, wait
from tests.support.dashboard import TOKENS, Browser, Page, inner_scripts, path_of, visited

HOSTILE = (
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "a/b%2F?c#d", "..", "{{ 7*7 }}",
    "line\nbreak\ttab", "\u202egnp.exe", "'; DROP TABLE workflow_runs; --", "x" * 300,
    "\x1b[31mred", "javascript:alert(1)", "caf\u00e9 \U0001f600",
)  # fmt: skip
BEARER = http_service.bearer(TOKENS["read"])


@pytest.fixture(autouse=True)
def _app(db: Any) -> None:
    queue_workflows.configure(ingest_queues={"load"})
    queue_workflows.register_ingest_task("t", lambda args: None)


def cookie_of(browser: Browser) -> tuple[str, str]:
    (found,) = [c for c in browser.http.cookies.jar if re.fullmatch(r".*_[0-9a-f]{8}", c.name)]
    return found.name, str(found.value)


# --- sessions ----------------------------------------------------------------------------------


def test_without_a_session_every_page_leads_to_the_login_and_back() -> None:
    async def use(browser: Browser) -> None:
        page = await browser.open("/runs?status=failed", follow=False)
        assert (page.status, page.response.headers["location"]) == (
            303, "/ui/login?next=%2Fruns%3Fstatus%3Dfailed",
        )  # fmt: skip
        page = await browser.open("/runs?status=failed")
        page = await browser.send(page.form("/login"), {"token": TOKENS["read"], "name": "ann"})
        assert str(page.response.url).endswith("/ui/runs?status=failed")
        assert page.status == 200

    visited(use, scope=None)


def test_a_login_leads_nowhere_else() -> None:
    async def use(browser: Browser) -> None:
        for there, expected in (
            ("//evil.example/", "/ui//evil.example/"), ("https://evil.example", "/ui/"),
            ("/\\evil.example", "/ui/"), ("x\r\ny: z", "/ui/"), ("/../other", "/ui/"),
            ("/runs/%2E./%2e%2e/other", "/ui/"), ("/runs?text=/../a", "/ui/runs?text=/../a"),
        ):  # fmt: skip
            with tabled.case(there):
                page = await browser.open("/login")
                values = {"token": TOKENS["read"], "name": "ann", "next": there}
                page = await browser.send(page.form("/login"), values, follow=False)
                assert page.response.headers["location"] == expected

    visited(use, scope=None)


def test_a_login_leads_back_to_a_page_of_any_id() -> None:
    async def use(browser: Browser) -> None:
        page = await browser.open("/runs/a%2Fcaf%C3%A9?node=s%2Fa")
        assert page.status == 200, "the login"
        values = {"token": TOKENS["read"], "name": "ann"}
        page = await browser.send(page.form("/login"), values, follow=False)
        assert page.response.headers["location"] == "/ui/runs/a%2Fcaf%C3%A9?node=s%2Fa"

    visited(use, scope=None)


@pytest.mark.parametrize(("proxy", "secure"), [(False, False), (True, True)])
def test_the_cookie_is_for_the_pages_alone(proxy: bool, secure: bool) -> None:
    async def use(browser: Browser) -> None:
        page = await browser.open("/login")
        values = {"token": TOKENS["operate"], "name": "ann"}
        page = await browser.send(page.form("/login"), values, follow=False)
        (header,) = page.response.headers.get_list("set-cookie")
        parts = {part.strip().lower() for part in header.split(";")[1:]}
        assert {"httponly", "samesite=lax", "path=/ui", "max-age=604800"} <= parts
        assert ("secure" in parts) is secure
        assert TOKENS["operate"] not in header

    visited(use, scope=None, app_behind_proxy=proxy)


def test_a_session_survives_a_restart_and_ends_with_its_token() -> None:
    async def login(browser: Browser) -> tuple[str, str]:
        return cookie_of(browser)

    name, value = visited(login)

    async def again(browser: Browser) -> int:
        for each in (name, cookie_name(browser)):
            browser.http.cookies.set(each, value, domain="localhost.local", path="/ui")
        return (await browser.open("/", follow=False)).status

    def cookie_name(browser: Browser) -> str:
        return browser.app.routes[-1].app.state.sessions.cookie

    assert visited(again, scope=None) == 200
    assert visited(again, scope=None, token="another-token-of-the-tests") == 303


def test_a_session_ends_after_seven_days(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(browser: Browser) -> None:
        assert (await browser.open("/", follow=False)).status == 200
        constants.put(monkeypatch, "service.dashboard.session.LASTS_S", 0)
        assert (await browser.open("/", follow=False)).status == 303

    visited(use)


def test_a_changed_cookie_opens_nothing() -> None:
    async def use(browser: Browser) -> None:
        name, value = cookie_of(browser)
        text, _, signature = value.partition(".")
        for other in (
            f"{text}x.{signature}", f"{text}.{signature[:-1]}{'10'[signature[-1] == '1']}", text,
            "", "a.b.c", f".{signature}",
        ):  # fmt: skip
            browser.http.cookies.clear()
            page = await browser.open("/", follow=False, headers={"cookie": f"{name}={other}"})
            assert page.status == 303, other

    visited(use, scope="look")


def test_a_token_is_no_session_and_a_session_is_no_token() -> None:
    async def use(browser: Browser) -> None:
        assert (await browser.http.get("/api/v1/jobs")).status_code == 401
        browser.http.cookies.clear()
        header = {"authorization": f"Bearer {TOKENS['operate']}"}
        assert (await browser.open("/", follow=False, headers=header)).status == 303

    visited(use)


def test_after_five_wrong_tokens_an_address_has_to_wait() -> None:
    async def use(browser: Browser) -> list[int]:
        found: list[int] = []
        for token in [*("wrong-token-of-the-tests",) * 5, TOKENS["operate"]]:
            page = await browser.open("/login")
            page = await browser.send(page.form("/login"), {"token": token, "name": "ann"})
            found.append(page.status)
        return found

    assert visited(use, scope=None) == [403] * 5 + [429]


def test_a_name_is_needed_unless_a_proxy_gives_it(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def nameless(browser: Browser) -> int:
        page = await browser.open("/login")
        return (await browser.send(page.form("/login"), {"token": TOKENS["operate"]})).status

    async def use(browser: Browser) -> None:
        browser.http.headers["x-user"] = "bob"
        page = await browser.open("/login")
        assert "name" not in page.form("/login").names
        await browser.send(page.form("/login"), {"token": TOKENS["operate"]})
        await cancelled(browser, run_id)

    async def without(browser: Browser) -> None:
        browser.http.headers["x-user"] = ""
        page = await browser.open("/login")
        values = {"token": TOKENS["operate"], "name": "eve"}
        assert (await browser.send(page.form("/login"), values)).status == 200
        assert "name" in page.form("/login").names, "a proxy that knows nobody"

    assert visited(nameless, scope=None) == 422
    visited(without, scope=None, app_user_header="X-User")
    visited(use, scope=None, app_user_header="X-User")
    assert [act["actor"] for act in acts.list()] == ["bob"]


def test_a_link_opens_one_session() -> None:
    async def use(browser: Browser) -> None:
        word = browser.app.state.link()
        for expected in (200, 403):
            browser.http.cookies.clear()
            page = await browser.open(f"/login?link={word}")
            assert "token" not in page.form("/login").names
            page = await browser.send(page.form("/login"), {"name": "ann"})
            assert page.status == expected
        assert (await browser.open("/", follow=False)).status == 303

    visited(use, scope=None)


def test_a_link_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "service.dashboard.session.LINK_S", 0.0)

    async def use(browser: Browser) -> int:
        page = await browser.open(f"/login?link={browser.app.state.link()}")
        return (await browser.send(page.form("/login"), {"name": "ann"})).status

    assert visited(use, scope=None) == 403


def test_logging_out_ends_the_session_of_the_browser() -> None:
    async def use(browser: Browser) -> None:
        page = await browser.open()
        page = await browser.send(page.form("/logout"))
        assert path_of(str(page.response.url)) == "/ui/login"
        assert (await browser.open("/", follow=False)).status == 303

    visited(use)


# --- forms -------------------------------------------------------------------------------------


async def question(browser: Browser, *ids: str, verb: str = "cancel") -> Page:
    """Choose runs of the list, and go to the question about them."""
    page = await browser.open("/runs")
    return await browser.send(page.form("/runs/chosen"), {"id": [*ids], "verb": verb})


async def cancelled(browser: Browser, *ids: str) -> Page:
    page = await question(browser, *ids)
    return await browser.send(page.form("/runs/cancel"))


def status_of(run_id: str) -> str:
    row = runs.get(run_id)
    assert row is not None
    return row["status"]


def test_a_repeated_form_does_nothing_twice(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> None:
        page = await question(browser, run_id)
        form = page.form("/runs/cancel")
        first = await browser.send(form, follow=False)
        conn.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", [run_id])
        again = await browser.send(form, follow=False)
        assert again.response.headers["location"] == first.response.headers["location"]

    visited(use)
    assert status_of(run_id) == "queued"
    assert len(acts.list()) == 1


def test_the_forms_of_a_session_crowd_out_none_of_others(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "service.dashboard.forms.KEPT", 2)
    run_id = factories.run(conn)

    async def use(browser: Browser) -> None:
        form = (await question(browser, run_id)).form("/runs/cancel")
        first = await browser.send(form, follow=False)
        name, value = cookie_of(browser)
        browser.http.cookies.clear()
        page = await browser.login("look", "eve")
        for _ in range(3):
            page = await browser.send(page.form("/zone"), {"zone": "UTC"})
            assert "Times are shown in UTC." in page.text
        browser.http.cookies.clear()
        conn.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", [run_id])
        again = await browser.send(form, follow=False, headers={"cookie": f"{name}={value}"})
        assert again.response.headers["location"] == first.response.headers["location"]

    visited(use)
    assert status_of(run_id) == "queued"


def test_the_id_of_a_form_adds_no_header(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> None:
        form = (await question(browser, run_id)).form("/runs/cancel")
        own = {"form": f"{dict(form.fields)['form']}\r\nx: y"}
        for _ in range(2):
            page = await browser.send(form, own, follow=False)
            assert page.status == 303
            assert "\r" not in page.response.headers["location"]

    visited(use)


def test_an_act_has_the_name_the_way_and_the_reason(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> Page:
        page = await question(browser, run_id)
        return await browser.send(page.form("/runs/cancel"), {"reason": "wrong input"})

    page = visited(use)
    assert "1 cancelled" in page.text
    (act,) = acts.list()
    found = act["actor"], act["via"], act["action"], act["subject"], act["reason"]
    assert found == ("ann", "http", "cancel", run_id, "wrong input")


@pytest.mark.parametrize(
    ("values", "headers", "status"),
    [
        ({"csrf": ""}, {}, 403),
        ({"csrf": "0" * 64}, {}, 403),
        ({"form": "0badword-1-0"}, {}, 409),
        ({"selection": "e30.00"}, {}, 403),
        ({}, {"origin": "https://evil.example"}, 403),
        ({}, {"sec-fetch-site": "cross-site"}, 403),
        ({}, {"sec-fetch-site": "same-site"}, 403),
        ({}, {"origin": "null", "sec-fetch-site": "none"}, 403),
        ({}, {"content-type": "text/plain"}, 415),
        ({}, {"content-type": "application/json"}, 415),
    ],
)
def test_a_form_that_is_not_ours_changes_nothing(
    conn: psycopg.Connection[Any], values: Any, headers: Any, status: int
) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> int:
        page = await question(browser, run_id)
        form = page.form("/runs/cancel")
        return (await browser.send(form, values, headers=headers, follow=False)).status

    assert visited(use) == status
    assert status_of(run_id) == "running"


def test_a_refused_origin_has_the_setting_that_names_our_own(
    conn: psycopg.Connection[Any],
) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> str:
        form = (await question(browser, run_id)).form("/runs/cancel")
        headers = {"origin": "https://evil.example"}
        return (await browser.send(form, headers=headers, follow=False)).text

    assert "Origin 'https://evil.example' is another site; APP_ALLOWED_HOSTS names" in visited(use)


@pytest.mark.parametrize(
    ("charset", "text"), [("unicode_escape", r"\ud800"), ("utf-7", "+2AA-"), ("undefined", "x")]
)
def test_a_form_that_is_no_unicode_is_refused(
    conn: psycopg.Connection[Any], charset: str, text: str
) -> None:
    """A form in parts names the character set of its fields."""
    run_id = factories.run(conn)

    async def use(browser: Browser) -> None:
        fields = dict((await question(browser, run_id)).form("/runs/cancel").fields)
        for path, given in (
            ("/login", {"token": text, "name": "ann"}),
            ("/runs/cancel", fields | {"reason": text, "inputs": text}),
        ):  # fmt: skip
            parts = [
                f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{each}\r\n'
                for name, each in given.items()
            ]
            kind = f"multipart/form-data; boundary=x; charset={charset}"
            content = "".join([*parts, "--x--\r\n"]).encode()
            reply = await browser.http.post(
                f"/ui{path}", content=content, headers={"content-type": kind}
            )
            assert reply.status_code == 400, path
            assert "cannot be stored" in reply.text

    visited(use)
    assert status_of(run_id) == "running"


def test_a_form_whose_parts_cannot_be_read_is_refused() -> None:
    async def use(browser: Browser) -> None:
        kind = {"content-type": "multipart/form-data; boundary=x"}
        content = b"--x\r\nno header\r\n\r\nann\r\n--x--\r\n"
        reply = await browser.http.post("/ui/login", content=content, headers=kind)
        assert reply.status_code == 400

    visited(use, scope=None)


def test_a_form_of_very_many_fields_is_refused() -> None:
    async def use(browser: Browser) -> None:
        kind = {"content-type": "application/x-www-form-urlencoded"}
        reply = await browser.http.post("/ui/login", content=b"a=&" * 2_001, headers=kind)
        assert (reply.status_code, "at most 2,000 fields" in reply.text) == (400, True)

    visited(use, scope=None)


def test_no_form_takes_a_file(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> list[int]:
        form = (await question(browser, run_id)).form("/runs/cancel")
        file = {"file": ("a.txt", b"x" * 100)}
        found = [(await browser.send(form, files=file)).status]
        login = (await browser.open("/login")).form("/login")
        return [*found, (await browser.send(login, files=file)).status]

    assert visited(use) == [400, 400]
    assert status_of(run_id) == "running"


def test_a_form_of_a_session_that_has_ended_says_so(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> None:
        form = (await question(browser, run_id)).form("/runs/cancel")
        browser.http.cookies.clear()
        page = await browser.send(form, follow=False)
        assert (page.status, "log in again" in page.text) == (401, True)
        assert page.links[-1] == "/ui/"
        part = await browser.open("/", headers={"hx-request": "true"})
        assert part.response.headers["content-type"].startswith("text/plain")

    visited(use)
    assert status_of(run_id) == "running"


def test_the_token_of_another_session_is_refused(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> int:
        stolen = (await question(browser, run_id)).form("/runs/cancel")
        browser.http.cookies.clear()
        await browser.login("operate", "eve")
        return (await browser.send(stolen)).status

    assert visited(use) == 403
    assert status_of(run_id) == "running"


@pytest.mark.parametrize("scope", ["look", "read"])
def test_a_scope_that_may_not_act_has_no_button_and_is_refused(
    conn: psycopg.Connection[Any], scope: str
) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> int:
        page = await browser.open("/runs")
        form = page.form("/runs/chosen")
        assert "id" not in form.names and "verb" not in form.names
        sent = dict(form.fields) | {"id": run_id}
        form.action = "/ui/runs/cancel"
        return (await browser.send(form, sent)).status

    assert visited(use, scope=scope) == 403
    assert status_of(run_id) == "running"


def test_a_read_only_service_has_no_button_and_refuses(conn: psycopg.Connection[Any]) -> None:
    run_id = factories.run(conn)

    async def use(browser: Browser) -> int:
        page = await browser.open("/runs")
        form = page.form("/runs/chosen")
        assert "id" not in form.names
        form.action = "/ui/runs/cancel"
        return (await browser.send(form, dict(form.fields) | {"id": run_id})).status

    assert visited(use, app_read_only=True) == 403
    assert status_of(run_id) == "running"


def test_what_was_not_on_the_page_cannot_be_chosen(conn: psycopg.Connection[Any]) -> None:
    shown = factories.run(conn, workflow_name="a")
    other = factories.run(conn, workflow_name="b")

    async def use(browser: Browser) -> int:
        page = await browser.open("/runs?workflow=a")
        form = page.form("/runs/chosen")
        return (await browser.send(form, {"id": [shown, other], "verb": "cancel"})).status

    assert visited(use) == 403


def test_a_run_that_was_unchecked_after_all_were_checked_is_left_out(
    conn: psycopg.Connection[Any],
) -> None:
    chosen, unchecked = factories.run(conn), factories.run(conn)

    async def use(browser: Browser) -> None:
        page = await browser.open("/runs")
        given = {"whole": "1", "id": [chosen], "verb": "cancel"}
        page = await browser.send(page.form("/runs/chosen"), given)
        await browser.send(page.form("/runs/cancel"))

    visited(use)
    assert (status_of(chosen), status_of(unchecked)) == ("cancelled", "running")


def test_many_runs_are_cancelled_only_with_their_number(conn: psycopg.Connection[Any]) -> None:
    ids = [factories.run(conn) for _ in range(21)]

    async def use(browser: Browser) -> None:
        page = await browser.open("/runs")
        page = await browser.send(page.form("/runs/chosen"), {"whole": "1", "verb": "cancel"})
        form = page.form("/runs/cancel")
        page = await browser.send(form, {"typed": "20"})
        assert page.status == 422
        assert status_of(ids[0]) == "running"
        page = await browser.send(form, {"typed": "21"})
        assert "21 cancelled" in page.text

    visited(use)
    assert {status_of(run_id) for run_id in ids} == {"cancelled"}


# --- pages -------------------------------------------------------------------------------------


def test_pages_have_their_policy_and_are_not_stored() -> None:
    async def use(browser: Browser) -> None:
        for path in ("/", "/runs", "/login", "/nothing"):
            headers = (await browser.open(path)).response.headers
            policy = headers.get_list("content-security-policy")
            assert len(policy) == 1 and "script-src 'self'" in policy[0], path
            assert "unsafe" not in policy[0]
            assert headers["cache-control"] == "no-store"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"

    visited(use)


def test_static_files_have_hashed_names_and_are_kept() -> None:
    async def use(browser: Browser) -> None:
        page = await browser.open()
        found = [
            given["src"] or given["href"]
            for tag, given in page.tags
            if tag in ("script", "link") and (given.get("src") or given.get("href"))
            for given in [{"src": given.get("src"), "href": given.get("href")}]
        ]
        assert len(found) >= 7
        browser.http.cookies.clear()
        for address in found:
            assert re.search(r"\.[0-9a-f]{12}\.(css|js|svg)$", str(address)), address
            file = await browser.click(str(address))
            assert file.status == 200, address
            assert "max-age=31536000" in file.response.headers["cache-control"]
        assert (await browser.open("/static/..%2Fview.py")).status == 404
        assert (await browser.open("/static/dashboard.css")).status == 404

    visited(use)


def test_a_fragment_that_is_unchanged_is_not_sent_again(conn: psycopg.Connection[Any]) -> None:
    factories.run(conn)

    async def use(browser: Browser) -> None:
        part = {"hx-request": "true"}
        page = await browser.open("/runs", headers=part)
        tag = part | {"if-none-match": page.response.headers["etag"]}
        assert "<html" not in page.response.text
        again = await browser.open("/runs", headers=tag)
        assert (again.status, again.response.text) == (304, "")

    visited(use)


@pytest.mark.parametrize(
    ("inside", "settings", "mount"),
    [
        ("/queue", {}, "/ui"),
        ("", {"app_root_path": "/behind"}, "/ui"),
        ("", {"app_root_path": "/behind"}, "/behind/ui"),
    ],
    ids=["mounted", "behind a proxy that takes the path away", "behind one that does not"],
)
def test_all_addresses_begin_with_the_path_of_the_mount(
    inside: str, settings: Any, mount: str, conn: psycopg.Connection[Any]
) -> None:
    factories.run(conn)
    prefix = (inside or "/behind") + "/ui"

    async def use(browser: Browser) -> None:
        page = await browser.open("/login")
        form = page.form("/login")
        assert form.action == f"{prefix}/login"
        form.action = f"{inside}{mount}/login"
        values = {"token": TOKENS["operate"], "name": "ann"}
        page = await browser.send(form, values, follow=False)
        assert f"path={prefix};" in page.response.headers["set-cookie"].lower()
        cookie = {"cookie": page.response.headers["set-cookie"].partition(";")[0]}
        for path in ("/", "/runs"):
            page = await browser.open(path, headers=cookie)
            assert page.status == 200
            wrong = [
                value
                for _, given in page.tags
                for name in ("href", "src", "action", "hx-get", "data-stream", "data-root")
                if (value := given.get(name)) and not value.startswith(("#", prefix))
            ]
            assert not wrong

    visited(use, scope=None, inside=inside, mount=mount, **settings)


def test_probes_below_the_path_of_a_proxy_are_logged_as_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = "queue_workflows.service.requests"
    caplog.set_level(logging.DEBUG, log)

    async def use(browser: Browser) -> None:
        for path in ("/health", "/behind/health"):
            assert (await browser.http.get(path)).status_code == 200

    visited(use, scope=None, app_root_path="/behind")
    assert [each.levelno for each in caplog.records if each.name == log] == [logging.DEBUG] * 2


def test_hostile_values_run_nothing_and_every_page_opens(conn: psycopg.Connection[Any]) -> None:
    for text in HOSTILE:
        run_id = factories.run(
            conn, id=text, workflow_name=text, status="failed", error=text, finished_at=NOW
        )
        factories.node(conn, run_id, text[:200], node_module=text[:200], status="running",
                       **CLAIM | {"claimed_by": text[:200]})  # fmt: skip
    factories.insert(
        conn, "workers", worker_id="w", host_label=HOSTILE[0], queue=HOSTILE[1], pid=1, state="idle"
    )

    async def use(browser: Browser) -> None:
        for path in ("/", "/runs", "/head"):
            for headers in ({}, {"hx-request": "true"}):
                page = await browser.open(path, headers=headers)
                assert page.status == 200, (path, page.text)
                assert not inner_scripts(page.response.text), path
        for text in HOSTILE:
            with tabled.case(text):
                query = {"workflow": text, "text": text[:200], "since": "90d"}
                page = await browser.open("/runs", params=query)
                assert page.status == 200
                assert not inner_scripts(page.response.text)
                page = await browser.open("/search", params={"q": text[:200]}, follow=False)
                assert page.response.headers["location"].startswith("/ui/")
                page = await question(browser, text, verb="retry")
                assert page.status == 200
                assert not inner_scripts(page.response.text)

    visited(use)


NOW = datetime.now(timezone.utc)
CLAIM = {
    "worker_id": "w", "claim_no": 1, "lease_expires_at": NOW + timedelta(days=1),
    "started_at": NOW, "claimed_by": "box",
}  # fmt: skip


def test_hostile_filters_are_refused_in_a_sentence() -> None:
    async def use(browser: Browser) -> None:
        for query, status in (
            ({"since": "never"}, 422), ({"input": "{"}, 422), ({"at": "x"}, 422),
            ({"workflow": "a" * 2000}, 422), ({"input": "a=1"}, 200),
            ({"status": "' OR 1=1"}, 200), ({"input": '{"password": 1}'}, 422),
            ({"at": "2026-01-01T00:00:00Z", "after": "x"}, 200), ({"nobody": "knows"}, 200),
        ):  # fmt: skip
            with tabled.case(query):
                page = await browser.open("/runs", params=query)
                assert page.status == status
                assert not inner_scripts(page.response.text)

    visited(use)


def test_the_scope_look_sees_states_and_no_values(conn: psycopg.Connection[Any]) -> None:
    factories.run(conn, workflow_name="nightly", status="failed", error="value 4711 is wrong")

    async def use(browser: Browser) -> None:
        for path in ("/", "/runs"):
            for headers in ({}, {"hx-request": "true"}):
                assert "4711" not in (await browser.open(path, headers=headers)).response.text
        assert "nightly" in browser.page.text
        for query in ("text=4711", "input=a%3D1"):
            assert (await browser.open(f"/runs?{query}")).status == 403

    visited(use, scope="look")


def test_the_redactor_of_an_app_hides_errors(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.run(conn, status="failed", error="customer 4711 has no price")
    factories.insert(
        conn, "operator_acts", actor="ann", action="seen", kind="failures", subject="customer 4711"
    )
    monkeypatch.setattr(queue_workflows.get_config(), "redactor", None)

    async def shown(browser: Browser) -> list[str]:
        return [(await browser.open(path)).text for path in ("/runs", "/acts")]

    assert all("customer 4711" in text for text in visited(shown))
    queue_workflows.set_redactor(lambda value: value.replace("4711", "N"))
    assert all("customer N" in text for text in visited(shown))

    def broken(value: Any) -> Any:
        raise RuntimeError(value)

    queue_workflows.set_redactor(broken)
    assert not any("customer" in text for text in visited(shown))


def test_times_are_those_of_the_chosen_zone(conn: psycopg.Connection[Any]) -> None:
    factories.run(conn, created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))

    async def use(browser: Browser) -> None:
        page = await browser.open("/runs")
        assert "2026-01-02 03:04:05" in page.text
        page = await browser.send(page.form("/zone"), {"zone": "Asia/Tokyo"})
        assert str(page.response.url).partition("?")[0].endswith("/ui/runs")
        assert "2026-01-02 12:04:05" in page.text and "Asia/Tokyo, ann" in page.text
        assert 'title="2026-01-02 03:04:05 UTC"' in page.response.text
        page = await browser.send(page.form("/zone"), {"zone": "../etc/passwd"})
        assert page.status == 422
        page = await browser.send(page.form("/zone"), {"zone": "UTC"})
        assert (page.status, "Times are shown in UTC." in page.text) == (200, True)

    visited(use)


def test_a_read_that_takes_too_long_says_so(conn: psycopg.Connection[Any], dsn: str) -> None:
    async def use(browser: Browser) -> Page:
        with psycopg.connect(dsn) as other:
            other.execute("LOCK TABLE workflow_runs IN ACCESS EXCLUSIVE MODE")
            return await browser.open("/runs")

    page = visited(use)
    assert page.status == 503
    assert "narrow the filter" in page.text


@pytest.mark.parametrize("path", ["/runs", "/runs/r/again", "/jobs/j/again"])
def test_a_page_that_takes_long_does_not_hold_the_service(
    conn: psycopg.Connection[Any], path: str
) -> None:
    factories.run(conn, id="r", status="failed", error="no price", context={"row": 7})
    factories.ingest(conn, id="j", queue="load", args={"row": 7})
    begun, free = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def slow(value: Any) -> Any:
        begun.set()
        in_time.append(free.wait(wait.patience(10)))
        return value

    queue_workflows.set_redactor(slow)

    async def use(browser: Browser) -> int:
        page = asyncio.ensure_future(browser.open(path))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await browser.http.get("/health")).status_code == 200
        free.set()
        return (await page).status

    assert visited(use) == 200
    assert set(in_time) == {True}


def test_a_folder_that_does_not_answer_holds_no_request_of_the_api(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = factories.run(conn, out_dir="/away")
    begun, free = threading.Event(), threading.Event()
    in_time: list[bool] = []

    found = os.path.realpath

    def hung(path: Any, **more: Any) -> Any:
        if path != "/away":
            return found(path, **more)
        begun.set()
        in_time.append(free.wait(wait.patience(10)))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os.path, "realpath", hung)

    async def use(browser: Browser) -> None:
        page = asyncio.ensure_future(browser.open(f"/runs/{run_id}/files"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await browser.http.get("/api/v1/jobs", headers=BEARER)).status_code == 200
        free.set()
        assert (await page).status == 404

    visited(use, pg_pool_size=1, pg_max_overflow=0, app_read_only=True)
    assert in_time == [True]


def test_a_refusal_of_the_service_is_a_page() -> None:
    async def use(browser: Browser) -> None:
        form = (await browser.open("/runs")).form("/zone")
        page = await browser.send(form, {"zone": "x" * 2000})
        assert (page.status, "APP_MAX_BODY_KB" in page.text) == (413, True)
        assert page.links == ["/ui/"]
        wrong = {"host": "<b>evil"}
        page = await browser.open("/", headers=wrong)
        assert (page.status, "is not served" in page.text) == (421, True)
        assert "<b>" not in page.response.text and not inner_scripts(page.response.text)
        reply = await browser.http.get("/api/v1/jobs", headers=wrong)
        assert reply.headers["content-type"] == "application/problem+json"

    visited(use, app_max_body_kb=1)


def test_an_unknown_page_and_an_unknown_method() -> None:
    async def use(browser: Browser) -> None:
        page = await browser.open("/nothing")
        assert page.status == 404
        assert "There is no such page" in page.text
        response = await browser.http.put("/ui/runs")
        assert response.status_code == 405

    visited(use)


def test_it_closes_websockets() -> None:
    async def use(browser: Browser) -> None:
        sent: list[str] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        scope = asgi_service.scope_of("/ui/live") | {"type": "websocket", "subprotocols": []}
        await browser.app(scope, receive, send)
        assert sent == ["websocket.close"]

    visited(use)


def test_it_can_be_switched_off() -> None:
    async def use(browser: Browser) -> int:
        return (await browser.open("/", follow=False)).status

    assert visited(use, scope=None, app_dashboard=False) == 401


# --- live --------------------------------------------------------------------------------------


def test_the_stream_goes_on_after_an_error_of_the_database(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, failed = history.feed, []
    made: list[str] = []

    def once(*args: Any, **keywords: Any) -> Any:
        if made and not failed:
            failed.append(True)
            raise db.OperationalError("the server was restarted")
        return feed(*args, **keywords)

    def noted(text: str) -> bool:
        if "hint" in text and not made:
            made.append(factories.run(conn))
        return bool(made) and made[0] in text

    monkeypatch.setattr(history, "feed", once)
    status, _ = visited(lambda browser: browser.stream("/live", noted))
    assert (status, failed) == (200, [True])


def test_a_hint_is_sent_again_for_pages_that_were_given_a_kept_part(
    conn: psycopg.Connection[Any],
) -> None:
    """A part is kept for a second, so it may be older than the change that its page was told."""
    run_id = factories.run(conn)
    shows_end: list[bool] = []

    async def use(browser: Browser) -> None:
        seen: list[asyncio.Task[Page]] = []

        def noted(text: str) -> bool:
            if "hint" in text:
                seen.append(asyncio.ensure_future(part(browser)))
            if len(seen) == 1:
                conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", [run_id])
            return text.count(run_id) == 2

        await part(browser)
        assert (await browser.stream("/live", noted))[0] == 200
        shows_end.extend(["failed" in (await each).text for each in seen])

    async def part(browser: Browser) -> Page:
        return await browser.open("/runs", headers={"hx-request": "true"})

    visited(use)
    assert shows_end[-1]


def test_slow_forms_of_anybody_take_no_request_of_the_api() -> None:
    async def use(browser: Browser) -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            begun.set()
            await over.wait()
            return {"type": "http.disconnect"}

        async def drop(_: Any) -> None:
            pass

        form = {"content_type": "application/x-www-form-urlencoded", "content_length": "7"}
        scope = asgi_service.scope_of("/ui/login", method="POST", **form)
        slow = asyncio.ensure_future(browser.app(scope, receive, drop))
        await begun.wait()
        assert (await browser.http.get("/api/v1/jobs", headers=BEARER)).status_code == 200
        page = await browser.open("/login")
        assert (page.status, "try again" in page.text) == (503, True)
        over.set()
        await slow
        assert (await browser.open("/login")).status == 200

    visited(use, scope=None, app_max_requests=1)


def test_viewers_have_a_limit_of_their_own(conn: psycopg.Connection[Any]) -> None:
    async def use(browser: Browser) -> None:
        begun = asyncio.Event()
        made: list[str] = []

        def until(text: str) -> bool:
            if "hint" in text:
                begun.set()
            return bool(made) and made[0] in text

        first = asyncio.ensure_future(browser.stream("/live", until))
        await asyncio.wait_for(begun.wait(), wait.patience(10))
        status, text = await browser.stream("/live", lambda _: True)
        assert (status, "try again" in text) == (503, True)
        assert (await browser.open("/runs")).status == 200
        assert (await browser.http.get("/api/v1/jobs", headers=BEARER)).status_code == 200
        made.append(factories.run(conn))
        assert (await first)[0] == 200

    visited(use, app_max_viewers=1)


# --- Inbox -------------------------------------------------------------------------------------


def asks(conn: psycopg.Connection[Any], out_dir: str | None = None, **spec: Any) -> str:
    """Insert a run with a question, and return its id."""
    run_id = factories.run(conn, out_dir=out_dir)
    factories.node(
        conn, run_id, "ask", node_module="__input__x", status="awaiting_input", started_at=NOW,
        input_spec={"prompt": "Which?"} | spec,
    )  # fmt: skip
    return run_id


def outputs() -> Path:
    """The folder in which the engine keeps the files of runs."""
    return Path(os.environ["QUEUE_WORKFLOWS_OUTPUTS_DIR"])


def answer_of(conn: psycopg.Connection[Any], run_id: str) -> Any:
    return factories.one(
        conn, "SELECT max(value #>> '{}') FROM workflow_input_submissions WHERE run_id = %s", run_id
    )


def test_a_long_question_is_read_on_its_own_page_alone(conn: psycopg.Connection[Any]) -> None:
    options = [f"{number} {secrets.token_hex(100)}" for number in range(300)]
    run_id = asks(conn, prompt="Which of many?", widget="choose_one", options=options)

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox")
        assert "a question that is not shown here" in page.text
        assert run_id in page.response.text and "Which of many?" not in page.response.text
        page = await browser.open("/inbox/question", params={"run": run_id, "node": "ask"})
        assert "Which of many?" in page.text and "100 more options are not shown" in page.text
        values = {"value": json.dumps(options[299])}
        page = await browser.send(page.form("/inbox/answer"), values)
        assert "Answered: ask takes" in page.text

    visited(use)
    assert answer_of(conn, run_id) == options[299]


@pytest.mark.parametrize(
    ("settings", "may"), [({}, True), ({"scope": "read"}, False), ({"app_read_only": True}, False)]
)
def test_who_may_not_answer_has_no_button_for_it(
    conn: psycopg.Connection[Any], settings: Any, may: bool
) -> None:
    asks(conn, widget="text")
    page = visited(lambda browser: browser.open("/inbox"), **settings)
    assert ("Which?" in page.text, "Answer" in page.text) == (True, may)


def test_a_page_of_questions_behind_the_last_leads_to_the_first(
    conn: psycopg.Connection[Any],
) -> None:
    asks(conn)
    later = {"after": "2100-01-01T00:00:00Z", "seq": "1"}
    page = visited(lambda browser: browser.open("/inbox", params=later))
    assert "No later run asks anything." in page.text
    assert "first page" in page.text


@pytest.mark.parametrize("name", ["a.csv", "../../a.csv", "C:\\data\\a.csv"])
def test_a_file_is_uploaded_to_the_folder_of_the_run(
    conn: psycopg.Connection[Any], name: str
) -> None:
    run_id = asks(conn, widget="file_upload", accept=".csv")

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", params={"run": run_id, "node": "ask"})
        form = page.form("/inbox/answer")
        page = await browser.send(form, files={"file": ("a.png", b"x")})
        assert (page.status, "it accepts .csv" in page.text) == (422, True)
        form = page.form("/inbox/answer")
        page = await browser.send(form, files={"file": (name, b"1,2")})
        assert "Answered: ask takes" in page.text

    visited(use)
    there = Path(str(answer_of(conn, run_id)))
    assert there.read_bytes() == b"1,2"
    folder = outputs() / run_id
    assert [path.resolve() for path in folder.rglob("*") if path.is_file()] == [there]
    assert there.name == "a.csv"


def test_a_file_stays_if_the_reply_to_its_answer_is_lost(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = asks(conn, widget="file_upload")
    answer = runs.answer

    def lost(*given: Any, **more: Any) -> Any:
        answer(*given, **more)
        raise db.OperationalError("the connection was lost after the COMMIT")

    monkeypatch.setattr(runs, "answer", lost)

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", params={"run": run_id, "node": "ask"})
        page = await browser.send(page.form("/inbox/answer"), files={"file": ("a.csv", b"1,2")})
        assert page.status == 503

    visited(use)
    assert Path(str(answer_of(conn, run_id))).read_bytes() == b"1,2"


def test_no_file_is_stored_outside_of_the_folders_of_the_engine(
    conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    run_id = asks(conn, str(tmp_path), widget="file_upload")
    inside = outputs() / "linked"
    inside.parent.mkdir(parents=True, exist_ok=True)
    inside.symlink_to(tmp_path)
    linked = asks(conn, str(inside), widget="file_upload")
    other = asks(conn, widget="text")

    async def use(browser: Browser) -> None:
        for each, reason in (
            (run_id, "set OUT_ROOTS"), (linked, "set OUT_ROOTS"),
            (other, "the question takes no file"),
        ):  # fmt: skip
            page = await browser.open("/inbox/question", params={"run": each, "node": "ask"})
            page = await browser.send(page.form("/inbox/answer"), files={"file": ("a.csv", b"x")})
            assert (page.status, reason in page.text) == (422, True), page.text
            assert answer_of(conn, each) is None

    try:
        visited(use)
    finally:
        inside.unlink()
    assert not list(tmp_path.iterdir())


def test_a_file_that_there_is_no_room_for_leaves_no_part(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = asks(conn, widget="file_upload")

    def full(_: Any, target: Any) -> None:
        target.write(b"1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", params={"run": run_id, "node": "ask"})
        page = await browser.send(page.form("/inbox/answer"), files={"file": ("a.csv", b"1,2")})
        assert (page.status, "No space left on device" in page.text) == (422, True)

    visited(use)
    assert answer_of(conn, run_id) is None
    assert not [path for path in (outputs() / run_id).rglob("*") if path.is_file()]


# --- Now ---------------------------------------------------------------------------------------


def test_now_is_calm_when_nothing_is_wrong() -> None:
    page = visited(lambda browser: browser.open("/"))
    assert "Nothing needs you." in page.text
    assert "Nothing has run yet, and no worker was seen." in page.text
    assert "These lines start a run of your app:" in page.text
    assert "Or watch an example" in page.text


def test_now_lists_a_question_a_failure_and_an_absent_orchestrator(
    conn: psycopg.Connection[Any],
) -> None:
    run_id = factories.run(conn)
    factories.node(conn, run_id, "ask", status="awaiting_input", started_at=NOW)
    factories.ingest(conn, queue="load", status="failed", error="no price", finished_at=NOW)
    factories.run(conn, status="queued", queued_at=NOW - timedelta(minutes=2))

    async def use(browser: Browser) -> None:
        page = await browser.open("/")
        for text in ("1 node asks a person", "1 job failed within an hour", "no price"):
            assert text in page.text
        assert "<code>queue-workflows inputs</code>" in page.response.text
        for path in ("/", "/runs"):
            assert "No orchestrator has taken up work" in (await browser.open(path)).text
        assert re.search(r"<title>\(\d\) Runs", browser.page.response.text)
        browser.http.cookies.clear()
        login = await browser.open("/login")
        assert "<title>Log in" in login.response.text, "the number is for sessions alone"

    visited(use)


def test_now_is_not_calm_when_its_needs_cannot_be_read(
    conn: psycopg.Connection[Any], dsn: str
) -> None:
    async def use(browser: Browser) -> None:
        with psycopg.connect(dsn) as other:
            other.execute("LOCK TABLE workflow_input_submissions IN ACCESS EXCLUSIVE MODE")
            whole = await browser.login()
            for page in (whole, await browser.open("/", headers={"hx-request": "true"})):
                assert page.status == 503, page.text
                assert "Nothing needs you" not in page.text

    visited(use, scope=None)


def test_a_page_takes_six_statements_at_most_with_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checks of the head are asked at the first page."""
    found: list[str] = []
    execute = psycopg.Connection.execute

    def counted(self: Any, query: Any, given: Any = None, **keywords: Any) -> Any:
        if query and threading.current_thread().name.startswith("service-call"):
            found.append(str(query))
        return execute(self, query, given, **keywords)

    async def use(browser: Browser) -> None:
        monkeypatch.setattr(psycopg.Connection, "execute", counted)
        for path in ("/inbox", "/acts", "/runs"):
            found.clear()
            assert (await browser.open(path)).status == 200
            assert any("AS any_run" in query for query in found), "the head was read"
            assert len(found) <= 6, (path, found)

    constants.put(monkeypatch, "service.dashboard.view.HEAD_S", 0.0)
    visited(use)


# --- Runs --------------------------------------------------------------------------------------


def test_a_long_list_has_pages_that_keep_the_filter(conn: psycopg.Connection[Any]) -> None:
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    ids = [
        factories.run(conn, workflow_name="w", created_at=start + timedelta(minutes=number))
        for number in range(60)
    ]
    factories.run(conn, workflow_name="other")

    async def use(browser: Browser) -> None:
        page = await browser.open("/runs?workflow=w")
        first = [name for name in ids if name in page.response.text]
        (older,) = [link for link in page.links if "after=" in link]
        page = await browser.click(older)
        second = [name for name in ids if f"run-{name}" in page.response.text]
        assert (len(first), len(second)) == (60, 10), "the chart has the last 60"
        assert second == ids[:10]
        assert not [link for link in page.links if "after=" in link]
        assert "/ui/runs?workflow=w" in page.links

    visited(use)


def test_the_chart_of_runs_that_never_started(conn: psycopg.Connection[Any]) -> None:
    for _ in range(2):
        factories.run(conn, workflow_name="w", status="completed", finished_at=NOW)
    factories.run(conn, workflow_name="w", status="completed", started_at=NOW, finished_at=NOW)
    page = visited(lambda browser: browser.open("/runs?workflow=w"))
    assert page.status == 200
    assert "The last 3 runs" in page.text


def test_runs_are_found_by_state_input_and_text(conn: psycopg.Connection[Any]) -> None:
    one = factories.run(conn, context={"tenant": 7}, status="failed", error="no price in row 3")
    two = factories.run(conn, context={"tenant": 8})

    async def use(browser: Browser) -> None:
        for query, has_one, has_two in (
            ("status=failed", True, False), ("input=tenant%3D8", False, True),
            ("input=%7B%22tenant%22%3A+7%7D", True, False), ("text=price", True, False),
            (f"text={two[:13]}", False, True), ("since=1h", True, True), ("until=1h", False, False),
        ):  # fmt: skip
            with tabled.case(query):
                text = (await browser.open(f"/runs?{query}")).response.text
                assert (f"run-{one}" in text, f"run-{two}" in text) == (has_one, has_two)
        assert "No run matches: until 1h." in browser.page.text
        page = await browser.open("/runs?status=cancelled&until=1h")
        assert "No run matches: state cancelled, until 1h." in page.text
        page = await browser.open("/runs?until=1h")
        assert "queue-workflows runs --until 1h" in browser.page.text

    visited(use)


def test_the_question_says_what_a_cancel_does_and_leaves_out_what_is_over(
    conn: psycopg.Connection[Any],
) -> None:
    live, over = factories.run(conn), factories.run(conn, status="completed")
    factories.node(conn, live, "a")
    factories.node(conn, live, "b")
    factories.node(conn, live, "c", status="running", **CLAIM)

    async def use(browser: Browser) -> None:
        page = await question(browser, live, over)
        sentence = "Cancel 1 run: 2 nodes wait and are cancelled, 1 runs and is asked to stop."
        assert sentence in page.text
        assert "1 of the chosen ones is left out." in page.text
        page = await browser.send(page.form("/runs/cancel"))
        assert "1 cancelled" in page.text

    visited(use)
    assert (status_of(live), status_of(over)) == ("cancelled", "completed")


def test_failed_runs_are_run_again_and_refusals_are_named(
    conn: psycopg.Connection[Any],
) -> None:
    one, two = (factories.run(conn, status="failed") for _ in range(2))

    async def use(browser: Browser) -> None:
        page = await question(browser, one, two, verb="retry")
        form = page.form("/runs/retry")
        conn.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", [two])
        page = await browser.send(form)
        assert "1 queued, 1 refused" in page.text
        assert any(link.endswith(f"/runs/{two}") for link in page.links)

    visited(use)
    assert status_of(one) == "queued"


def test_one_box_finds_runs_jobs_workflows_machines_tasks_and_keys(
    conn: psycopg.Connection[Any],
) -> None:
    run_id = factories.run(conn, workflow_name="nightly")
    node = factories.node(conn, run_id, "s/a")
    job = factories.ingest(conn, queue="load", partition_key="p", task_name="import")
    held = factories.ingest(conn, queue="load", idempotency_key="once", task_name="once")
    factories.node(
        conn, run_id, "s/b", status="running", node_module="cut", lock_key="l", worker_id="w",
        claim_no=1, claimed_by="box-1", lease_expires_at=NOW + timedelta(minutes=5),
    )  # fmt: skip
    factories.insert(
        conn, "workers", worker_id="w", host_label="box-1", queue="cpu", pid=1, state="idle"
    )

    async def use(browser: Browser) -> None:
        for text, where in (
            ("import", "/ui/jobs?task=import"), ("cut", "/ui/jobs?task=cut"),
            ("p", "/ui/jobs?key=p"), ("l", "/ui/jobs?key=l"), ("once", f"/ui/jobs/{held['id']}"),
            (run_id, f"/ui/runs/{run_id}"), (node["id"], f"/ui/runs/{run_id}?node=s%2Fa"),
            (job["id"], f"/ui/jobs/{job['id']}"), ("nightly", "/ui/runs?workflow=nightly"),
            (job["id"][:-2], f"/ui/jobs/{job['id']}"), (run_id[:-2], f"/ui/runs/{run_id}"),
            (node["id"][:-2], f"/ui/jobs/{node['id']}"),
            (job["id"][:7], f"/ui/runs?text={job['id'][:7]}"),
            ("box-1", "/ui/machines?host=box-1"), ("no price", "/ui/runs?text=no+price"),
            ("", "/ui/runs"),
        ):  # fmt: skip
            page = await browser.open("/search", params={"q": text}, follow=False)
            assert page.response.headers["location"] == where

    async def look(browser: Browser) -> None:
        for text, status in (("import", 303), ("p", 404), ("l", 404), ("once", 404)):
            page = await browser.open("/search", params={"q": text}, follow=False)
            assert page.status == status, text

    visited(use)
    visited(look, scope="look")


def test_reads_leave_nothing_behind(conn: psycopg.Connection[Any]) -> None:
    """A page reads in a transaction that cannot write."""
    with (
        db.read_only() as own,
        pytest.raises(psycopg.errors.ReadOnlySqlTransaction),
        own.transaction(),
    ):
        own.execute("DELETE FROM workflow_runs")
