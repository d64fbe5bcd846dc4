"""The client of MiniQ's ZeroMQ server for programs.

A REQ socket whose reply is lost cannot be used again. Without a reply in time the socket is closed, and the request is
repeated on a new one (the "lazy pirate" of the ZeroMQ guide, chapter 4). A message whose reply was lost may therefore
be stored twice: delivery is at least once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from portalmq.broker.protocols.zeromq import protocol
from portalmq.broker.protocols.zeromq.curve import CurveClient
from portalmq.broker.protocols.zeromq.protocol import DEFAULT, PORTS, PortRole
from portalmq.closeable import Closeable
from portalmq.errors import Unavailable, error_from_problem

# Longer than the server's own timeout.
TIMEOUT_S = 20.0
TRIES = 3
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class MiniQMessage:
    """A received message. It is delivered again unless it is deleted before its lease ends. `message` is text, a JSON
    value, or bytes when it is neither."""

    id: str
    message: Any
    queue: str
    timestamp: int
    deliveries: int


class _Connection:
    """One REQ socket to one port, for one thread at a time."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, timeout_s: float, curve: CurveClient | None
    ) -> None:
        self.endpoint = endpoint
        self.curve = curve
        self._timeout_ms = round(timeout_s * 1000)
        self.lock = threading.Lock()
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None

    def ask(self, request: bytes) -> bytes | None:
        """Send a request and return the reply. None when no reply came in time; the next call uses a new socket."""
        socket = self._socket
        if socket is None:
            socket = self._socket = self._context.socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, self._timeout_ms)
            socket.setsockopt(zmq.RCVTIMEO, self._timeout_ms)
            if self.curve is not None:
                self.curve.secure(socket)
            socket.connect(self.endpoint)
        try:
            socket.send(request)
            return socket.recv()
        except zmq.Again:
            self.drop()
            return None
        except BaseException:
            self.drop()  # after an interrupted wait it cannot be used either
            raise

    def drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


