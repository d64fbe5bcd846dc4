"""The kombu transport: URLs, connecting, and how messages reach kombu's event loop."""

from __future__ import annotations

import threading
import time
from importlib import metadata
from typing import Any

from kombu.transport import virtual
from kombu.utils.url import parse_url

from portalmq import errors, wire
from portalmq.kombu.channel import Channel
from portalmq.kombu.names import options_of
from portalmq.kombu.session import ClusterSession
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import TlsFiles
from portalmq.transport.transport import Transport as Client

DEFAULT_PORT = 5000
CONNECT_TIMEOUT_S = 5.0
# Without an event loop, a program may ack in another thread than the one that waits: it looks again after this time.
LOOK_S = 0.5
TLS_SCHEME = "portalmqs"


class Transport(virtual.Transport):
    """portalmq://[:token@]host:5000[;portalmq://host2:5001...]"""

    Channel = Channel

    default_port = DEFAULT_PORT
    driver_type = "portalmq"
    driver_name = "portalmq"
    connection_errors = (
        *virtual.Transport.connection_errors,
        OSError,
        errors.Unavailable,
        errors.NotEnoughReplicas,
        errors.NotLeader,
        errors.StorageFull,
    )
    recoverable_connection_errors = connection_errors
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    uses_tls = False

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._session: ClusterSession | None = None
        self._loop: Any = None
        self._closing = threading.RLock()
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        self._closing = threading.RLock()
        self._loop = None  # the parent's

    @property
    def session(self) -> ClusterSession:
        if self._session is None:
            options = options_of(self.client.transport_options or {})
            first = self._url(self.client.hostname or "localhost", self.client.port)
            self._session = ClusterSession([first, *self._other_urls(first)], self._token(), self._tls_files(), options)
        return self._session

    # --- where the brokers are ---------------------------------------------------------------------------------------

    def _url(self, host: str, port: int | None) -> str:
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self._is_tls else 'http'}://{shown}:{port or self.default_port}"

    @property
    def _is_tls(self) -> bool:
        return self.uses_tls or bool(self.client.ssl) or self.client.transport_cls == TLS_SCHEME

    def _other_urls(self, first: str) -> list[str]:
        """Return the URLs of the alternates: a client that knows one broker of the cluster learns of the others, but
        the first one may be down when it begins."""
        urls = []
        for alternate in self.client.alt or ():
            parsed = parse_url(alternate)
            url = self._url(parsed["hostname"] or "localhost", parsed["port"])
            if url != first and url not in urls:
                urls.append(url)
        return urls

    def _token(self) -> str | None:
        password = self.client.password
        return (password() if callable(password) else password) or self.client.userid or None

    def _tls_files(self) -> TlsFiles:
        given = self.client.ssl if isinstance(self.client.ssl, dict) else {}
        return TlsFiles(given.get("ca_certs"), given.get("certfile"), given.get("keyfile"))

    # --- connecting --------------------------------------------------------------------------------------------------

    def establish_connection(self) -> Any:
        """Return once the broker that the URL names answers. Raises Unavailable, Unauthorized or Forbidden."""
        self._verify(self.client.connect_timeout or CONNECT_TIMEOUT_S)
        return super().establish_connection()

    def _verify(self, timeout_s: float) -> None:
        url = self._url(self.client.hostname or "localhost", self.client.port)
        client = Client([url], token=self._token(), timeout_s=timeout_s, tls=self._tls_files())
        try:
            client.get(
                "/v1/metadata", wire.Metadata, {"topics": self.session.names.bindings_topic}, timeout_s=timeout_s
            )
        finally:
            client.close()

    def verify_connection(self, connection: Any) -> bool:
        """Return True until it is closed. kombu asks before each publish; clients find another broker alone."""
        return self._session is not None

    def close_connection(self, connection: Any) -> None:
        """Close the channels, which return what is not acked. Thread-safe; a second close does nothing."""
        with self._closing:
            self._leave_loop()
            try:
                super().close_connection(connection)
            finally:
                session, self._session = self._session, None
                if session is not None:
                    session.close()

    def driver_version(self) -> str:
        return metadata.version("portalmq")

    # --- delivering --------------------------------------------------------------------------------------------------

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver the messages that are there, or the first ones to come. Raises TimeoutError if none came."""
        deadline = None if timeout is None else time.monotonic() + timeout
        inbox = self.session.inbox
        while not inbox.deliver():
            left = LOOK_S if deadline is None else deadline - time.monotonic()
            if not inbox.wait(max(0.0, left)) and deadline is not None:
                raise TimeoutError(f"no message came within {timeout} s")

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self._leave_loop()
        inbox = self.session.inbox
        self._loop = loop, inbox.fileno()
        loop.add_reader(inbox.fileno(), inbox.deliver)

    def _leave_loop(self) -> None:
        registered, self._loop = self._loop, None
        if registered is not None:
            loop, fileno = registered
            loop.remove(fileno)


class TlsTransport(Transport):
    """portalmqs://…: brokers with `--tls-cert`."""

    uses_tls = True
