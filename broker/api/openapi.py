"""The description of the HTTP API, OpenAPI 3.1.1, made from the route table and the types that it names.

    Route -> operation:  view's docstring -> summary, description       query, headers -> parameters
                         body, answers (Structs) -> schemas, by msgspec  errors -> responses with their codes

Nothing is described by hand but what no type says: the texts of this module, and described.py. Tests compare the
description with the route table, and every answer with the description.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from portalmq import wire
from portalmq.broker.api.answers import Problem
from portalmq.broker.api.described import EXAMPLES, FIELDS
from portalmq.broker.api.problems import RETRY_AFTER_STATUSES, InternalError
from portalmq.broker.api.request_headers import ForwardHeaders
from portalmq.broker.api.route import Answer, Body, Lines, Link, Route
from portalmq.errors import (
    Backpressure,
    Forbidden,
    InvalidRequest,
    MessageTooLarge,
    NotFound,
    NotLeader,
    PortalMQError,
    StorageFull,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)

Json = dict[str, Any]

REF = "#/components/schemas/{name}"
ANY_TYPE = "*/*"
ABOUT = """A distributed message queue: topics in partitions, queue groups with leases, stream groups with offsets.

Every broker answers every call, in one hop to the leader of a partition. `PortalMQ-No-Forward: 1` asks for 421
`not_leader` with the leader's URL instead.

Every error is a problem document (RFC 9457) with a stable `code`. `retryable` says whether a repeat may help, `outcome`
what is known of the request. An unknown path is 404 `not_found`, a method that a path does not have 405
`method_not_allowed`, and HEAD is GET without the body. Brokers call each other at /internal/v1/, which clients may not.

Every route is here but those below /ui/: the dashboard's pages are for browsers, and what they ask for beside this API
is their own, changes nothing but the browser's session, and may change with any version.

