"""The hosts that get a token, trusted certificates, and warnings about plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from support.scripted_broker import Reply, ScriptedBroker
from support.tls import TlsFront, key, pem

from portalmq import Admin, Consumer, Lock, Producer, Unavailable, wire
from portalmq.cli.main import main
from portalmq.network import trust
from portalmq.network.connection import parse_address
from portalmq.network.trust import may_receive_token

TOKEN = "a-secret"


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_warned", set())
    for name in ("PORTALMQ_TLS_CA", "PORTALMQ_ALLOW_ADVERTISED", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("advertised", "named", "told"),
    [
        ("http://one:5001", ["http://one:5000"], True),
        ("http://two:5000", ["http://one:5000", "http://two:5000"], True),
        ("http://two:5000", ["http://one:5000"], False),
        ("http://127.0.0.1:5002", ["http://localhost:5000"], True),
        ("http://[::1]:5002", ["http://127.0.0.1:5000"], True),
        ("http://two:5000", ["http://localhost:5000"], False),
        ("https://two:5000", ["https://one:5000"], True),
    ],
)
def test_hosts_that_may_receive_a_token(advertised: str, named: list[str], told: bool) -> None:
    assert may_receive_token(parse_address(advertised), map(parse_address, named)) is told


@pytest.fixture
def stranger() -> Iterator[ScriptedBroker]:
    """A broker on this machine, advertised under a host that the user did not name."""
    with ScriptedBroker() as broker:
        yield broker


@pytest.fixture
def broker(stranger: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedBroker]:
    monkeypatch.setattr(trust, "is_this_machine", lambda host: host == "127.0.0.1")
    with ScriptedBroker() as broker:
        broker.leader_url = stranger.url.replace("127.0.0.1", "localhost")
        yield broker


def test_an_advertised_host_does_not_get_the_token_if_disallowed(
    broker: ScriptedBroker, stranger: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with Producer(broker.url, token=TOKEN, allow_advertised=False) as producer:
        for _ in range(3):
            producer.send("t", b"x").result(30)
    assert (stranger.calls, len(broker.values("t"))) == ([], 3)
    assert all("portalmq-no-forward" not in call.headers for call in broker.calls)
    assert len([each for each in caplog.messages if "whose host is not among those" in each]) == 1


@pytest.mark.parametrize("by", ["default", "option", "no token"])
def test_an_advertised_host_is_used_unless_the_user_forbids_it(
    by: str, broker: ScriptedBroker, stranger: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by != "default":
        monkeypatch.setenv("PORTALMQ_ALLOW_ADVERTISED", "0")
    token = None if by == "no token" else TOKEN
    with Producer(broker.url, token=token, allow_advertised=True if by == "option" else None) as producer:
        producer.send("t", b"x").result(30)
    assert len(stranger.values("t")) == 1


def test_a_plain_text_token_is_warned_of_once_except_on_loopback(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Admin("http://queue.example:5000", token=TOKEN).close()
        Admin("http://localhost:5000", token=TOKEN).close()
        Admin("https://other.example:5000", token=TOKEN).close()
        Admin("http://another.example:5000").close()
    (said,) = caplog.messages
    assert "queue.example" in said
    assert TOKEN not in said


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def secure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker behind TLS, with a certificate that the system does not trust."""
    with ScriptedBroker() as broker, TlsFront(int(broker.url.rpartition(":")[2]), "server") as front:
        topics = Reply(body=msgspec.json.encode({"topics": [wire.TopicSummary("t", 1, 1)]}))
        broker.script("GET", "/v1/topics", [lambda broker, call: topics] * 9)
        yield f"https://localhost:{front.port}"


def test_an_option_or_the_environment_names_a_private_authority(secure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, Admin(secure) as admin:
        patched.setattr("portalmq.transport.reachability.FIRST_CONTACT_S", 0.0)  # one try, with the whole time
        with pytest.raises(Unavailable, match="certificate"):
            admin.topics()
    with Admin(secure, tls_ca=str(pem("authority"))) as admin:
        assert [topic.name for topic in admin.topics()] == ["t"]
    monkeypatch.setenv("PORTALMQ_TLS_CA", str(pem("authority")))
    with Admin(secure) as admin:
        assert [topic.name for topic in admin.topics()] == ["t"]
    with Producer(secure) as producer:
        producer.send("t", b"x").result(30)


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker behind TLS that requests a certificate from clients."""
    with ScriptedBroker() as broker:
        topics = Reply(body=msgspec.json.encode({"topics": [wire.TopicSummary("t", 1, 1)]}))
        broker.script("GET", "/v1/topics", [lambda broker, call: topics] * 9)
        with TlsFront(int(broker.url.rpartition(":")[2]), "server", asks_for_certificate=True) as front:
            monkeypatch.setenv("PORTALMQ_TLS_CA", str(pem("authority")))
            yield f"https://localhost:{front.port}"


def test_a_client_certificate_is_sent_to_brokers_that_request_one(
    asking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {"tls_client_cert": str(pem("client")), "tls_client_key": str(key("client"))}
    both = tmp_path / "both.pem"
    both.write_bytes(pem("client").read_bytes() + key("client").read_bytes())
    with Admin(asking, timeout_s=0.5) as admin, pytest.raises(Unavailable):
        admin.topics()
    for given in (shown, {"tls_client_cert": str(both)}):
        with Admin(asking, **given) as admin:  # type: ignore[arg-type]
            assert [topic.name for topic in admin.topics()] == ["t"]
    with Producer(asking, **shown) as producer:  # type: ignore[arg-type]
        producer.send("t", b"x").result(30)
    for name, file in shown.items():
        monkeypatch.setenv(f"PORTALMQ_{name}".upper(), file)
    with Admin(asking) as admin:
        assert [topic.name for topic in admin.topics()] == ["t"]


def test_a_command_sends_a_client_certificate_too(asking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORTALMQ_TLS_CLIENT_CERT", "PORTALMQ_TLS_CLIENT_KEY"):
        monkeypatch.setenv(name, "")
    files = ("--tls-client-cert", str(pem("client")), "--tls-client-key", str(key("client")))
    said = CliRunner().invoke(main, ["topic", "list", "--server", asking, *files, "-o", "ndjson"])
    assert (said.exit_code, "t" in said.output) == (0, True), said.output


def test_a_command_accepts_the_authority_too(secure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTALMQ_TLS_CA", "")
    said = CliRunner().invoke(
        main, ["topic", "list", "--server", secure, "--tls-ca", str(pem("authority")), "-o", "ndjson"]
    )
    assert (said.exit_code, "t" in said.output) == (0, True), said.output


def test_a_file_without_certificates_is_refused_with_its_name(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    none.write_text("")
    for make in (Producer, Admin, lambda **o: Consumer("t", **o), lambda **o: Lock("l", **o)):
        with pytest.raises(ValueError, match=r"none\.pem"):
            make(tls_ca=str(none))  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"none\.pem"):
            make(tls_client_cert=str(none))  # type: ignore[operator]


def test_a_certificate_and_a_key_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"client\.pem.*server\.key"):
        Admin(tls_client_cert=str(pem("client")), tls_client_key=str(key("server")))
    with pytest.raises(ValueError, match="tls_client_key needs tls_client_cert"):
        Admin(tls_client_key=str(key("client")))
