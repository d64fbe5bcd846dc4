"""Real ZooKeeper servers for tests, and a connection to them that a test can cut, delay and corrupt.

`zookeeper_server` is one server for each pytest process; a test takes a chroot of its own in it (`fresh_chroot`), and
leaves it running. A test that kills, stops or configures a server starts one with EmbeddedZooKeeper.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import pytest
from support.ports import kept_port, number_of

from portalmq.control_plane.embedded import EmbeddedZooKeeper

WITHIN_S = 20.0
POLL_S = 0.01

_numbers = itertools.count()


@pytest.fixture(scope="session")
def zookeeper_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with EmbeddedZooKeeper(tmp_path_factory.mktemp("zookeeper")) as running:
        yield running


def fresh_chroot() -> str:
    return f"/test-{os.getpid()}-{next(_numbers)}"


def until(holds: Callable[[], object], *, within_s: float = WITHIN_S, what: str = "") -> float:
    """Wait for the condition; return the seconds that it took."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s} s: {what or holds}")
        time.sleep(POLL_S)
    return time.monotonic() - began


class Wire:
    """A TCP proxy in front of one server.

    cut()              ends all connections and refuses new ones, until heal()
    swallow_answers    while this is true, the server's data is lost; swallow_requests: the client's
    silent_next        on so many connections from now on, the client's data is lost
    turns_away         connections that resume a session are closed, as by a server that lags behind its clients
    inject(data)       the client receives these bytes as if from the server
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.swallow_answers = False
        self.swallow_requests = False
        self.requests_swallowed = 0
        self.answers_swallowed = 0
        self.silent_next = 0
        self.turns_away = False
        self.turned_away = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._ended = False
        self._listener: socket.socket | None = None
        self._place = kept_port()
        self.port = number_of(self._place)
        self._listen()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self.cut()
        self._place.close()

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            listener.close()
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self.swallow_answers = self.swallow_requests = False
        if self._listener is None:
            self._listen()

    def inject(self, data: bytes) -> None:
        with self._lock:
            for client, _ in self._pairs:
                client.sendall(data)

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                client.close()
                continue
            with self._lock:
                if self._listener is not listener:
                    client.close()
                    server.close()
                    return
                self._pairs.append((client, server))
            is_silent = self.silent_next > 0
            self.silent_next -= is_silent
            threading.Thread(target=self._carry, args=(client, server, is_silent), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket, is_silent: bool) -> None:
        try:
            while True:
                for end in select.select([client, server], [], [])[0]:
                    data = end.recv(65_536)
                    if not data:
                        return
                    if is_silent and end is client:
                        self.requests_swallowed += 1
                    else:
                        self._pass_on(data, client, server, is_answer=end is server)
        except OSError:
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._pairs.remove((client, server))
            client.close()
            server.close()

    def _pass_on(self, data: bytes, client: socket.socket, server: socket.socket, *, is_answer: bool) -> None:
        if self.turns_away and not is_answer and _goes_on_with_a_session(data):
            self.turned_away += 1
            raise ConnectionAbortedError
        if is_answer and self.swallow_answers:
            self.answers_swallowed += 1
        elif not is_answer and self.swallow_requests:
            self.requests_swallowed += 1
        else:
            (client if is_answer else server).sendall(data)


def _goes_on_with_a_session(request: bytes) -> bool:
    """Return whether it is a client's first request on a connection, and names a session: length, version 0, zxid,
    timeout, session. Other requests have their number in the place of the version, and none has number 0."""
    return request[4:8] == bytes(4) and request[20:28] not in (b"", bytes(8))
