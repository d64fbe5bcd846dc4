"""Hostile traffic at MiniQ's ports: endless messages, broken frames and unknown keys."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.auth
from support.cluster import wait_until
from support.ports import kept_port, number_of
from support.zeromq import Queues, ZeroMQProcess, ask, service_at, serving, socket_to
from support.zmtp import GREETING, LONG, MORE, READY, WITHIN_S, frame, greeted, is_cut_off

from portalmq.broker.protocols.zeromq import flood
from portalmq.broker.protocols.zeromq.curve import Curve
from portalmq.broker.protocols.zeromq.flood import FloodGuard
from portalmq.errors import Unavailable

MIB = 1024 * 1024
# `PORTALMQ_ZEROMQ_MUTANTS=3000 pytest tests/broker/protocols/zeromq/test_zeromq_flood.py -k mutated` is the long run.
MUTANTS = int(os.environ.get("PORTALMQ_ZEROMQ_MUTANTS", "1000"))


class Side:
    """Connections to a port that no server reads, and the memory that the guard sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, growth_bytes_max: int) -> None:
        self.memory = 0
        monkeypatch.setattr(flood, "memory_bytes", lambda: self.memory)
        monkeypatch.setattr(flood, "KERNEL_BYTES", 0)
        monkeypatch.setattr(flood, "HELD_BYTES_LEAST", 1)
        self._server = socket.create_server(("127.0.0.1", 0))
        port = self._server.getsockname()[1]
        self.guard = FloodGuard(lambda: {port}, 1_000, growth_bytes_max)
        self.open = [self._server]

    def connected(self) -> tuple[socket.socket, int]:
        client = socket.create_connection(self._server.getsockname(), timeout=WITHIN_S)
        accepted, _ = self._server.accept()
        self.open += [client, accepted]
        return client, accepted.fileno()

    def send(self, client: socket.socket, number: int) -> None:
        accepted = next(each for each in self.open if each.fileno() != -1 and peer_of(each) == client.getsockname())
        before = flood._received_bytes(accepted)
        client.sendall(b"x" * number)
        wait_until(lambda: flood._received_bytes(accepted) >= before + number, "the bytes are there")

    def check(self) -> None:
        self.memory += flood.GROWTH_BYTES + 1
        self.guard.check()


def peer_of(connection: socket.socket) -> object:
    try:
        return connection.getpeername()
    except OSError:
        return None


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    made = Side(monkeypatch, growth_bytes_max=10**12)
    yield made
    for each in made.open:
        each.close()


def test_a_connection_with_more_bytes_than_a_request_and_no_request_is_cut_off(side: Side) -> None:
    endless, _ = side.connected()
    modest, _ = side.connected()
    side.send(endless, 1_001)
    side.send(modest, 1_000)
    side.check()
    assert is_cut_off(endless)
    assert side.guard.cut == 1


def test_a_connection_that_completes_its_requests_may_send_any_number(side: Side) -> None:
    busy, descriptor = side.connected()
    for _ in range(5):
        side.send(busy, 900)
        side.guard.request_completed(descriptor)
        side.check()
    assert side.guard.cut == 0
    side.send(busy, 1_001)  # the sixth never ends
    side.check()
    assert side.guard.cut == 1


def test_requests_without_a_descriptor_may_be_of_any_connection_without_one(side: Side) -> None:
    """Clients older than libzmq 4 send such requests."""
    old, _ = side.connected()
    for _ in range(3):
        side.send(old, 900)
        side.guard.request_completed(None)
        side.check()
    side.send(old, 1_001)
    side.check()
    assert side.guard.cut == 1


def test_connections_are_not_checked_while_memory_does_not_grow(side: Side) -> None:
    endless, _ = side.connected()
    side.send(endless, 1_001)
    side.guard.check()
    assert side.guard.cut == 0


def test_above_the_bound_the_connection_that_holds_most_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, growth_bytes_max=flood.GROWTH_BYTES)
    (small, _), (larger, _) = side.connected(), side.connected()
    side.send(small, 10)
    side.send(larger, 20)
    side.check()
    assert is_cut_off(larger)
    assert side.guard.cut == 1
    for each in side.open:
        each.close()


def url_of(place: socket.socket) -> str:
    return f"http://127.0.0.1:{number_of(place)}"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ZeroMQProcess]:
    """MiniQ's ports without a broker: the answer to each request is an error."""
    with kept_port() as nobody, ZeroMQProcess(tmp_path, [url_of(nobody)], "--timeout", "0.5") as started:
        yield started


