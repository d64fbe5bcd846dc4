"""Answers, held against the description of the API: its statuses, media types, headers and bodies.

Bodies are checked more strictly than the description promises to clients: an answer has no other member.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jsonschema_rs
import msgspec
import pytest
from flask import Flask

from portalmq import wire
from portalmq.broker.api.openapi import describe
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES

Json = dict[str, Any]
LINES = {wire.NDJSON, wire.EVENT_STREAM}


@cache
def description() -> Json:
    """Return the description of all routes, as clients get it."""
    described = describe((*ROUTES, *PROTOCOL_ROUTES), "0", needs_token=False)
    return json.loads(msgspec.json.encode(described))  # type: ignore[no-any-return]


class Asked(NamedTuple):
    method: str
    path: str


class Undeclared(AssertionError):
    """An answer that the description does not have."""


def check(asked: Asked, status: int, headers: dict[str, str], body: bytes, *, refused: bool = False) -> None:
    """Raise Undeclared for an answer that is not declared. `headers` have names in lower case. `refused`: an error that
    a test has planted, whichever the route declares."""
    operation = operation_of(asked)
    media = headers.get("content-type", "").partition(";")[0]
    answer = operation["responses"].get(str(status)) if operation is not None else None
    if refused or operation is None or asked.method == "OPTIONS" or (asked.method == "HEAD" and status == 405):
        if media == wire.PROBLEM and body:
            _validate(_validator("Problem", is_closed=False), json.loads(body), asked, status)
        return
    if answer is None:
        raise Undeclared(f"{asked} is answered {status} {body[:300]!r}, which is not declared")
    name = answer.get("$ref", "").rpartition("/")[2]
    answer = description()["components"]["responses"][name] if name else answer
    for header, details in answer.get("headers", {}).items():
        if details.get("required") and header.lower() not in headers:
            raise Undeclared(f"{asked} is answered {status} without {header}")
    content = answer.get("content", {})
    if not content:
        if body:
            raise Undeclared(f"{asked} is answered {status} with a body: {body[:300]!r}")
        return
    if media not in content:
        raise Undeclared(f"{asked} is answered {status} as {media!r}, which is not declared: {body[:300]!r}")
    if body and asked.method != "HEAD":
        schema = content[media].get("x-line-schema", content[media].get("schema"))
        for value in _values(media, body) if schema is not None else ():
            _validate(_compiled(json.dumps(schema)), value, asked, status)


def operation_of(asked: Asked) -> Json | None:
    """Return the operation that a request is for."""
    method = "get" if asked.method == "HEAD" else asked.method.lower()
    for pattern, operations in _paths():
        if method in operations and pattern.fullmatch(asked.path):
            return operations[method]  # type: ignore[no-any-return]
    return None


@cache
def _paths() -> list[tuple[re.Pattern[str], Json]]:
    return [(re.compile(re.sub(r"{.*?}", "[^/]+", path)), each) for path, each in description()["paths"].items()]


def _values(media: str, body: bytes) -> Iterator[Any]:
    if media == wire.NDJSON:
        yield from map(json.loads, body.splitlines())
    elif media.endswith("msgpack"):
        yield msgspec.to_builtins(msgspec.msgpack.decode(body))  # bytes as base64, as in the description
    elif media == wire.EVENT_STREAM:
        yield from (json.loads(data) for data in re.findall(rb"^data: (.*)$", body, re.MULTILINE))
    elif media.endswith("json"):
        yield json.loads(body)
    else:
        yield body.decode("utf-8")


def _validate(validator: Any, value: Any, asked: Asked, status: int) -> None:
    for error in validator.iter_errors(value):
        raise Undeclared(f"the answer {status} to {asked} is not as described: {error}")


@cache
def _compiled(schema: str) -> Any:
    return jsonschema_rs.validator_for({**json.loads(schema), "components": {"schemas": _closed()}})


@cache
def _validator(name: str, *, is_closed: bool) -> Any:
    schemas = _closed() if is_closed else description()["components"]["schemas"]
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


@cache
def _closed() -> Json:
    """Return the schemas without room for members that they do not name."""
    schemas = description()["components"]["schemas"]
    return {
        name: {"additionalProperties": False, **schema} if "properties" in schema else schema
        for name, schema in schemas.items()
    }


@pytest.fixture(autouse=True)
def _declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold every answer of an application in this process against the description, when its last byte is read."""
    serve = Flask.__call__

    def checked(app: Flask, environ: Json, start_response: Callable[..., Any]) -> Iterable[bytes]:
        begun: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            begun[:] = [int(status[:3]), {name.lower(): value for name, value in headers}]
            return start_response(status, headers, *more)

        asked = Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        return _Checked(serve(app, environ, start), lambda body: check(asked, *begun, body, refused=_is_refused(app)))

    monkeypatch.setattr(Flask, "__call__", checked)


def _is_refused(app: Any) -> bool:
    return getattr(app.wsgi_app._context.broker, "refuse", None) is not None


class _Checked:
    """The parts of an answer, which is checked at its end."""

    def __init__(self, parts: Iterable[bytes], done: Callable[[bytes], None]) -> None:
        self._parts = parts
        self._done = done

    def __iter__(self) -> Iterator[bytes]:
        read = bytearray()
        for part in self._parts:
            read += part
            yield part
        self._done(bytes(read))

    def close(self) -> None:
        if hasattr(self._parts, "close"):
            self._parts.close()
