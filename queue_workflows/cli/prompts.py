"""Ask a person for an input node's answer on a terminal, or take the default for `--yes`."""

from __future__ import annotations

import select
import sys
from typing import Any

from queue_workflows import errors
from queue_workflows.cli import input_option, output
from queue_workflows.dag import answers as node_answers
from queue_workflows.runtime import signals
from queue_workflows.types import Row


def default(spec: dict[str, Any]) -> Any:
    """Return the answer that `--yes` gives.

    It is the step's own `default`, else its first option, all options of a multiple choice, nothing
    for an upload, and true for any other question. Raises `InputRefused` for a question that takes
    a text, a number, a list or an object: nobody knows which.
    """
    if "default" in spec:
        return spec["default"]
    found = options(spec)
    if found:
        values = [value for _, value in found]
        return values if spec.get("multiple") else values[0]
    if spec.get("widget") in ("file_upload", "pick_or_upload", "choose_one"):
        return None
    if named := node_answers.other_type(spec):
        raise errors.InputRefused(f"the question has no default: its answer is of type {named}")
    return True


def options(spec: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the choices as (label, value), each label one line.

    [] for a question without choices.
    """
    return [(output.line(label), value) for label, value in node_answers.options(spec)]


def ask(node: Row, stop: signals.StopRequest) -> tuple[bool, Any]:
    """Ask on stderr and stdin until the answer fits.

    Return (True, value), or (False, None) for none. An empty line takes the answer of `--yes`. None
    at the end of the input or when asked to stop.
    """
    spec: dict[str, Any] = node["input_spec"]
    choices = options(spec)
    prompt = output.line(spec.get("prompt") or f"{node['node_id']}: your answer?", 500)
    listed = [f"  {number}  {label}\n" for number, (label, _) in enumerate(choices, 1)]
    sys.stderr.write(f"{prompt}\n{''.join(listed)}")
    while True:
        sys.stderr.write(f"[{output.line(_offered(spec), 60)}] > ")
        sys.stderr.flush()
        text = _line(stop)
        if text is None:
            return False, None
        try:
            found = read(text.strip(), spec)
            node_answers.check_type(spec, found, node["node_id"])
        except errors.InputRefused as error:
            output.complain(output.line(error, 500))
        else:
            return True, found


def _offered(spec: dict[str, Any]) -> str:
    """Return what an empty line answers, or the type of the answer if that is refused."""
    try:
        value = default(spec)
    except errors.InputRefused:
        return str(node_answers.other_type(spec))
    return f"Enter: {value if isinstance(value, str) else repr(value)}"


def read(text: str, spec: dict[str, Any]) -> Any:
    """Return the answer of a typed line; raise `InputRefused` if it names no choice."""
    if not text:
        return default(spec)
    choices = options(spec)
    if not choices:
        is_text = node_answers.type_of(spec) == "string"
        return text if is_text else input_option.value_of(text, "answer")
    if spec.get("multiple"):
        return [_choice(part.strip(), choices) for part in text.split(",")]
    return _choice(text, choices)


def _choice(text: str, choices: list[tuple[str, Any]]) -> Any:
    if text.isdecimal() and 1 <= int(text) <= len(choices):
        return choices[int(text) - 1][1]
    for label, value in choices:
        if text == label:
            return value
    raise errors.InputRefused(
        f"{text!r} is none of the choices: type a number from 1 to {len(choices)}"
    )


def _line(stop: signals.StopRequest) -> str | None:
    # input() would continue to read after a signal: its handler only sets the flag.
    while not stop.requested.is_set():
        ready, _, _ = select.select([sys.stdin, stop.requested], [], [], signals.RECHECK_S)
        if sys.stdin in ready:
            return sys.stdin.readline() or None
    return None
