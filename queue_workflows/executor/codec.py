"""Encode and decode messages, one frame each.

A frame is a header with magic, version and length, then a JSON array of the message's kind and
fields. The functions of `json` are bound at import, because an app may replace them.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
import struct
from typing import Any, Final, cast, get_args, get_type_hints

from queue_workflows.dag import payload
from queue_workflows.executor import protocol
from queue_workflows.types import Unreadable

MAGIC: Final = b"qw\xff"
"""No UTF-8 text has its last byte, so printed text is never a header."""
VERSION: Final = 1
HEADER: Final = struct.Struct("!3sBI")
MAX_BYTES: Final = 256 * 1024 * 1024
"""Bytes of one message. A job has up to three values of 64 MiB each, the loader's limit."""
SHOWN: Final = 40
"""Bytes of garbage that an error shows."""


def _allowed(hint: Any) -> frozenset[type] | None:
    """Return the types that a field of this annotation may have; None: any."""
    if hint is Any:
        return None
    found = {getattr(each, "__origin__", each) for each in get_args(hint) or (hint,)}
    if hasattr(hint, "__origin__") and hint.__origin__ in (dict, list):
        found = {hint.__origin__}
    return frozenset(found | ({int} if float in found else set()))


_FIELDS: Final[dict[str, tuple[frozenset[type] | None, ...]]] = {
    name: tuple(_allowed(hint) for hint in get_type_hints(kind).values())
    for name, kind in protocol.KINDS.items()
}

_TIME, _UNREADABLE = "\0time", "\0unreadable"
_TAG = '{"\\u0000'
"""How a tagged value begins. No stored JSON has a NUL, so no value of an app looks like one."""


class _Encoder(payload.Encoder):
    """Encode the values of rows that JSON lacks."""

    def default(self, o: Any) -> Any:
        if isinstance(o, datetime.datetime):
            return {_TIME: o.isoformat()}
        if isinstance(o, Unreadable):
            return {_UNREADABLE: o.reason, "raw": base64.b64encode(o.raw).decode()}
        if isinstance(o, (frozenset, set)):
            return sorted(cast("set[str]", o))
        return super().default(o)


class _Decoder(json.JSONDecoder):
    """Decode JSON; an app that patches the base class changes nothing."""

    decode = json.JSONDecoder.decode
    raw_decode = json.JSONDecoder.raw_decode


def _untag(found: dict[str, Any]) -> Any:
    if (text := found.get(_TIME)) is not None:
        return datetime.datetime.fromisoformat(text)
    if (reason := found.get(_UNREADABLE)) is not None:
        return Unreadable(reason, base64.b64decode(found["raw"]))
    return found


_encode = _Encoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_decode = _Decoder().decode
_decode_tagged = _Decoder(object_hook=_untag).decode


def encode(*messages: protocol.Message) -> bytes:
    """Return the frames of these messages. Raises `ProtocolError` for one that cannot be sent."""
    parts: list[bytes] = []
    for message in messages:
        name = type(message).__name__
        try:
            body = _encode((name, *message)).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise protocol.ProtocolError(f"a {name} message cannot be sent: {error}") from None
        if len(body) > MAX_BYTES:
            raise protocol.ProtocolError(
                f"a {name} message cannot be sent: {len(body)} bytes, more than {MAX_BYTES}"
            )
        parts += HEADER.pack(MAGIC, VERSION, len(body)), body
    return b"".join(parts)


def length_of(buffer: bytearray | memoryview, at: int) -> int:
    """Return the length of the body after the header at `at`; raise `ProtocolError` for others."""
    magic, version, length = HEADER.unpack_from(buffer, at)
    if magic != MAGIC:
        raise protocol.ProtocolError(f"garbage in the channel: {_shown(buffer, at)}")
    if version != VERSION:
        raise protocol.ProtocolError(
            f"the peer uses version {version} of the protocol, not {VERSION}"
        )
    if length > MAX_BYTES:
        raise protocol.ProtocolError(f"a message of {length} bytes, more than {MAX_BYTES}")
    return length


def _shown(buffer: bytearray | memoryview, at: int) -> str:
    return repr(bytes(buffer[at : at + SHOWN]))[1:]


def decode(body: memoryview) -> protocol.Message:
    """Return the message of a frame's body. Raises `ProtocolError` for anything else."""
    try:
        text = str(body, "utf-8", "surrogatepass")
        found: Any = (_decode_tagged if _TAG in text else _decode)(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _garbage(body, str(error)) from None
    if type(found) is not list or not found:
        raise _garbage(body, "no array")
    name, *fields = cast("list[Any]", found)
    allowed = _FIELDS.get(name) if type(name) is str else None
    if allowed is None:
        raise _garbage(body, "an unknown kind")
    if len(fields) != len(allowed):
        raise _garbage(body, f"{name} has {len(allowed)} fields, not {len(fields)}")
    for kinds, value in zip(allowed, fields, strict=True):
        if kinds is not None and type(value) not in kinds:
            raise _garbage(body, f"a field of {name} is of type {type(value).__name__}")
    return protocol.KINDS[name](*fields)


def _garbage(body: memoryview, why: str) -> protocol.ProtocolError:
    line = re.sub(r"\s+", " ", why)[:200]
    return protocol.ProtocolError(f"garbage in the channel ({line}): {_shown(body, 0)}")