class MiniQService(Closeable):
    """Sends commands, produces and consumes. Thread-safe: threads that use the same port take turns, so give each busy
    thread its own service. Close it, or use `with`.

        with MiniQService() as miniq:
            miniq.create_queue("jobs")
            miniq.produce("jobs", {"n": 1})
            job = miniq.consume("jobs")
            if job is not None:
                miniq.delete(job)

    Every call raises the PortalMQError of the server's answer, and Unavailable after `tries` times `timeout_s` without
    an answer. After a retryable error the call is repeated within the first `timeout_s`. With CURVE, `curve_key_file`
    is this program's secret key and `curve_server_key` the server's public key, in files of `zmq.auth`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        command_port: int = PORTS["commands"],
        producer_port: int = PORTS["producers"],
        consumer_port: int = PORTS["consumers"],
        token: str | None = None,
        curve_key_file: str | os.PathLike[str] | None = None,
        curve_server_key: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        tries: int = TRIES,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        if timeout_s <= 0 or tries < 1:
            raise ValueError("timeout_s must be positive, and tries at least 1")
        curve = None
        if curve_key_file is not None and curve_server_key is not None:
            curve = CurveClient(Path(curve_key_file), Path(curve_server_key))
        elif curve_key_file is not None or curve_server_key is not None:
            raise ValueError("curve_key_file and curve_server_key go together: give both, or neither")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        shown = f"[{host}]" if ":" in host else host
        if ":" in host:
            self._context.setsockopt(zmq.IPV6, 1)
        ports: dict[PortRole, int] = {"commands": command_port, "producers": producer_port, "consumers": consumer_port}
        self._connections = {
            role: _Connection(self._context, f"tcp://{shown}:{port}", timeout_s, curve) for role, port in ports.items()
        }
        self._token = {} if token is None else {"token": token}
        self._timeout_s = timeout_s
        self._tries = tries
        self._clock = clock
        self._pause = pause
        self._closed = False

    # --- commands ----------------------------------------------------------------------------------------------------

    def command(self, kind: str, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send any command, and return the server's answer."""
        return self._ask("commands", {"type": kind, "payload": dict(payload or {})})

    def create_queue(self, queue: str = DEFAULT) -> None:
        """Create a queue, unless it exists."""
        self.command("CREATE_QUEUE", {"queue": queue})

    def queue_size(self, queue: str = DEFAULT) -> int:
        """Return the number of messages that are not deleted."""
        size: int = self.command("QUEUE_SIZE", {"queue": queue})["size"]
        return size

    def delete(self, message: MiniQMessage | str, queue: str | None = None) -> None:
        """Delete a processed message, given itself or its id. Raises MessageNotFound when it does not exist."""
        if isinstance(message, MiniQMessage):
            payload = {"queue": message.queue, "id": message.id}
        else:
            payload = {"queue": queue or DEFAULT, "id": message}
        self.command("DELETE_MSG", payload)

    def open_producers(self, queue: str = DEFAULT) -> int:
        """Announce that this program will produce to the queue; return the port for messages."""
        port: int = self.command("PRODUCE_MSG", {"queue": queue})["port"]
        return port

    def open_consumers(self, queue: str = DEFAULT) -> int:
        """Announce that this program will consume from the queue; return the port for consumers."""
        port: int = self.command("CONSUME", {"queue": queue})["port"]
        return port

    # --- messages ----------------------------------------------------------------------------------------------------

    def produce(self, queue: str, message: Any) -> str:
        """Store a message (text, or a JSON value) and return its id. On return it is durable and replicated."""
        if isinstance(message, bytes | bytearray | memoryview):
            raise TypeError("JSON carries no bytes: send text, or encode them as base64")
        message_id: str = self._ask("producers", {"queue": queue, "message": message})["id"]
        return message_id

    def consume(self, queue: str = DEFAULT) -> MiniQMessage | None:
        """Return the next message, or None when there is none now."""
        answer = self._ask("consumers", {"queue": queue})
        if answer["id"] is None:
            return None
        return MiniQMessage(answer["id"], protocol.message_of(answer), queue, answer["timestamp"], answer["deliveries"])

    # --- one request -------------------------------------------------------------------------------------------------

    def _ask(self, role: PortRole, members: dict[str, Any]) -> dict[str, Any]:
        request = _encode({**members, **self._token})
        connection = self._connections[role]
        deadline = self._clock() + self._timeout_s
        pause_s, silent, is_unknown = PAUSE_FIRST_S, 0, False
        with connection.lock:
            while True:
                if self._closed:
                    raise RuntimeError("the service is closed")
                raw = connection.ask(request)
                if raw is None:
                    silent += 1
                    if silent >= self._tries:
                        raise Unavailable(
                            f"MiniQ's server at {connection.endpoint} gave no answer, {silent} times within "
                            f"{self._timeout_s:g} s: start it with `portalmq zeromq`, or name its host and ports"
                            f"{'' if connection.curve is None else ' (or it does not know the key)'}",
                            outcome="unknown",
                        )
                    continue
                answer = _read(raw)
                if answer.get("status") == "ok":
                    return answer
                error = error_from_problem({name: value for name, value in answer.items() if name != "status"})
                is_unknown = is_unknown or silent > 0 or error.outcome == "unknown"
                if is_unknown:
                    error.outcome = "unknown"  # the error is of the last try, and an earlier one may have been applied
                if not error.retryable or self._clock() + pause_s >= deadline:
                    raise error
                self._pause(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def close(self) -> None:
        """Close the sockets; waits for running calls of other threads."""
        self._closed = True
        for connection in self._connections.values():
            with connection.lock:
                connection.drop()
        self._context.term()


def _read(raw: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise Unavailable(f"the answer is not MiniQ's: {fault}", retryable=False, outcome="unknown") from fault
    return answer
