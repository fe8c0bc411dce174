"""`queue-workflows up` and `serve` with the dashboard, as processes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.support import toy_app
from tests.support.commands import TOYHOST, Commands
from tests.support.dashboard import TOKENS, Page
from tests.support.http_service import APP, TOKEN, bearer
from tests.support.wait import until

UP = ("queue-workflows", "up", "--app", TOYHOST, "--cpu", "1", "--gpu", "0")
ON = {"QUEUE_WORKFLOWS_APP_DASHBOARD": "1"}
LINK = re.compile(r"(http://127\.0\.0\.1:\d+/ui)/login\?link=\S+")
pytestmark = pytest.mark.slow


def logged_in(http: httpx.Client, address: str, base: str) -> httpx.Response:
    """Open a login as a browser does, and send its form with a name."""
    form = Page(http.get(address)).form("/login")
    data = dict(form.fields) | {"name": "ann"}
    return http.post(f"{base}/login", data=data, headers={"sec-fetch-site": "same-origin"})


def test_up_serves_the_dashboard_whose_link_opens_once(cli: Commands, tmp_path: Path) -> None:
    up = cli.start(*UP, **ON)
    found = until(lambda: LINK.search(up.err), timeout_s=60)
    assert "scheduler, dashboard; Ctrl-C stops them" in up.err
    # `up`, its three children, and the launcher.
    until(lambda: len(up.family()) == 5)
    with httpx.Client(timeout=30) as http:
        assert logged_in(http, found[0], found[1]).status_code == 303
        run_id = toy_app.submit(tmp_path)
        assert run_id in http.get(f"{found[1]}/runs").text
        with http.stream("GET", f"{found[1]}/live") as stream:
            lines = stream.iter_lines()
            until(lambda: "hint" in next(lines))
            another = toy_app.submit(tmp_path)
            until(lambda: another in next(lines))
    with httpx.Client(timeout=30) as http:
        assert logged_in(http, found[0], found[1]).status_code == 403
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err
    until(lambda: not up.family())


@pytest.mark.parametrize(
    ("options", "env"),
    [(("--no-dashboard",), ON), ((), {"QUEUE_WORKFLOWS_APP_DASHBOARD": "0"})],
)
def test_up_leaves_the_dashboard_out(
    cli: Commands, options: tuple[str, ...], env: dict[str, str]
) -> None:
    up = cli.start(*UP, *options, **env)
    until(lambda: "dispatches on" in up.err, timeout_s=60)
    assert not up.pids("serve")
    assert "dashboard" not in up.err
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err


def test_serve_has_the_dashboard_beside_the_api(cli: Commands) -> None:
    tokens = {"QUEUE_WORKFLOWS_TOKEN": TOKEN, "QUEUE_WORKFLOWS_TOKEN_LOOK": TOKENS["look"]}
    env = {**tokens, "WORKERS_JSON": "", **ON}
    serve = cli.start("queue-workflows", "serve", "--port", "0", "--app", APP, **env)
    address = until(lambda: re.search(r"serving .* on (http://\S+)", serve.err), timeout_s=60)[1]
    with httpx.Client(base_url=address, timeout=30) as http:
        until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/ui").headers["location"] == "/ui/"
        assert http.get("/ui/").headers["location"] == "/ui/login"
        assert http.head("/ui/login").status_code == 200
        assert http.get("/api/v1/jobs", headers=bearer(TOKEN)).status_code == 200
        assert http.get("/api/v1/jobs").status_code == 401
        given = {"token": TOKENS["look"], "name": "ann"}
        assert http.post("/ui/login", data=given).status_code == 303
        with http.stream("GET", "/ui/live") as stream:
            hint = next(line for line in stream.iter_lines() if line.startswith("data: "))
        whole = {"all": True, "jobs": True, "ids": []}
        assert json.loads(hint.removeprefix("data: ")) == whole, "a hint has no values"
    serve.send(signal.SIGINT)
    assert serve.wait() == 0, serve.err
    assert "link=" not in serve.err
