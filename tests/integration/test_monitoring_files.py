"""The dashboard and the alert rules in deploy/ ask for metrics and labels that the page has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support import console
from tests.support.commands import ROOT
from tests.support.metrics_page import LABELS

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
SCRAPES = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "queue-workflows.json"
GUIDE = ROOT / "docs" / "metrics.md"
PAGE = ROOT / "docs" / "metrics-reference.md"


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def kinds(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE queue_workflows_(\w+) (\w+)$", text, re.MULTILINE))


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Return each metric of an expression, without prefix, and the labels that select of it."""
    for name, chosen in re.findall(r"queue_workflows_(\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", chosen))


def test_the_page_has_these_metrics_and_no_other(conn: Any) -> None:
    assert set(kinds(console.printed("metrics"))) == set(LABELS)


def test_the_page_of_the_docs_names_every_metric_with_its_labels() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `queue_workflows_(\w+)` \| \w+ \| ([^|]*) \|", text, re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert documented == {name: labels - {"le"} for name, labels in LABELS.items()}


def test_expressions_name_metrics_and_labels_that_exist(conn: Any) -> None:
    kind = kinds(console.printed("metrics"))
    seen: set[str] = set()
    for expression in expressions():
        for full, chosen in used(expression):
            name = re.sub(r"_(bucket|sum|count)$", "", full)
            name = name if kind.get(name) == "histogram" else full
            assert name in kind, f"{full} in {expression}"
            assert chosen <= LABELS[name], f"{chosen} of {full}"
            if kind[name] == "counter":
                assert re.search(rf"(rate|increase)\(queue_workflows_{full}\b", expression)
            seen.add(name)
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            names = {name.strip() for name in grouped.split(",")}
            assert names <= set().union(*LABELS.values()), grouped
    assert len(seen) > 25


def test_expressions_are_balanced() -> None:
    for expression in expressions():
        for opens, closes in ("()", "{}", "[]"):
            assert expression.count(opens) == expression.count(closes), expression


def test_each_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 8
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in {"page", "warn"}


def test_the_page_of_the_docs_lists_the_alerts() -> None:
    listed = re.findall(r"^\| `(QueueWorkflows\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [rule["alert"] for rule in rules()]


def test_the_dashboard_is_complete() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "templating", "panels"} <= set(board)
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) > 12
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_the_configuration_scrapes_the_listener_and_loads_the_rules() -> None:
    found = yaml.safe_load(SCRAPES.read_text())
    assert found["rule_files"] == [RULES.name]
    (job,) = found["scrape_configs"]
    assert job["job_name"] == "queue_workflows"
    assert f'up{{job="{job["job_name"]}"}} == 0' in {rule["expr"] for rule in rules()}


def test_the_page_scrapes_the_service_as_the_job_of_the_rules() -> None:
    (text,) = re.findall(r"```text\n(scrape_configs:.*?)```", GUIDE.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (other,) = yaml.safe_load(SCRAPES.read_text())["scrape_configs"]
    assert job["job_name"] == other["job_name"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8081"]}], "APP_PORT's default"
    assert job["authorization"]["credentials_file"].startswith("/etc/prometheus/")


@pytest.mark.skipif(
    shutil.which("promtool") is None and "QW_TEST_PROMTOOL" not in os.environ,
    reason="promtool (prometheus) is not here",
)
def test_promtool_accepts_the_rules_the_configuration_and_the_page(conn: Any) -> None:
    for words in (["check", "rules", str(RULES)], ["check", "config", str(SCRAPES)]):
        subprocess.run(["promtool", *words], check=True, capture_output=True, timeout=60)
    page = console.printed("metrics").encode()
    subprocess.run(["promtool", "check", "metrics"], input=page, check=True, timeout=60)
