"""The description of the API is complete and valid, and says nothing that is not so. That every answer is as described
is checked on all answers of the tests in this folder: support/declared.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.declared import Asked, Undeclared, check, description

from portalmq import wire
from portalmq.broker.api import docs, openapi
from portalmq.broker.api.app import create_app
from portalmq.broker.api.query import Parameters, decoder_of
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.dashboard.routes import DASHBOARD_ROUTES
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.server.http import heads
from portalmq.errors import InvalidRequest

EVERY = (*ROUTES, *PROTOCOL_ROUTES)
IDS = [f"{route.method} {route.path}" for route in EVERY]


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def valid(schema: Any, value: Any) -> bool:
    components = {"schemas": description()["components"]["schemas"]}
    return jsonschema_rs.is_valid({**schema, "components": components}, value)


def test_the_description_is_valid() -> None:
    OpenAPIV31SpecValidator(description()).validate()


def test_every_route_is_described_and_nothing_else() -> None:
    described = sorted((method, path) for method, path, _ in operations())
    assert described == sorted((route.method, route.path.replace("<", "{").replace(">", "}")) for route in EVERY)


def test_every_route_of_a_broker_is_described_but_those_of_the_dashboard(broker: Any) -> None:
    """They are pages for browsers, and the document says that they are left out."""
    app = create_app(broker, BrokerConfig(), Metrics("test"), Auth(), more=PROTOCOL_ROUTES, pages=DASHBOARD_ROUTES)
    served = {
        (method, rule.rule.replace("<", "{").replace(">", "}"))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    left_out = served - {(method, path) for method, path, _ in operations()}
    assert ("GET", "/ui/") in left_out
    assert all(path == "/ui" or path.startswith("/ui/") for _, path in left_out), left_out
    assert "Every route is here but those below /ui/" in description()["info"]["description"]


def test_what_the_document_leaves_out_changes_nothing_but_a_session() -> None:
    changing = {route.path for route in DASHBOARD_ROUTES if route.method != "GET"}
    assert changing == {"/ui/login", "/ui/logout"}


def test_every_operation_has_an_id_of_its_own() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("route", EVERY, ids=IDS)
def test_every_route_says_what_it_takes_and_answers(route: Any) -> None:
    operation = description()["paths"][route.path.replace("<", "{").replace(">", "}")][route.method.lower()]
    assert operation.get("summary")
    assert any(int(status) < 300 for status in operation["responses"])
    for parameter in operation.get("parameters", ()):
        assert parameter["schema"], parameter
        assert "example" in parameter or not parameter.get("required"), parameter
    if route.query is not None:
        named = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
        assert named == {field.encode_name for field in msgspec.structs.fields(route.query)}
    assert ("requestBody" in operation) == (route.body is not None)


def test_every_json_body_has_an_example_that_is_valid() -> None:
    missing = []
    for method, path, operation in operations():
        contents = [operation.get("requestBody", {}).get("content", {})]
        contents += [answer.get("content", {}) for answer in operation["responses"].values()]
        for content in contents:
            for media, details in content.items():
                for example in details.get("examples", {}).values():
                    assert valid(details["schema"], example["value"]), (method, path, media, example)
                if "$ref" in json.dumps(details.get("schema", {})) and "examples" not in details:
                    missing.append((method, path, media))
    assert missing == []


def test_every_error_has_an_example_that_is_valid() -> None:
    for response in description()["components"]["responses"].values():
        problem = response["content"][wire.PROBLEM]
        assert set(problem["examples"]) == set(problem["schema"]["allOf"][1]["properties"]["code"]["enum"])
        for example in problem["examples"].values():
            assert valid(problem["schema"], example["value"]), example


def test_the_examples_of_requests_are_accepted() -> None:
    for route in EVERY:
        kinds = route.body.values() if isinstance(route.body, dict) else [route.body]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                assert wire.decode_json(json.dumps(openapi.example_of(kind)).encode(), kind) is not None


def test_the_errors_of_the_server_are_described() -> None:
    known = [heads.LineTooLong, heads.UnsupportedCoding, heads.ExpectationFailed, heads.HeadTooLarge]
    assert set(known) == set(heads.RefusedHead.__subclasses__())
    assert [(each.status, each.code, each.title) for each in known] == list(openapi.OF_THE_SERVER)


def test_every_error_code_is_described() -> None:
    from portalmq.errors import ERRORS_BY_CODE

    described = {
        code
        for response in description()["components"]["responses"].values()
        for code in response["content"][wire.PROBLEM]["examples"]
    }
    assert set(ERRORS_BY_CODE) - described == {"method_not_allowed"}, "no operation has another method"


def test_the_description_is_served_once_and_then_known(client: Any) -> None:
    first = client.get("/openapi.json")
    assert first.get_json()["paths"] == {
        path: described for path, described in description()["paths"].items() if is_of_the_broker(path)
    }
    again = client.get("/openapi.json", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    other = client.get("/openapi.json", headers={"If-None-Match": '"another"'})
    assert (other.status_code, other.data) == (200, first.data)


def is_of_the_broker(path: str) -> bool:
    return path in {route.path.replace("<", "{").replace(">", "}") for route in ROUTES}


@pytest.mark.parametrize(("secrets", "needed"), [([], [{}, {"token": []}]), (["s"], [{"token": []}])])
def test_the_description_says_whether_a_token_is_needed(broker: Any, secrets: list[str], needed: Any) -> None:
    client = create_app(broker, BrokerConfig(), Metrics("0"), Auth(secrets)).test_client()
    described = client.get("/openapi.json", headers={"Authorization": "Bearer s"}).get_json()
    assert described["security"] == needed
    assert described["paths"]["/livez"]["get"]["security"] == [{}]


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_takes_nothing_from_elsewhere(client: Any) -> None:
    page, script = client.get("/docs"), client.get("/docs/openapi-explorer.js")
    assert 'src="/docs/openapi-explorer.js"' in page.text
    assert "//" not in page.text.replace("<!doctype", "")
    for answer in (page, script):
        policy = answer.headers["Content-Security-Policy"]
        assert "http" not in policy
        assert "default-src 'none'; script-src 'self';" in policy
    assert len(script.data) < 1_000_000


def test_the_vendored_script_is_what_its_page_says() -> None:
    folder = Path(docs.__file__).parent / "vendored"
    digest = hashlib.sha256((folder / docs.EXPLORER).read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
    assert "Apache License" in (folder / "openapi-explorer.LICENSE").read_text()


# --- parameters ------------------------------------------------------------------------------------------------------


class Some(Parameters):
    """`number`: one of them."""

    number: wire.Positive
    word: wire.Acks = "all"
    flag: bool = False
    text: str | None = None


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("number=1", Some(1)),
        ("number=7&word=none&flag=true&text=%20", Some(7, "none", True, " ")),
        ("number=7&text=", Some(7, text="")),
    ],
)
def test_a_query_is_decoded_into_its_type(query: str, expected: Some) -> None:
    decoded = decoder_of(Some)(query)
    assert msgspec.structs.astuple(decoded) == msgspec.structs.astuple(expected)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("", "'number' is missing"),
        ("number=1&number=1", "given twice"),
        ("number=1&nmber=1", "no query parameter 'nmber' here; known: number, word, flag, text"),
        ("number=0", "at least 1"),
        ("number=9007199254740992", "at most 9007199254740991"),
        *((f"number={text}", "whole number") for text in ("", "x", "1.0", "1e3", "+1", "1_0", "%201", "٣", "9" * 21)),
        ("number=1&word=some", "one of all, leader, none"),
        *((f"number=1&flag={text}", "one of true, false") for text in ("1", "True", "")),
    ],
)
def test_a_wrong_query_is_refused(query: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        decoder_of(Some)(query)


# --- the check itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "media", "body"),
    [
        (418, wire.PROBLEM, b"{}"),
        (200, "text/html", b"x"),
        (200, wire.JSON, b'{"topics": 1}'),
        (200, wire.JSON, b'{"topics": [], "more": true}'),
        (503, wire.PROBLEM, b'{"code": "unavailable"}'),
    ],
)
def test_an_answer_that_is_not_described_is_found(status: int, media: str, body: bytes) -> None:
    check(Asked("GET", "/v1/topics"), 200, {"content-type": wire.JSON}, b'{"topics": []}')
    with pytest.raises(Undeclared):
        check(Asked("GET", "/v1/topics"), status, {"content-type": media}, body)
