"""MiniQ's server for tests: in this process over a stand-in for a cluster, or `portalmq zeromq` as a process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from portalmq.broker.protocols.zeromq.curve import Curve
from portalmq.broker.protocols.zeromq.protocol import PortRole, ReceivedMessage
from portalmq.broker.protocols.zeromq.server import Server, ServerLimits
from portalmq.broker.protocols.zeromq.service import MiniQService
from portalmq.errors import PortalMQError
from portalmq.message import RecordMetadata
from portalmq.tokens import Tokens

WITHIN_S = 20.0
_PROGRAM = "from portalmq.broker.protocols.zeromq.command import zeromq; zeromq(prog_name='portalmq zeromq')"


class Queues:
    """A cluster in memory. Every call first goes through `trouble`, which may raise or wait."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[ReceivedMessage]] = defaultdict(deque)
        self.leased: dict[str, tuple[str, ReceivedMessage]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.trouble: Callable[[tuple[Any, ...]], None] = lambda call: None
        self.known = True
        self._offsets: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def _called(self, *call: Any) -> None:
        with self._lock:
            self.calls.append(call)
        self.trouble(call)

    def has_room_for(self, queue: str) -> bool:
        return self.known

    def send(self, queue: str, value: str | bytes, content_type: str | None) -> Future[RecordMetadata]:
        future: Future[RecordMetadata] = Future()
        self._called("send", queue, value, content_type)
        with self._lock:
            offset = self._offsets[queue]
            self._offsets[queue] += 1
            raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
            self.waiting[queue].append(ReceivedMessage(f"0-{offset}", f"{queue}/{offset}", 17, 1, msgspec.Raw(raw)))
        future.set_result(RecordMetadata(queue, 0, offset, 17))
        return future

    def receive(self, queue: str, at_most: int, timeout_s: float) -> list[ReceivedMessage]:
        self._called("receive", queue, at_most)
        with self._lock:
            line = self.waiting[queue]
            taken = [line.popleft() for _ in range(min(at_most, len(line)))]
            self.leased |= {each.receipt: (queue, each) for each in taken}
        return taken

    def give_back(self, receipts: list[str]) -> None:
        self._called("give_back", *receipts)
        with self._lock:
            for receipt in receipts:
                queue, message = self.leased.pop(receipt)
                self.waiting[queue].appendleft(message)

    def delete(self, queue: str, partition: int, ids: list[str], timeout_s: float) -> list[bool]:
        self._called("delete", queue, partition, *ids)
        with self._lock:
            receipts = [each.replace("0-", f"{queue}/", 1) for each in ids]  # all messages are in partition 0
            return [self.leased.pop(receipt, None) is not None for receipt in receipts]

    def command(self, body: bytes, timeout_s: float) -> bytes:
        self._called("command", json.loads(body))
        return json.dumps({"status": "ok", "told": json.loads(body)}).encode()


@contextlib.contextmanager
def serving(
    queues: Queues,
    *tokens: str,
    limits: ServerLimits | None = None,
    ports: dict[PortRole, int] | None = None,
    curve: Curve | None = None,
) -> Iterator[Server]:
    """Yield a server on free ports, in a thread of its own, which ends on exit."""
    made: Future[Server] = Future()

    def run() -> None:
        try:
            free: dict[PortRole, int] = {"commands": 0, "producers": 0, "consumers": 0}
            server = Server(queues, Tokens(tokens), ports=ports or free, limits=limits, curve=curve)
        except BaseException as fault:  # noqa: BLE001 - for the waiting thread
            made.set_exception(fault)
            return
        made.set_result(server)
        server.run(drain_s=10)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        server = made.result(WITHIN_S)
        try:
            yield server
        finally:
            server.stop()
    finally:
        thread.join(WITHIN_S)
        assert not thread.is_alive()


def service_at(ports: dict[PortRole, int], **options: Any) -> MiniQService:
    return MiniQService(
        command_port=ports["commands"],
        producer_port=ports["producers"],
        consumer_port=ports["consumers"],
        **options,
    )


@contextlib.contextmanager
def socket_to(port: int, kind: int = zmq.REQ, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """Yield a plain client socket; what it waits for arrives within WITHIN_S, or it raises zmq.Again."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, round(WITHIN_S * 1000))
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield socket


def ask(socket: zmq.Socket[bytes], body: Any) -> Any:
    socket.send(body if isinstance(body, bytes) else json.dumps(body).encode())
    return json.loads(socket.recv())


def failing(error: PortalMQError, *kinds: str) -> Callable[[tuple[Any, ...]], None]:
    def trouble(call: tuple[Any, ...]) -> None:
        if call[0] in kinds:
            raise error

    return trouble


class ZeroMQProcess:
    """`portalmq zeromq` over real brokers. A second start takes the same ports."""

    def __init__(self, directory: Path, urls: list[str], *options: str) -> None:
        self._directory = directory
        self._urls = urls
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._starts = 0
        self.ports: dict[PortRole, int] = {"commands": 0, "producers": 0, "consumers": 0}

    def __enter__(self) -> ZeroMQProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is not None:
            print(f"--- portalmq zeromq said:\n{self.stderr()}")
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start, and return once it has printed its ports."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        arguments = [sys.executable, "-c", _PROGRAM, "--server", ",".join(self._urls), "-o", "json"]
        for door, option in (("commands", "command"), ("producers", "producer"), ("consumers", "consumer")):
            arguments += [f"--{option}-port", str(self.ports[door])]  # type: ignore[index]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PORTALMQ_")}
        with (self._directory / f"zeromq-{self._starts}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*arguments, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=inherited,
                text=True,
            )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said, f"portalmq zeromq ended:\n{self.stderr()}"
        self.ports = {door: int(endpoint.rpartition(":")[2]) for door, endpoint in json.loads(said).items()}

    def kill(self) -> None:
        self.process.kill()
        self._gone()

    def stop(self) -> int:
        self.process.terminate()
        return self._gone()

    def _gone(self) -> int:
        code = self.process.wait(WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def stderr(self) -> str:
        return "".join(path.read_text() for path in sorted(self._directory.glob("zeromq-*.log")))
