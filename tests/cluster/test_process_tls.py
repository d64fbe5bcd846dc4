"""TLS with certificates on both sides: the clients that a broker accepts, and the servers that it trusts."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.broker_process import BrokerProcess
from support.cluster import wait_until
from support.tls import TlsFront, key, pem

from portalmq.broker.cluster.exits import UsageError
from portalmq.broker.cluster.failure_detector import Probe, Prober
from portalmq.broker.cluster.peers import trusting, trusting_by_hand
from portalmq.broker.ops import elect as rescue
from portalmq.broker.server.config import BrokerConfig

WITHIN_S = 30.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    files = (
        "--tls-cert",
        str(pem("server")),
        "--tls-key",
        str(key("server")),
        "--tls-client-ca",
        str(pem("authority")),
    )
    with_tls = BrokerProcess(tmp_path, *files)
    with_tls.launch()
    try:
        wait_until(lambda: with_tls._has_said_where() or not with_tls.runs, "the broker is ready", 60)
        assert with_tls.runs, with_tls.stderr()
        yield with_tls
    finally:
        with_tls.end()


def asked(broker: BrokerProcess, shown: str | None) -> int:
    context = ssl.create_default_context(cafile=pem("authority"))
    if shown is not None:
        context.load_cert_chain(pem(shown), key(shown))
    connection = http.client.HTTPSConnection("localhost", broker.port, timeout=WITHIN_S, context=context)
    try:
        connection.request("POST", "/v1/topics/t/messages", b"x")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.cluster
def test_only_clients_with_a_certificate_of_the_authority_get_in(broker: BrokerProcess) -> None:
    assert asked(broker, "client") == 200
    for shown in (None, "untrusted"):
        with pytest.raises(OSError):
            asked(broker, shown)
    url = f"https://localhost:{broker.port}"
    probers = {Probe.ANSWERED: Prober(WITHIN_S, (pem("server"), key("server"))), Probe.SILENT: Prober(WITHIN_S)}
    for answer, prober in probers.items():
        assert prober.probe(url) is answer, "probes of other brokers need a certificate as well"
        prober.close()


def believes(config: BrokerConfig, certificate: str) -> bool:
    context = trusting(config)
    assert context is not None
    with socket.create_server(("127.0.0.1", 0)) as plain, TlsFront(plain.getsockname()[1], certificate) as front:
        connection = socket.create_connection(("127.0.0.1", front.port), timeout=WITHIN_S)
        try:
            context.wrap_socket(connection, server_hostname="localhost").close()
        except ssl.SSLCertVerificationError:
            return False
        finally:
            connection.close()
        return True


def test_brokers_believe_the_authorities_of_their_own_file_and_no_others(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_bytes(pem("server").read_bytes() + pem("authority").read_bytes())
    config = BrokerConfig(tls_cert=chain, tls_key=key("server"))
    context = trusting(config)
    assert context is not None
    assert context.cert_store_stats()["x509_ca"] == 1, "the system's authorities are not trusted"
    assert believes(config, "server")
    assert not believes(config, "untrusted")
    assert not believes(config, "elsewhere")


def test_brokers_believe_the_authorities_that_are_named(tmp_path: Path) -> None:
    config = BrokerConfig(tls_cert=pem("untrusted"), tls_key=key("untrusted"), tls_peer_ca=pem("authority"))
    assert believes(config, "server")
    assert not believes(config, "untrusted"), "not even their own certificate"
    with pytest.raises(UsageError, match="cannot be used"):
        trusting(BrokerConfig(tls_cert=pem("server"), tls_key=key("server"), tls_peer_ca=tmp_path / "missing"))


def test_without_an_authority_file_brokers_trust_their_own_certificate() -> None:
    """Brokers may also use certificates of authorities that the system trusts."""
    config = BrokerConfig(tls_cert=pem("server"), tls_key=key("server"))
    assert believes(config, "server")
    assert not believes(config, "untrusted")


def test_client_certificates_need_tls() -> None:
    for name in ("tls_client_ca", "tls_peer_ca"):
        with pytest.raises(UsageError, match="tls_cert"):
            BrokerConfig(**{name: pem("authority")})


def names_shown(context: ssl.SSLContext | None) -> list[str]:
    """Return the names in the client certificate that a server receives."""
    assert context is not None
    with socket.create_server(("127.0.0.1", 0)) as plain:
        plain.settimeout(WITHIN_S)
        with TlsFront(plain.getsockname()[1], "server", asks_for_certificate=True) as front:
            raw = socket.create_connection(("127.0.0.1", front.port), timeout=WITHIN_S)
            with context.wrap_socket(raw, server_hostname="localhost"):
                plain.accept()[0].close()  # only a client that has shown a certificate gets this far
                return list(front.names_shown)


def test_brokers_show_their_certificate_before_they_ask_for_one_themselves() -> None:
    """While a cluster turns client certificates on, one broker after the other, brokers that require them accept those
    that do not."""
    config = BrokerConfig(tls_cert=pem("client"), tls_key=key("client"), tls_peer_ca=pem("authority"))
    assert names_shown(trusting(config)) == ["client"]


def test_commands_use_the_brokers_tls_files_or_else_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_broker = BrokerConfig(tls_cert=pem("client"), tls_key=key("client"), tls_peer_ca=pem("authority"))
    assert names_shown(trusting_by_hand(as_broker)) == ["client"]
    for name in ("CA", "CLIENT_CERT", "CLIENT_KEY"):
        monkeypatch.delenv(f"PORTALMQ_TLS_{name}", raising=False)
    assert trusting_by_hand(BrokerConfig()) is None
    monkeypatch.setenv("PORTALMQ_TLS_CA", str(pem("authority")))
    monkeypatch.setenv("PORTALMQ_TLS_CLIENT_CERT", str(pem("client")))
    monkeypatch.setenv("PORTALMQ_TLS_CLIENT_KEY", str(key("client")))
    assert names_shown(trusting_by_hand(BrokerConfig())) == ["client"]
    monkeypatch.setenv("PORTALMQ_TLS_CLIENT_KEY", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="missing"):
        trusting_by_hand(BrokerConfig())


@pytest.mark.parametrize("has_key", [True, False])
def test_elect_takes_the_brokers_files(monkeypatch: pytest.MonkeyPatch, has_key: bool) -> None:
    monkeypatch.setattr(rescue, "_catalog", contextlib.nullcontext)
    contexts: list[ssl.SSLContext | None] = []
    monkeypatch.setattr(
        rescue, "_elect", lambda catalog, config, tls_cert, *_: contexts.append(trusting_by_hand(config, tls_cert))
    )
    believed = ("--tls-cert", str(pem("authority")))
    shown = ("--tls-cert", str(pem("client")), "--tls-key", str(key("client")), "--tls-peer-ca", str(pem("authority")))
    done = CliRunner().invoke(
        rescue.elect, ["t", "0", "--unclean", "--i-accept-data-loss", *(shown if has_key else believed)]
    )
    assert done.exit_code == 0, done.output
    (context,) = contexts
    if has_key:
        assert names_shown(context) == ["client"]
    else:
        assert context is not None
        assert context.cert_store_stats()["x509_ca"] == 1
