"""Calls from one broker to another: HTTP over kept connections, with a credential that no client has.

    POST /internal/v1/<name>                    the body and the answer are MessagePack, or the bytes of a fetch
    Authorization: PortalMQ-Broker <hex>        the SHA-256 of the cluster's secret

A call is never forwarded: the broker that receives it answers, or refuses with `not_leader`. The error of a failed call
tells what is known: NotReached (the call was not sent, so nothing was applied), NotAnswered (it was sent, and may have
been applied), or the error that the other broker answered.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Protocol, TypeVar

import gevent
import msgspec
from gevent.monkey import get_original

from portalmq import wire
from portalmq.broker.cluster.exits import UsageError
from portalmq.control_plane.state import BrokerState
from portalmq.errors import Forbidden, PortalMQError, Unauthorized, Unavailable, error_from_problem
from portalmq.network.connection import Address, ConnectionPool, NoAnswer, NotSent, parse_address
from portalmq.network.http_answer import HttpAnswer
from portalmq.network.tls import NO_FILES, context_of

CREDENTIAL_SCHEME = "PortalMQ-Broker"
# A long poll holds a connection: one for every broker that fetches here, one for every group that waits elsewhere.
CONNECTIONS_PER_BROKER_MAX = 1_000
CONNECT_TIMEOUT_S = 1.0

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class NotReached(Unavailable):
    """The other broker could not be reached; nothing was applied. `refused`: no process listens at its address."""

    def __init__(self, detail: str, *, refused: bool = False) -> None:
        super().__init__(detail, retry_after_s=0.1)
        self.refused = refused


class NotAnswered(Unavailable):
    """The other broker gave no complete answer: the call may have been applied."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, outcome="unknown", retry_after_s=0.1)


