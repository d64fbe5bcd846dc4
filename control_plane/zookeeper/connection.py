"""kazoo's connection routine, changed: which requests it sends, in which session, and which events it reports.

It depends on these internals of kazoo: the queue of requests, the routine that sends and receives, and the state
callback. The contract suite covers them on a real server. No other module depends on them.
"""

from __future__ import annotations

import logging
import ssl
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from kazoo.client import KazooClient
from kazoo.exceptions import SessionExpiredError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol import serialization as jute
from kazoo.protocol.connection import PING_XID, ConnectionDropped, ConnectionHandler
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry

from portalmq.control_plane.plane import clock_s
from portalmq.network.tls import secure_handler

log = logging.getLogger(__name__)
# kazoo logs the same error at each attempt, and credentials at DEBUG.
_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.ERROR)

RECONNECT_PAUSE_S = 0.1
RECONNECT_PAUSE_MAX_S = 0.5
# The part of a session that one server may take to answer a client that resumes it.
HANDSHAKE_PART = 1 / 4
_ADD_WATCH_PERSISTENT_RECURSIVE = 1

Handler = Literal["auto", "gevent", "threads"]


class Tls(NamedTuple):
    """PEM files for the connection to ZooKeeper: trusted authorities (None: the system's), and our certificate."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises ValueError for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as fault:  # ssl.SSLError is a subclass
            named = ", ".join(str(file) for file in self if file is not None)
            raise ValueError(f"the files for TLS to ZooKeeper cannot be used ({named}): {fault}") from None
        return context


class NotSentError(Exception):
    """The request was never sent, and never will be."""


class Owner(Protocol):
    """The receiver of events, called on the connection routine: it must not wait for ZooKeeper."""

    def on_granted(self, timeout_s: float, began: float) -> None:
        """The server accepted the session with this timeout."""

    def on_answered(self, began: float) -> None:
        """A request that began at `began` was answered."""

    def on_changed(self, path: str) -> None:
        """The node was created, set or deleted."""

    def on_set_back(self) -> None:
        """Commits were lost, and the session ends because of it."""


class Access(NamedTuple):
    """Where ZooKeeper is, and how a session with it is opened. `auth` is a user and a password."""

    servers: str
    session_timeout_s: float
    handler: Handler
    auth: tuple[str, str] | None
    tls: Tls | None


def make_client(access: Access, owner: Owner) -> Any:
    """Return a kazoo client that is not started. Raises ValueError for files of `tls` that cannot be used."""
    chosen = _handler(access.handler)
    if access.tls is not None:
        secure_handler(chosen, access.tls.context())
    _cap_connect(chosen, access.session_timeout_s / (2 * len(access.servers.split(","))))
    pauses = KazooRetry(
        max_tries=-1, delay=RECONNECT_PAUSE_S, max_delay=RECONNECT_PAUSE_MAX_S, sleep_func=chosen.sleep_func
    )
    client = KazooClient(
        access.servers,
        timeout=access.session_timeout_s,
        handler=chosen,
        auth_data=[("digest", ":".join(access.auth))] if access.auth else None,
        connection_retry=pauses,
        logger=_kazoo_log,
    )
    client._connection = SessionConnection(client, client._conn_retry.copy(), owner)
    return client


class SessionRequest:
    """A request in the form of kazoo's connection, sent in one session only (0: in any).

    The first claim wins: the connection claims it to send it, the caller to cancel it.
    """

    def __init__(self, inner: Any, session_id: int) -> None:
        self.type = inner.type
        self.serialize = inner.serialize
        self.session_id = session_id
        self.began = clock_s()
        self._inner = inner
        self._claim = threading.Lock()

    def claim(self) -> bool:
        return self._claim.acquire(blocking=False)

    def deserialize(self, buffer: bytes, offset: int) -> Any:
        # kazoo does not decode some answers, only notes their arrival.
        read = getattr(self._inner, "deserialize", None)
        return read(buffer, offset) if read else True


class AddWatch:
    """A persistent recursive watch (ZooKeeper 3.6): each change at or below `path`, until the connection ends."""

    type = 106

    def __init__(self, path: str) -> None:
        self._path = path

    def serialize(self) -> bytes:
        return bytes(jute.write_string(self._path) + jute.int_struct.pack(_ADD_WATCH_PERSISTENT_RECURSIVE))


class ReadMany:
    """A read of many nodes in one request (ZooKeeper 3.6). The answer has (data, stat) or an error for each."""

    type = 22

    def __init__(self, paths: Iterable[str]) -> None:
        self._reads = [jute.GetData(path, None) for path in paths]

    def serialize(self) -> bytes:
        packed = bytearray()
        for read in self._reads:
            packed += jute.MultiHeader(read.type, False, -1).serialize() + read.serialize()
        return bytes(packed + jute.multiheader_struct.pack(-1, True, -1))

    def deserialize(self, buffer: bytes, offset: int) -> list[Any]:
        return list(self._results(buffer, offset))

    def _results(self, buffer: bytes, offset: int) -> Iterator[Any]:
        while True:
            header, offset = jute.MultiHeader.deserialize(buffer, offset)
            if header.done:
                return
            if header.type == jute.GetData.type:
                yield jute.GetData.deserialize(buffer, offset)
                (data_bytes,) = jute.int_struct.unpack_from(buffer, offset)
                offset += jute.int_struct.size + max(0, data_bytes) + jute.stat_struct.size
            else:
                (code,) = jute.int_struct.unpack_from(buffer, offset)
                offset += jute.int_struct.size
                yield jute.EXCEPTIONS[code]()


class SessionConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's connection routine. It reports events to `owner` and sends each request in its own session only.

    A server closes the connection of a client that has seen a transaction newer than its own: briefly when it lags,
    for ever when it was emptied or set back, and then kazoo would stay SUSPENDED for ever. A server that does not
    serve yet, or has no quorum, does the same, and its sessions live. A probe session tells the cases apart: to open
    and to close one is a transaction, and a new transaction is newer than all before it, unless some were lost.
    """

    def __init__(self, client: Any, pauses: Any, owner: Owner) -> None:
        super().__init__(client, pauses, logger=_kazoo_log)
        self._owner = owner
        self._socket: Any = None
        # The start time of each unanswered heartbeat: a second one may follow before the answer to the first.
        self._pings: deque[float] = deque()
        self._granted_s = client._session_timeout / 1000

    def _connect_attempt(self, host: str, address: str, port: int, retry: Any) -> Any:
        self._pings.clear()
        try:
            return super()._connect_attempt(host, address, port, retry)
        except Exception:
            # On an answer that it cannot read, kazoo would end its routine and with it the session.
            log.exception("the connection to ZooKeeper failed")
            self.client._session_callback(KeeperState.CONNECTING)
            return None

    def _connect(self, host: str, address: str, port: int) -> Any:
        """Connect. Raises SessionExpiredError, as for an expired session, when the server can never resume this one."""
        session_id = self.client._session_id
        try:
            return super()._connect(host, address, port)
        except ConnectionDropped:
            if session_id is None or self._socket is None:
                raise
            newest = self._transaction_of_newcomer(host, address, port)
            if not 0 < newest < self.client.last_zxid:
                raise
        log.error(
            "ZooKeeper at %s:%d has lost what was committed in it: its newest transaction is %#x, and session %#x has "
            "seen %#x. Was it emptied, or restored from an older copy? A new session is begun",
            *(host, port, newest, session_id & (2**64 - 1), self.client.last_zxid),
        )
        self._owner.on_set_back()
        self.client.last_zxid = 0
        raise SessionExpiredError

    def _transaction_of_newcomer(self, host: str, address: str, port: int) -> int:
        """Return the transaction with which the server closes a new session; 0 when it does not serve."""
        self._socket.close()
        timeout_s = self._granted_s / 4
        # The shortest session that the server allows, in case it misses the close.
        newcomer = jute.Connect(0, 0, 1, 0, b"\x00" * 16, False)
        try:
            with self._socket_error_handling():
                self._socket = self.handler.create_connection(address=(address, port), hostname=host, timeout=timeout_s)
            self._socket.setblocking(0)
            super()._invoke(timeout_s, newcomer)
            self._submit(jute.CloseInstance, timeout_s, 1)
            header, _, _ = self._read_header(timeout_s)
        except (ConnectionDropped, self.handler.timeout_exception):
            return 0
        return int(header.zxid)

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        if isinstance(request, jute.Connect) and request.session_id:
            # A server that is starting may accept a connection and never answer on it; kazoo would wait for the whole
            # session. Resuming a session changes nothing, so a quick retry is safe. For a new session it waits.
            timeout = min(timeout, self._granted_s * HANDSHAKE_PART)
        began = clock_s()
        answer = super()._invoke(timeout, request, xid)
        if isinstance(request, jute.Connect) and answer[0].time_out > 0:
            self._granted_s = answer[0].time_out / 1000
            self._owner.on_granted(self._granted_s, began)
        return answer

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        queue = self.client._queue
        if queue and isinstance(queue[0][0], SessionRequest) and not self._may_send(queue[0][0]):
            _, result = queue.popleft()
            self._read_sock.recv(1)
            result.set_exception(NotSentError())
            return
        super()._send_request(read_timeout, connect_timeout)

    def _may_send(self, request: SessionRequest) -> bool:
        return request.session_id in (0, self.client._session_id) and request.claim()

    def _send_ping(self, connect_timeout: float) -> None:
        self._pings.append(clock_s())
        super()._send_ping(connect_timeout)

    def _read_header(self, timeout: float) -> Any:
        read = super()._read_header(timeout)
        if read[0].xid == PING_XID and self._pings:
            self._owner.on_answered(self._pings.popleft())
        return read

    def _read_response(self, header: Any, buffer: bytes, offset: int) -> Any:
        request = self.client._pending[0][0]
        if isinstance(request, SessionRequest):
            self._owner.on_answered(request.began)
        return super()._read_response(header, buffer, offset)

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        event, _ = jute.Watch.deserialize(buffer, offset)
        self._owner.on_changed(event.path)


def _handler(kind: Handler) -> Any:
    """Return greenlets when gevent has patched this process, as in a broker, threads otherwise. Mixing them hangs."""
    # Looked up, not imported: clients work without gevent, and the import slows down the start of a command.
    monkey = sys.modules.get("gevent.monkey")
    if kind == "gevent" or (kind == "auto" and monkey is not None and monkey.is_module_patched("threading")):
        from kazoo.handlers.gevent import SequentialGeventHandler

        return SequentialGeventHandler()
    return SequentialThreadingHandler()


def _cap_connect(handler: Any, limit_s: float) -> None:
    """Cap the time to connect. kazoo gives each server the whole session: one dead server would use it up."""
    connect = handler.create_connection

    def capped(*args: Any, timeout: float, **options: Any) -> Any:
        return connect(*args, timeout=min(timeout, limit_s), **options)

    handler.create_connection = capped
