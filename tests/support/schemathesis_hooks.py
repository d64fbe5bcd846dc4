"""What schemathesis loads for generated_calls.py: it makes calls quick (short waits, few names), encodes MessagePack,
and holds each answer against the description."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import schemathesis
from support.declared import Asked, check

from portalmq import wire

NAMES = 5
WAIT_MS_MAX = 5
PARTITIONS_MAX = 3
# The disk of a test is not full, and a broker makes no mistakes.
SERVER_ERRORS = {503}
NAMED = ("topic", "to_topic", "dead_letter_topic", "group", "lock", "member", "name", "owner", "consumer")
NAMED += ("queue", "id")


@schemathesis.serializer(wire.BATCH_MSGPACK)
def as_msgpack(_context: Any, value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Keep the broker from growing and from waiting: few names, few partitions, short waits."""
    for part in (case.body, case.query, case.path_parameters):
        _shrink(part)
    for name, value in list((case.headers or {}).items()):
        if name.lower() == "accept" and wire.EVENT_STREAM in str(value):
            case.headers[name] = wire.JSON


def _shrink(part: Any) -> None:
    if isinstance(part, list):
        for each in part:
            _shrink(each)
    if not isinstance(part, dict):
        return
    for name, value in part.items():
        if name in ("wait_ms", "keep_place_ms") and str(value).isdigit():
            part[name] = min(int(value), WAIT_MS_MAX)
        elif name == "partitions" and isinstance(value, int):
            part[name] = min(value, PARTITIONS_MAX)
        elif name == "topics" and isinstance(value, list):
            part[name] = [_few(each) for each in value]
        elif name in NAMED:
            part[name] = _few(value)
        elif name in ("partitions", "publish", "offsets", "payload"):
            _shrink(value)


def _few(name: Any) -> Any:
    """Return one of a few names for a valid one."""
    return f"n{sum(map(ord, name)) % NAMES}" if isinstance(name, str) and wire.NAME.match(name) else name


@schemathesis.check
def as_declared(_context: Any, response: Any, case: Any) -> None:
    assert response.status_code < 500 or response.status_code in SERVER_ERRORS, response.content[:500]
    headers = {name.lower(): value[0] for name, value in response.headers.items()}
    path = unquote(urlsplit(response.request.url).path)
    check(Asked(case.method, path), response.status_code, headers, response.content)