Whole numbers have no fraction and no exponent. In MessagePack, what has `contentEncoding` here is binary."""

# Errors of every call, those of the server below the routes among them (their classes are above this room).
OF_EVERY_CALL = (InvalidRequest, InternalError)
OF_THE_SERVER = (
    (414, "uri_too_long", "The request line is too long"),
    (415, "unsupported_media_type", "The transfer coding is not supported"),
    (417, "expectation_failed", "The expectation is not supported"),
    (431, "headers_too_large", "The header fields are too many or too large"),
)
OF_READY_BROKERS = (Backpressure, StorageFull, Unavailable)
OF_CALLERS = (Unauthorized, Forbidden)
OF_BODIES = (MessageTooLarge, UnsupportedMediaType)

NAME: Json = {"type": "string", "pattern": wire.NAME_PATTERN}
MESSAGE_ID: Json = {"type": "string", "pattern": "^[0-9]{1,16}-[0-9]{1,16}$"}
# The parameters in paths, with an example.
PATH_PARAMETERS: dict[str, tuple[Json, Any]] = {
    "topic": (NAME, "orders"),
    "group": (NAME, "billing"),
    "lock": (NAME, "nightly-job"),
    "schedule": (NAME, "nightly-report"),
    "member": (NAME, "worker-1"),
    "message_id": (MESSAGE_ID, "0-17"),
    "partition": ({"type": "integer", "minimum": 0, "maximum": wire.INTEGER_MAX}, 0),
}


class _Error(NamedTuple):
    status: int
    code: str
    title: str


def describe(routes: Iterable[Route], version: str, *, needs_token: bool) -> Json:
    """Return the description of these routes."""
    return _Description(tuple(routes)).document(version, needs_token=needs_token)


class _Description:
    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._routes = routes
        self._ids = {(route.method, route.path): _operation_id(route.view) for route in routes}
        kinds = list(dict.fromkeys((Problem, *(kind for route in routes for kind in _kinds_of(route)))))
        schemas, self._schemas = msgspec.json.schema_components(kinds, ref_template=REF)
        self._schema_of = dict(zip(kinds, schemas, strict=True))
        for (owner, name), schema in FIELDS.items():
            for struct in _kin(owner):
                if struct.__name__ in self._schemas:
                    described = self._schemas[struct.__name__]
                    if name:
                        described["properties"][name] = schema
                    else:
                        described["additionalProperties"] = schema
        self._responses: dict[str, Json] = {}

    def document(self, version: str, *, needs_token: bool) -> Json:
        paths: dict[str, Json] = {}
        for route in self._routes:
            at = paths.setdefault(re.sub("<(.*?)>", r"{\1}", route.path), {})
            at[route.method.lower()] = self._operation(route, needs_token=needs_token)
        return {
            "openapi": "3.1.1",
            "info": {
                "title": "PortalMQ",
                "version": version,
                "description": ABOUT,
                "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/", "description": "This broker"}],
            "security": [{"token": []}] if needs_token else [{}, {"token": []}],
            "tags": [{"name": tag} for tag in dict.fromkeys(map(_tag, self._routes))],
            "paths": paths,
            "components": {
                "schemas": {name: _tidied(schema) for name, schema in sorted(self._schemas.items())},
                "responses": dict(sorted(self._responses.items())),
                "securitySchemes": {
                    "token": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "One of the broker's tokens, if it has any.",
                    }
                },
            },
        }

    def _operation(self, route: Route, *, needs_token: bool) -> Json:
        summary, _, more = inspect.cleandoc(_view(route.view).__doc__ or "").partition("\n\n")
        summary, _, rest = " ".join(summary.split()).partition(". ")
        operation: Json = {
            "operationId": self._ids[route.method, route.path],
            "tags": [_tag(route)],
            "summary": summary.removesuffix("."),
            "description": "\n\n".join(filter(None, (rest, inspect.cleandoc(more)))),
            "parameters": [*self._parameters(route)],
        }
        if route.body is not None:
            operation["requestBody"] = {"required": self._is_required(route.body), "content": self._content(route.body)}
        operation["responses"] = self._answers(route)
        if route.is_open:
            operation["security"] = [{}]
        return {name: value for name, value in operation.items() if value not in ("", [])}

    def _answers(self, route: Route) -> Json:
        answers: Json = {}
        for status, given in route.answers.items():
            answer = given if isinstance(given, Answer) else Answer(given)
            shown: Json = {"description": _status_text(status)}
            if answer.headers:
                shown["headers"] = {
                    name: {"description": text, "schema": {"type": "string"}} for name, text in answer.headers.items()
                }
            if answer.body is not None:
                shown["content"] = self._content(answer.body)
            if status < 300 and route.links:
                shown["links"] = {_operation_id(link.view): self._link(link) for link in route.links}
            answers[str(status)] = shown
        by_status: dict[int, list[_Error]] = {}
        for error in _errors_of(route):
            if error not in by_status.setdefault(error.status, []):
                by_status[error.status].append(error)
        for status, errors in sorted(by_status.items()):
            answers[str(status)] = self._problem(status, errors)
        return answers

    def _problem(self, status: int, errors: list[_Error]) -> Json:
        codes = sorted({error.code for error in errors})
        name = ".".join((str(status), *codes))
        if name not in self._responses:
            schema = {"properties": {"status": {"const": status}, "code": {"enum": codes}}}
            response: Json = {
                "description": "; ".join(dict.fromkeys(error.title for error in errors)),
                "content": {
                    wire.PROBLEM: {
                        "schema": {"allOf": [self._schema_of[Problem], schema]},
                        "examples": {error.code: {"value": _example_of(error)} for error in errors},
                    }
                },
            }
            if status in RETRY_AFTER_STATUSES:
                seconds = {"type": "integer", "minimum": 1}
                response["headers"] = {
                    "Retry-After": {"description": "In seconds.", "required": True, "schema": seconds}
                }
            if status == Unauthorized.status:
                response["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
            self._responses[name] = response
        return {"$ref": f"#/components/responses/{name}"}

    def _link(self, link: Link) -> Json:
        shown: Json = {"operationId": _operation_id(link.view), "parameters": dict(link.parameters)}
        return shown if link.body is None else {**shown, "requestBody": link.body}

    # --- parameters and bodies ---------------------------------------------------------------------------------------

    def _parameters(self, route: Route) -> Iterator[Json]:
        for name in re.findall("<(.*?)>", route.path):
            schema, example = PATH_PARAMETERS[name]
            yield {"name": name, "in": "path", "required": True, "schema": schema, "example": example}
        if route.query is not None:
            yield from _parameters_of(route.query, "query")
        if route.headers is not None:
            yield from _parameters_of(route.headers, "header")
        if NotLeader in route.errors:
            yield from _parameters_of(ForwardHeaders, "header")

    def _content(self, body: Body) -> Json:
        return {media: self._media(kind) for media, kind in _by_media(body).items()}

    def _media(self, kind: Any) -> Json:
        if isinstance(kind, Lines):
            return {"schema": {"type": "string"}, "x-line-schema": self._schema_of[kind.kind]}
        kinds = _alternatives(kind)
        shown: Json = {}
        if kind is not bytes:  # any bytes: no schema
            schemas = [{"type": "string"} if each is str else self._schema_of[each] for each in kinds]
            shown["schema"] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        named = {_name_of(each): {"value": example_of(each)} for each in kinds if example_of(each) is not None}
        return {**shown, "examples": named} if named else shown

    def _is_required(self, body: Body) -> bool:
        return all(self._schemas.get(_name_of(kind), {}).get("required") for kind in _by_media(body).values())


# --- parts of a route ------------------------------------------------------------------------------------------------


def _view(view: Any) -> Any:
    """Return the function of a view."""
    while isinstance(view, partial):
        view = view.func
    return inspect.unwrap(view)


def _operation_id(view: Any) -> str:
    bound: Iterable[str] = view.keywords.values() if isinstance(view, partial) else ()
    function = _view(view)
    module: str = function.__module__
    return "_".join((module.rpartition(".")[2], function.__name__, *bound))


def _tag(route: Route) -> str:
    module: str = _view(route.view).__module__
    if ".protocols." in module:
        return module.rpartition(".")[2]
    first, _, rest = route.path[1:].partition("/")
    return rest.partition("/")[0] if first == "v1" else "cluster"


def _errors_of(route: Route) -> Iterator[_Error]:
    classes: Sequence[type[PortalMQError]] = (
        *OF_EVERY_CALL,
        *(() if route.is_open else OF_CALLERS),
        *(() if route.while_starting else OF_READY_BROKERS),
        *(OF_BODIES if route.body is not None else ()),
        *((NotFound,) if "<" in route.path else ()),
        *route.errors,
    )
    yield from (_Error(each.status, each.code, each.title) for each in classes)
    yield from (_Error(*each) for each in OF_THE_SERVER)


def _by_media(body: Body) -> Mapping[str, Any]:
    return body if isinstance(body, Mapping) else {wire.JSON: body}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) and not isinstance(kind, Lines) else (kind,)


def _kinds_of(route: Route) -> Iterator[Any]:
    """Yield the types of the route's bodies."""
    answers = [given.body if isinstance(given, Answer) else given for given in route.answers.values()]
    for body in (route.body, *answers):
        for kind in _by_media(body).values():
            for each in _alternatives(kind.kind if isinstance(kind, Lines) else kind):
                if each not in {None, str, bytes}:
                    yield each


