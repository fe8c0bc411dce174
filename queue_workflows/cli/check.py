"""Define `queue-workflows check WORKFLOW`: find what would fail before the workflow runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from queue_workflows import check as checks
from queue_workflows import config, errors
from queue_workflows.cli import command, define, graph_text, output
from queue_workflows.dag import definition
from queue_workflows.runtime import app_loading, stored_json


@define.command(
    "check",
    """WORKFLOW  Its name, or a JSON file with a workflow or an expanded definition; without it all
        that the app declares in Python.
    --format FORMAT tree|json|mermaid  How it is printed.
    --strict  Warnings count as errors.""",
    takes="app debug",
    reads=False,
)
def check(
    workflow: str | None = None, form: str = "tree", strict: bool = False, *, app: str | None
) -> int:
    """Check a workflow against its code.

    Exit code 0: it can run, 1: it cannot, 2: wrong usage.
    """
    chosen = app_loading.load_app(app)
    names = sorted(config.get_config().workflow_map) if workflow is None else [workflow]
    if not names:
        raise errors.InvalidConfig(
            f"--app {chosen} declares no workflow in Python: name the one to check"
            if chosen
            else "name a workflow or a file, or an app that declares some by --app"
        )
    reports = [_checked(each, chosen) for each in names]
    _SHOW[form](reports)
    found = [finding for report in reports for finding in report.findings]
    bad = [finding for finding in found if strict or finding.level == "error"]
    return 1 if bad else 0


def _checked(workflow: str, app: str | None) -> checks.Report:
    """Return the report on a workflow's name or file.

    A text that ends in .json or contains a slash is a file if it exists, else a name, since names
    may contain slashes. A workflow declared in Python is preferred to a file.
    """
    wired = config.get_config()
    looks_like_file = workflow.endswith(".json") or os.sep in workflow
    if looks_like_file and workflow not in wired.workflow_map:
        path = Path(workflow)
        # Without a provider the name is unknown anyway, so report what is wrong with the file.
        if path.is_file() or wired.workflow_loader is None:
            return _of_file(path)
    try:
        return checks.workflow(workflow)
    except errors.UnknownWorkflow as error:
        meant = errors.hint(workflow, wired.workflow_map)
        hint = f"; is --app {app} the one that has it?" if app else "; name its app by --app"
        no_file = f", and {workflow}: No such file" if looks_like_file else ""
        text = str(error).removesuffix(meant) + no_file + (meant or hint)
        raise errors.UnknownWorkflow(text) from error


def _of_file(path: Path) -> checks.Report:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise errors.InvalidConfig(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise errors.InvalidConfig(f"{path} holds no JSON object")
    record = cast("dict[str, Any]", found)
    if isinstance(record.get("definition"), dict):
        record = cast("dict[str, Any]", record["definition"])
    if "steps" in record:
        own = stored_json.mapping(record.get("pipelines"))
        return checks.document(record, pipelines=own)
    if "nodes" in record and "workflow" in record:
        return checks.definition(record)
    raise errors.InvalidConfig(
        f"{path} is neither a workflow ('name' and 'steps', its 'pipelines' beside them or in the "
        "app) nor an expanded definition ('workflow' and 'nodes')"
    )


def _as_tree(reports: Iterable[checks.Report]) -> None:
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    for report in reports:
        if report.definition is not None:
            for line in graph_text.tree(report.definition, report.needs, unicode=unicode):
                output.echo(line)
        for finding in report.findings:
            output.echo(output.line(finding, 1000))
        errs = sum(finding.level == "error" for finding in report.findings)
        warns = len(report.findings) - errs
        words = output.listed(
            errs and output.counted(errs, "error"), warns and output.counted(warns, "warning")
        )
        output.echo(f"{output.line(report.name)}: {words or 'no problems found'}")


def _as_json(reports: list[checks.Report]) -> None:
    shown = [
        {
            "workflow": one.name, "ok": one.ok, "needs": list(one.needs),
            "findings": [finding._asdict() for finding in one.findings],
            "digest": definition.digest(one.definition) if one.definition else None,
            "definition": one.definition,
        }
        for one in reports
    ]  # fmt: skip
    output.dump(shown[0] if len(shown) == 1 else shown)


def _as_mermaid(reports: Iterable[checks.Report]) -> None:
    """Print several graphs one after the other; findings go to stderr."""
    for report in reports:
        if report.definition is not None:
            for line in graph_text.mermaid(report.definition):
                output.echo(line)
        for finding in report.findings:
            command.print_message(output.line(finding, 1000))


_SHOW = {"tree": _as_tree, "json": _as_json, "mermaid": _as_mermaid}
