"""What a route is: its path, its view, and what it takes and answers. openapi.py describes it from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from flask import Response

from portalmq.broker.api.request_context import ResponseParts
from portalmq.errors import PortalMQError

# The type of a body: of JSON, or for each media type. Several types are alternatives, None is an empty body, `str` and
# `bytes` are text and any bytes, Lines is one of a type on each line.
Body = Any


class Lines(NamedTuple):
    """A body of which each line, or the data of each event, is JSON of this type."""

    kind: Any


class Answer(NamedTuple):
    """The body of an answer, and what its headers say besides those that all answers have."""

    body: Body
    headers: Mapping[str, str] = {}


class Link(NamedTuple):
    """The next call after an answer: the view of its route, and its parameters and body as runtime expressions."""

    view: Callable[..., Any]
    parameters: Mapping[str, str]
    body: Any = None


@dataclass(frozen=True, slots=True)
class Route:
    """A route. Its view takes the context, the names in the path, and `query` if that is given: the parameters of the
    query, decoded. A route without `query` ignores the query.

    GET /openapi.json shows the route, and tests hold every answer against that: `headers` of the request (for the
    description only), `body`, `answers` by status, `errors` besides those of every route, `links` to the calls that
    follow a success. The view's docstring is the description; that of a Struct of parameters has "`name`: …" for each.

    `is_open`: no token needed. `while_starting`: served before the broker is ready and while it drains. `is_traffic`: a
    POST whose view takes an HttpRequest after the context and returns ResponseParts; Dispatcher serves it in front of
    Flask if its path is fixed or has the form /v1/<first>/<name>/<last>."""

    method: str
    path: str
    view: Callable[..., Response | ResponseParts]
    query: type[msgspec.Struct] | None = None
    headers: type[msgspec.Struct] | None = None
    body: Body = None
    answers: Mapping[int, Body | Answer] = field(default_factory=dict)
    errors: tuple[type[PortalMQError], ...] = ()
    links: tuple[Link, ...] = ()
    is_open: bool = False
    while_starting: bool = False
    is_traffic: bool = False