@pytest.mark.parametrize("size", [1, MIB])
def test_a_message_without_an_end_is_cut_off_and_the_others_are_served(process: ZeroMQProcess, size: int) -> None:
    part = frame(b"x" * size, MORE)
    burst = part * (4 * MIB // len(part))
    with greeted(process.ports["producers"]) as endless:

        def send() -> None:
            with contextlib.suppress(OSError):
                for _ in range(2_000 * MIB // len(burst)):
                    endless.sendall(burst)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        # A client that is cut off while it sends may see no error, so check the server's log instead.
        wait_until(lambda: "cut off" in process.stderr(), "the connection is cut off", WITHIN_S)
    with socket_to(process.ports["commands"]) as commands:
        assert ask(commands, {"type": "nothing"})["status"] == "error"
    assert psutil.Process(process.process.pid).memory_info().rss < 1_500 * MIB
    assert "cut off" in process.stderr()


def mutated(chance: random.Random) -> bytes:
    """Return the bytes of a connection with one random defect."""
    data = bytearray(GREETING + frame(READY, 4) + frame(b"", MORE) + frame(b'{"queue": "q", "message": "x"}'))
    match chance.randrange(6):
        case 0:
            for _ in range(chance.randrange(1, 9)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        case 1:
            del data[chance.randrange(len(data)) :]
        case 2:
            at = chance.randrange(len(data))
            data[at:at] = chance.randbytes(chance.randrange(1, 300))
        case 3:
            data[64:] = bytes([chance.randrange(256)]) + chance.randbytes(8) + data[64:]
        case 4:
            data += bytes([LONG + chance.randrange(2)]) + chance.randrange(2**64).to_bytes(8, "big") + b"x" * 100
        case 5:
            data[64:] = chance.randbytes(chance.randrange(1, 2_000))
    return bytes(data)


def test_mutated_frames_end_no_server_and_leave_nothing_behind() -> None:
    chance = random.Random(7)
    with serving(Queues()) as server, socket_to(server.ports["commands"]) as honest:
        before = flood.memory_bytes()
        for _ in range(MUTANTS):
            port = server.ports[chance.choice(["commands", "producers", "consumers"])]
            with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as connection:
                try:
                    connection.sendall(mutated(chance))
                except ConnectionError:
                    continue  # the server closed the connection during the send
        assert ask(honest, {"type": "nothing"})["status"] == "ok"
        grown = flood.memory_bytes() - before
    print(f"{MUTANTS} mutants: {grown / MIB:.1f} MiB more")
    assert grown < 200 * MIB


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The keys of a server, of a listed client and of an unlisted client."""
    for name in ("server", "client", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    (tmp_path / "listed").mkdir()
    (tmp_path / "client.key").rename(tmp_path / "listed" / "client.key")
    return tmp_path


def test_with_curve_only_listed_clients_get_in(keys: Path) -> None:
    curve = Curve(keys / "server.key_secret", keys / "listed")
    server_key, _ = zmq.auth.load_certificate(keys / "server.key")

    def shown(name: str) -> dict[str, bytes]:
        public, secret = zmq.auth.load_certificate(keys / f"{name}.key_secret")
        assert secret is not None
        return {"CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret, "CURVE_SERVERKEY": server_key}

    with serving(Queues(), curve=curve) as server:
        port = server.ports["producers"]
        for _ in range(2):
            with socket_to(port, **shown("client")) as client:
                assert ask(client, {"queue": "q", "message": 1})["status"] == "ok"
        for wrong in (shown("stranger"), {}):
            with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
                events = stranger.get_monitor_socket(
                    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
                )
                stranger.setsockopt(zmq.LINGER, 0)
                for name, value in wrong.items():
                    stranger.setsockopt(getattr(zmq, name), value)
                stranger.connect(f"tcp://127.0.0.1:{port}")
                stranger.send(b"{}")
                assert events.poll(WITHIN_S * 1000), "the server closes the connection"
                assert not stranger.poll(0)
                stranger.disable_monitor()


def test_the_service_speaks_curve_too(keys: Path) -> None:
    curve = Curve(keys / "server.key_secret", keys / "listed")
    shown = {"curve_key_file": keys / "client.key_secret", "curve_server_key": keys / "server.key"}
    with serving(Queues(), curve=curve) as server:
        with service_at(server.ports, **shown) as miniq:
            miniq.produce("q", 1)
            taken = miniq.consume("q")
            assert taken is not None
            assert taken.message == 1
        stranger = shown | {"curve_key_file": keys / "stranger.key_secret"}
        another_server = shown | {"curve_server_key": keys / "stranger.key"}
        for wrong in (stranger, another_server):
            silent = service_at(server.ports, timeout_s=0.2, tries=1, **wrong)
            with silent, pytest.raises(Unavailable, match="does not know the key"):
                silent.produce("q", 2)
    with pytest.raises(ValueError, match="go together"):
        service_at(server.ports, curve_key_file=keys / "client.key_secret")
    with pytest.raises(ValueError, match="only a public key"):
        service_at(server.ports, curve_key_file=keys / "listed" / "client.key", curve_server_key=keys / "server.key")


def test_keys_that_cannot_be_used_are_named(keys: Path) -> None:
    (keys / "empty").mkdir()
    for key_file, clients, what in (
        ("missing", "listed", "missing"),
        ("listed/client.key", "listed", "only a public key"),
        ("server.key_secret", "empty", "no client's key"),
        ("server.key_secret", "nowhere", "nowhere"),
    ):
        with pytest.raises(ValueError, match=what):
            Curve(keys / key_file, keys / clients)
