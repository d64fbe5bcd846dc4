"""Every route but three needs a token."""

from __future__ import annotations

import pytest

from portalmq.broker.api.app import create_app
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.cluster.exits import UsageError
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
from portalmq.broker.server.auth import Auth, auth_from
from portalmq.broker.server.config import BrokerConfig

OPEN = {"/livez", "/readyz", "/healthz"}


@pytest.fixture
def guarded(broker):
    app = create_app(broker, BrokerConfig(), Metrics("0"), Auth(["first", "zweites-Geheimnis-ü"]), more=PROTOCOL_ROUTES)
    return app.test_client()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_but_the_three_refuses_without_a_token(guarded, broker, problem_of, route):
    path = route.path.replace("<topic>", "t").replace("<group>", "g").replace("<partition>", "0")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Authorization": "Bearer first2"}):
        answer = guarded.open(path, method=route.method, headers=headers, data=b"{}")
        if route.path in OPEN:
            assert answer.status_code == 200
        else:
            problem_of(answer, 401, "unauthorized")
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="portalmq"'
    assert broker.made == []


def test_open_routes_show_only_the_status_without_a_token(guarded, broker):
    told = {"/livez": {"status": "ok"}, "/readyz": {"status": "ready"}, "/healthz": {"status": "ok"}}
    checking = {"/docs"}  # it refuses by itself: test_docs_send_browsers_to_the_sign_in
    assert {route.path for route in (*ROUTES, *PROTOCOL_ROUTES) if route.is_open} == {*told, *checking}
    for path, expected in told.items():
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "PortalMQ-Broker 00"}):
            answer = guarded.get(path, headers=headers)
            assert (answer.status_code, answer.get_json()) == (200, expected)
    known = {"Authorization": "Bearer first"}
    assert guarded.get("/readyz", headers=known).get_json() == {"status": "ready", "broker_id": broker.broker_id}
    assert guarded.get("/healthz", headers=known).get_json() == {"status": "ready", **broker.health()}


def test_docs_send_browsers_to_the_sign_in(guarded, problem_of):
    answer = guarded.get("/docs", headers={"Accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["Location"], answer.data) == (303, "/ui/login?next=/docs", b"")
    problem_of(guarded.get("/docs", headers={"Accept": "*/*"}), 401, "unauthorized")
    known = {"Authorization": "Bearer first", "Accept": "text/html"}
    assert guarded.get("/docs", headers=known).status_code == 200


def test_an_unknown_path_is_refused_too(guarded, problem_of):
    problem_of(guarded.get("/v1/nothing"), 401, "unauthorized")
    problem_of(guarded.put("/v1/topics"), 401, "unauthorized")
    problem_of(guarded.options("/v1/topics"), 401, "unauthorized")


@pytest.mark.parametrize(
    "shown",
    ["Bearer first", "bearer first", "first", "BEARER  first", "Bearer zweites-Geheimnis-ü".encode().decode("latin-1")],
)
def test_a_secret_is_accepted_as_bearer_and_bare(guarded, shown):
    assert guarded.get("/v1/topics", headers={"Authorization": shown}).status_code == 200


def test_a_token_file_has_one_secret_a_line(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("# for the sensors\nalpha\n\n  beta  \n")
    auth = auth_from(BrokerConfig(token_file=file, secret="gamma"))
    assert [auth.allows(f"Bearer {word}") for word in ("alpha", "beta", "gamma", "# for the sensors", "")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("content", ["", "# nothing\n\n"])
def test_a_token_file_without_a_secret_does_not_open_the_broker(tmp_path, content):
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(UsageError, match="holds no token"):
        auth_from(BrokerConfig(token_file=file))
    with pytest.raises(UsageError, match="cannot be read"):
        auth_from(BrokerConfig(token_file=tmp_path / "missing"))


def test_without_a_token_only_loopback_is_served():
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert not auth_from(BrokerConfig(host=host)).needed
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UsageError, match="--insecure"):
            auth_from(BrokerConfig(host=host))
        assert not auth_from(BrokerConfig(host=host, insecure=True)).needed
        assert auth_from(BrokerConfig(host=host, secret="s")).needed


def test_a_token_needs_a_zookeeper_that_others_cannot_read():
    there = {"zookeeper": "zk1:2181/portalmq", "secret": "s"}
    with pytest.raises(UsageError, match="--zookeeper-user") as refused:
        auth_from(BrokerConfig(**there))
    assert refused.value.exit_code == 2
    user = {"zookeeper_user": "u", "zookeeper_password": "p"}
    for more in (user, {"insecure_zookeeper": True}, {"zookeeper": "127.0.0.1:2181"}, {"zookeeper": "none"}):
        assert auth_from(BrokerConfig(**{**there, **more})).needed
    assert not auth_from(BrokerConfig(zookeeper="zk1:2181")).needed


def test_secrets_do_not_show_in_the_settings():
    assert "hunter2" not in repr(BrokerConfig(secret="hunter2"))