def _name_of(kind: Any) -> str:
    name: str = getattr(kind, "__name__", "value")
    return name


def example_of(kind: Any) -> Any:
    """Return the example of a type: from the table, or from its class."""
    return EXAMPLES.get(kind, getattr(kind, "__dict__", {}).get("example"))


def _kin(kind: type[Any]) -> list[type[Any]]:
    """Return a Struct, and those that inherit its fields."""
    return [kind, *(deeper for direct in kind.__subclasses__() for deeper in _kin(direct))]


def _example_of(error: _Error) -> Json:
    known: Json = {"status": error.status, "code": error.code, "title": error.title}
    named = type("Named", (PortalMQError,), known)
    problem: Json = named("what is wrong, and what to do").problem()
    return problem


def _status_text(status: int) -> str:
    return HTTPStatus(status).phrase


# --- parameters ------------------------------------------------------------------------------------------------------


def _parameters_of(kind: type[msgspec.Struct], place: str) -> Iterator[Json]:
    """Yield the parameters that the fields of a Struct are."""
    texts = dict(re.findall(r"`([\w-]+)`: (.*?)(?= `[\w-]+`: |$)", " ".join((kind.__doc__ or "").split())))
    annotations = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        shown: Json = {"name": field.encode_name, "in": place, "schema": _schema_of_parameter(annotations[field.name])}
        if field.encode_name in texts:
            shown["description"] = texts[field.encode_name]
        if field.required:
            shown["required"] = True
            shown["example"] = PATH_PARAMETERS.get(field.name, (None, 1))[1]
        elif isinstance(field.default, bool | int | str) and field.default != "":
            shown["schema"] = {**shown["schema"], "default": field.default}
        yield shown


def _schema_of_parameter(annotation: Any) -> Json:
    """Return the schema of an annotation, without None, which no parameter can say."""
    if get_origin(annotation) in {Union, UnionType}:
        inner = [each for each in get_args(annotation) if each is not NoneType]
        annotation = inner[0] if len(inner) == 1 else Union[tuple(inner)]  # noqa: UP007
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and "type" in (meta.extra_json_schema or {}):
            return dict(meta.extra_json_schema or {})
    return msgspec.json.schema(annotation)


def _tidied(schema: Any) -> Any:
    """Return a schema with the line breaks of its docstrings removed."""
    if isinstance(schema, list):
        return [_tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    tidied = {name: _tidied(value) for name, value in schema.items()}
    if isinstance(tidied.get("description"), str):
        tidied["description"] = " ".join(tidied["description"].split())
    return tidied
