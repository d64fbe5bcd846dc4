"""A broker without a token answers programs, and no web page of another origin."""

from __future__ import annotations

import pytest

from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.api.origin_check import READING_METHODS, TAKING_PATHS
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig

PAGE = {"Origin": "http://evil.example"}
PROBES = {"/livez", "/readyz", "/healthz"}
EVERY = [route for route in (*ROUTES, *PROTOCOL_ROUTES) if route.path not in PROBES]
CHANGING = [route for route in EVERY if route.method not in READING_METHODS or route.path in TAKING_PATHS]


def served(broker, *secrets, **settings):
    app = create_app(broker, BrokerConfig(**settings), Metrics("0"), Auth(secrets), more=PROTOCOL_ROUTES)
    return app.test_client()


@pytest.fixture
def client(broker):
    return served(broker)


def ask(client, route, headers):
    path = route.path.replace("<partition>", "0").replace("<", "").replace(">", "")
    return client.open(path, method=route.method, headers=headers, data=b"{}")


@pytest.mark.parametrize(
    "headers",
    [
        PAGE,
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_another_page_changes_nothing(client, broker, problem_of, headers):
    for route in CHANGING:
        answer = ask(client, route, {"Host": "localhost:5000", **headers})
        assert "token" in problem_of(answer, 403, "forbidden")["detail"], route
    assert broker.made == []


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:5000", "127.0.0.1.evil.example", "localhost.evil.example."]
)
def test_nothing_is_read_or_changed_under_a_name_that_is_not_the_brokers(client, broker, problem_of, host):
    for route in EVERY:
        answer = ask(client, route, {"Host": host})
        assert "--allowed-hosts" in problem_of(answer, 403, "forbidden")["detail"], route
    assert broker.made == []


def test_open_routes_show_only_the_status_under_a_foreign_name(client):
    for path in PROBES:
        answer = client.get(path, headers={"Host": "evil.example"})
        assert (answer.status_code, set(answer.get_json())) == (200, {"status"})
    assert "disk_full" in client.get("/healthz").get_json()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:5000",
        "127.0.0.1:5000",
        "[::1]:5000",
        "[::1]",
        "192.0.2.7:80",
        "broker1:5000",
        "LOCALHOST",
        "",
    ]
    + ["mq.localhost:5000", "mq.example:5000", "MQ.example.:5000", "queue.example", "lb.example:8080"],
)
def test_programs_are_served_by_every_name_of_the_broker(broker, host):
    client = served(broker, advertised_url="http://mq.example:5000", allowed_hosts="queue.example, LB.example")
    assert client.get("/v1/topics", headers={"Host": host}).status_code == 200
    assert client.post("/v1/topics/t/messages", data=b"x", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://localhost:5000", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "HTTP://LOCALHOST:5000"},
        {"Origin": "https://mq.example"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
def test_the_brokers_own_pages_may_do_everything(broker, headers):
    client = served(broker, advertised_url="https://mq.example")
    headers = {"Host": "localhost:5000", **headers}
    assert client.post("/v1/topics/t/messages", data=b"x", headers=headers).status_code == 200


def test_a_link_from_another_page_may_be_followed(client):
    """Its answer stays unread: the broker sends no CORS header."""
    answer = client.get("/v1/topics", headers={**PAGE, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name[0].lower().startswith("access-control")]


def test_an_unknown_path_is_refused_too(client, problem_of):
    problem_of(client.post("/v1/nothing", headers=PAGE), 403, "forbidden")
    problem_of(client.get("/v1/nothing", headers={"Host": "evil.example"}), 403, "forbidden")


def test_with_a_token_the_token_alone_decides(broker, problem_of):
    client = served(broker, "secret")
    foreign = {**PAGE, "Host": "evil.example"}
    problem_of(client.post("/v1/topics/t/messages", data=b"x", headers=foreign), 401, "unauthorized")
    shown = {**foreign, "Authorization": "Bearer secret"}
    assert client.post("/v1/topics/t/messages", data=b"x", headers=shown).status_code == 200


def test_other_brokers_are_known_by_their_credential_and_not_by_a_name(client, problem_of):
    answer = client.post(f"{wire.INTERNAL_PATH}fetch", headers={"Host": "old-name.example"})
    problem_of(answer, 401, "unauthorized")


def test_every_get_that_takes_a_message_is_listed():
    taking = {route.path for route in PROTOCOL_ROUTES if getattr(route.view, "__name__", "") == "taken"}
    assert taking == TAKING_PATHS