class PeerConnections(Protocol):
    """The part of a connection pool that calls need."""

    def exchange(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> HttpAnswer: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


class Peers:
    """The other brokers. `brokers` returns the registered ones. `on_trouble(broker_id, incarnation, refused)` is called
    for each one that does not answer; it must not block."""

    def __init__(
        self,
        brokers: Callable[[], Mapping[int, BrokerState]],
        secret: str,
        *,
        on_trouble: Callable[[int, int, bool], None] = lambda broker_id, incarnation, refused: None,
        tls: ssl.SSLContext | None = None,
        pool: PeerConnections | None = None,
    ) -> None:
        self._brokers = brokers
        self._on_trouble = on_trouble
        self._credential = credential(secret)
        self._pool: PeerConnections = pool or ConnectionPool(
            tls=tls,
            connections_per_host_max=CONNECTIONS_PER_BROKER_MAX,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            poll=get_original("select", "poll"),
        )

    def call(self, broker_id: int, name: str, request: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T:
        """Call `name` on a broker and return its answer, decoded as `kind`. Raises NotReached, NotAnswered, and the
        PortalMQError that it answered."""
        body = self.call_bytes(broker_id, name, _encode(request), timeout_s=timeout_s)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise NotAnswered(
                f"broker {broker_id} answered {name} with a body that cannot be decoded: {fault}"
            ) from fault

    def call_bytes(self, broker_id: int, name: str, body: bytes, *, timeout_s: float) -> bytes:
        """Call with encoded bodies. `timeout_s` bounds the whole call."""
        state = self._brokers().get(broker_id)
        if state is None:
            raise NotReached(f"broker {broker_id} is not registered now")
        try:
            address = parse_address(state.url)
        except ValueError as fault:
            raise NotReached(f"broker {broker_id} is registered with an invalid URL: {fault}") from None
        head = b"%b%d\r\n\r\n" % (_head(address, name, self._credential), len(body))
        try:
            with gevent.Timeout(timeout_s, TimeoutError(f"no answer within {timeout_s:g} s")):
                answer = self._pool.exchange(address, "POST", head, body, timeout_s)
        except NotSent as fault:
            refused = isinstance(fault.__cause__, ConnectionRefusedError)
            self._on_trouble(broker_id, state.incarnation, refused)
            raise NotReached(
                f"broker {broker_id} cannot be reached at {address.url}: {fault}", refused=refused
            ) from fault
        except (NoAnswer, TimeoutError) as fault:
            self._on_trouble(broker_id, state.incarnation, False)
            raise NotAnswered(f"broker {broker_id} gave no answer to {name}: {fault}") from fault
        if answer.status == 200:
            return answer.body
        raise _error_of(answer, broker_id, name)

    def close(self) -> None:
        """Close the connections. Calls without an answer yet end with NotAnswered."""
        self._pool.close()


@lru_cache(1024)
def _head(address: Address, name: str, shown: str) -> bytes:
    """Return the head of a call, up to its length."""
    return (
        f"POST {address.prefix}{wire.INTERNAL_PATH}{name} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Authorization: {shown}\r\nContent-Type: {wire.MSGPACK}\r\nContent-Length: "
    ).encode("latin-1")


@lru_cache(4)
def credential(secret: str) -> str:
    """Return the value of `Authorization` for the cluster's secret: its SHA-256, since it may have any characters."""
    return f"{CREDENTIAL_SCHEME} {sha256(secret.encode()).hexdigest()}"


def check_credential(authorization: str | None, secret: str) -> None:
    """Raise Unauthorized without a credential, Forbidden with a wrong one, such as a client's token."""
    if not authorization:
        raise Unauthorized("this path is for the cluster's brokers alone")
    if not hmac.compare_digest(authorization.encode("latin-1", "replace"), credential(secret).encode("latin-1")):
        raise Forbidden("this path is for the cluster's brokers alone, and this is not their credential")


class TLSFiles(Protocol):
    """The settings of TLS between brokers: certificates in PEM, and the certificate and key that a broker presents."""

    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_peer_ca(self) -> Path | None: ...
    @property
    def shown_to_brokers(self) -> tuple[Path, Path] | None: ...


def trusting(config: TLSFiles) -> ssl.SSLContext | None:
    """Return the context for calls between brokers, None without TLS. It trusts the configured authorities, or those in
    the broker's own certificate file; the system's as well when that file has none. Raises UsageError for files that
    cannot be used."""
    if config.tls_cert is None:
        return None
    return _context(config.tls_peer_ca or config.tls_cert, config.tls_peer_ca is None, config.shown_to_brokers)


def trusting_by_hand(config: TLSFiles, tls_cert: Path | None = None) -> ssl.SSLContext | None:
    """Return the context for a command that calls brokers: from the brokers' files when its settings name them, from
    their certificate alone, or else from the files that the environment names for clients. Raises UsageError."""
    if tls_cert is not None:
        return _context(tls_cert, True, config.shown_to_brokers)
    if config.tls_cert is not None:
        return trusting(config)
    try:
        return context_of(NO_FILES)
    except ValueError as fault:
        raise UsageError(str(fault)) from None


def _context(authorities: Path, may_lack_some: bool, shown: tuple[Path, Path] | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authorities)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority is trusted by itself
        if may_lack_some and not context.cert_store_stats()["x509_ca"]:
            context.load_default_certs()
        if shown is not None:
            context.load_cert_chain(*shown)
    except OSError as fault:  # ssl.SSLError is one
        raise UsageError(f"the files for TLS between brokers cannot be used: {fault}") from None
    return context


def _error_of(answer: HttpAnswer, broker_id: int, name: str) -> PortalMQError:
    if answer.headers.get("Content-Type", "").startswith(wire.PROBLEM):
        try:
            problem = msgspec.json.decode(answer.body, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = {}
        if "code" in problem:
            return error_from_problem(problem, retry_after_s=_seconds(answer.headers.get("Retry-After")))
    return NotAnswered(f"broker {broker_id} answered {name} with HTTP {answer.status} and no problem document")


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None
