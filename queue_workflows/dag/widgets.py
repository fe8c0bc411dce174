"""Build the `input_spec` of an input node by its widget: what a person is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from queue_workflows import refs
from queue_workflows.dag import answers, output_files

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, RefResolver

    Resolve = Callable[[Any], Any]

_ENGINE_KEYS = frozenset({"id", "kind", "widget", "prompt", "target", "depends_on", "skip_if"})


def head(step: Mapping[str, Any]) -> JsonDict:
    """Return the part of every spec: `{"step_id", "widget", "prompt", "target"}`, its type."""
    typed = {answers.TYPE: step[answers.TYPE]} if answers.TYPE in step else {}
    return {
        "step_id": step.get("id"),
        "widget": step.get("widget"),
        "prompt": step.get("prompt") or "",
        "target": step.get("target"),
        **typed,
    }


def build_spec(
    step: Mapping[str, Any],
    *,
    context: Mapping[str, Any],
    out_dir: str | None,
    resolver: RefResolver = refs.resolve_ref,
) -> JsonDict:
    """Return the `head` and what the widget needs.

    The built-in ones: choose_one (`options`, `multiple`), file_upload (`accept`, `*/*` if the step
    names none), pick_or_upload (`library`, `accept`), turnout (`turnout_options`, from the step's
    `turnout_options` or else its `options`). For any other the step's own keys. Never raises: a ref
    that does not resolve gives an empty list.
    """
    spec = head(step)

    def resolve(value: Any) -> Any:
        found, reason = refs.attempt(value, context, resolver)
        return found if reason is None else []

    widget = step.get("widget")
    if widget == "choose_one":
        with_files = _with_files(step.get("source"), context, out_dir, resolver)
        options, _ = refs.attempt(step.get("source"), with_files, resolver)
        spec["options"] = _listed(options)
        spec["multiple"] = bool(step.get("multiple"))
    elif widget == "file_upload":
        accept = step.get("accept")
        spec["accept"] = "*/*" if accept is None else resolve(accept)
    elif widget == "pick_or_upload":
        spec["library"] = resolve(step.get("library"))
        spec["accept"] = resolve(step.get("accept"))
    elif widget == "turnout":
        offered = step.get("turnout_options", step.get("options"))
        given = _listed(resolve(offered))
        spec["turnout_options"] = [_option(option) for option in given]
    else:
        spec |= {key: step[key] for key in step if key not in _ENGINE_KEYS}
    return spec


def _listed(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else []


def _option(given: Any) -> JsonDict:
    """Return `{"label", "value"}` of an option, which may be a bare value or lack one of them."""
    record = cast("dict[str, Any]", given) if isinstance(given, dict) else {"value": given}
    value = record.get("value", record.get("label"))
    return {"label": record.get("label", str(value)), "value": value}


def _with_files(
    source: Any, context: Mapping[str, Any], out_dir: str | None, resolver: RefResolver
) -> dict[str, Any]:
    """Return the context and the `files` of each folder under `out_dir` that the source may name.

    An app's resolver may read any of them, so it gets all.
    """
    wanted = refs.heads(source) if resolver is refs.resolve_ref else None
    merged = dict(context)
    for name, files in output_files.listings(out_dir, wanted).items():
        present = context.get(name)
        base = cast("dict[str, Any]", present) if isinstance(present, dict) else {}
        merged[name] = {**base, "files": files}
    return merged
