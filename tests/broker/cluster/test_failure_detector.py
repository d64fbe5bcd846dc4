"""Failure detection: the verdicts from answers, refusals and silence, and probes over real sockets."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse

import gevent
import gevent.socket
import pytest
from gevent.server import StreamServer
from support.members import until
from support.ports import kept_ports

from portalmq.broker.cluster.failure_detector import FailureDetector, Probe, ProbeHistory, Prober, gone
from portalmq.control_plane.state import BrokerState

AN_HOUR_S = 3_600.0  # longer than any test: what happens earlier does not wait for the next turn
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def pulses(**found: ProbeHistory) -> dict[int, ProbeHistory]:
    return {int(name[1:]): history for name, history in found.items()}


class TestVerdicts:
    def test_no_broker_is_gone_without_a_reason(self) -> None:
        assert gone(pulses(b1=ProbeHistory(1), b2=ProbeHistory(1, silent=1)), refusals=1) == set()

    def test_one_refusal_is_enough_for_a_controller_and_two_to_replace_the_controller(self) -> None:
        found = pulses(b1=ProbeHistory(4, refused=1), b2=ProbeHistory(1))
        assert gone(found, refusals=1) == {(1, 4)}
        assert gone(found, refusals=2) == set()
        found[1].record(Probe.REFUSED)
        assert gone(found, refusals=2) == {(1, 4)}

    def test_two_silences_in_a_row_count(self) -> None:
        history = ProbeHistory(1)
        found = {1: history, 2: ProbeHistory(1)}
        for probe, expected in [
            (Probe.SILENT, False),
            (Probe.ANSWERED, False),
            (Probe.SILENT, False),
            (Probe.UNSURE, False),
            (Probe.SILENT, True),
            (Probe.UNSURE, True),
            (Probe.ANSWERED, False),
        ]:
            history.record(probe)
            assert bool(gone(found, refusals=1)) is expected, probe

    def test_when_none_of_several_brokers_answers_none_counts_as_gone(self) -> None:
        assert gone(pulses(b1=ProbeHistory(1, silent=3), b2=ProbeHistory(1, silent=2)), refusals=1) == set()
        assert gone(pulses(b1=ProbeHistory(1, silent=3)), refusals=1) == {(1, 1)}
        assert gone(pulses(b1=ProbeHistory(1, silent=3), b2=ProbeHistory(1, refused=1)), refusals=1) == set()
        assert gone(pulses(b1=ProbeHistory(1, refused=3), b2=ProbeHistory(1, refused=1)), refusals=1) == set()
        assert gone(
            pulses(b1=ProbeHistory(1, silent=3), b2=ProbeHistory(1, silent=2), b3=ProbeHistory(1)), refusals=1
        ) == {(1, 1), (2, 1)}


class TestDetector:
    @pytest.fixture
    def watching(self) -> Iterator[tuple[FailureDetector, dict[str, Probe], list[str]]]:
        answers: dict[str, Probe] = {}
        asked: list[str] = []

        def probe(url: str) -> Probe:
            asked.append(url)
            return answers.get(url, Probe.ANSWERED)

        detector = FailureDetector(probe, lambda: None)
        yield detector, answers, asked
        detector.close()

    def test_only_watched_brokers_are_probed(
        self, watching: tuple[FailureDetector, dict[str, Probe], list[str]]
    ) -> None:
        detector, _, asked = watching
        known = {number: BrokerState(f"http://b{number}", 1, "s") for number in (1, 2)}
        detector.watch(known, {2})
        until(lambda: len(asked) >= 2)
        assert set(asked) == {"http://b2"}
        detector.watch(known, ())
        gevent.sleep(0.6)  # the current turn
        asked.clear()
        gevent.sleep(0.6)  # a whole turn without a probe: there is no condition to wait for
        assert asked == []

    def test_a_dead_broker_stays_dead_until_it_answers_or_restarts(
        self, watching: tuple[FailureDetector, dict[str, Probe], list[str]]
    ) -> None:
        detector, answers, _asked = watching
        answers["http://b1"] = Probe.REFUSED
        detector.watch({1: BrokerState("http://b1", 1, "s")}, {1})
        until(lambda: detector.gone() == {(1, 1)})
        detector.watch({1: BrokerState("http://b1", 1, "s")}, ())
        assert detector.gone() == {(1, 1)}
        detector.watch({1: BrokerState("http://b1", 2, "s")}, ())
        assert detector.gone() == set()
        detector.watch({1: BrokerState("http://b1", 2, "s")}, {1})
        until(lambda: detector.gone() == {(1, 2)})
        answers.clear()
        until(lambda: detector.gone() == set())

    def test_a_suspected_broker_is_probed_at_once(
        self, watching: tuple[FailureDetector, dict[str, Probe], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.failure_detector.PROBE_EVERY_S", AN_HOUR_S)
        detector, _, asked = watching
        detector.watch({1: BrokerState("http://b1", 1, "s")}, {1})
        until(lambda: asked)
        gevent.sleep(0)
        detector.probe_now(1)
        until(lambda: len(asked) == 2)
        detector.probe_now(7)  # no such broker

    def test_a_second_probe_follows_a_refusal_soon(
        self, watching: tuple[FailureDetector, dict[str, Probe], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.failure_detector.PROBE_EVERY_S", AN_HOUR_S)
        detector, answers, _asked = watching
        answers["http://b1"] = Probe.REFUSED
        detector.watch({1: BrokerState("http://b1", 1, "s")}, {1})
        until(lambda: detector.gone(refusals=2))


Handler = Callable[[socket.socket, tuple[str, int]], None]


@pytest.fixture
def prober() -> Iterator[Prober]:
    """A prober whose timeout is longer than any answer takes: no verdict comes from the timeout."""
    made = Prober(timeout_s=60.0)
    yield made
    made.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prober]:
    """A prober with a short timeout, which takes no delay for a pause of this process."""
    monkeypatch.setattr("portalmq.broker.cluster.failure_detector.STALL_S", AN_HOUR_S)
    made = Prober(timeout_s=0.4)
    yield made
    made.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    servers: list[StreamServer] = []

    def start(handler: Handler) -> str:
        server = StreamServer(("127.0.0.1", 0), handler)
        server.start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.stop(timeout=0.1)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[gevent.Timeout]:
    """The timeouts of all later probes. A probe in which a test raises its timeout has timed out."""
    made: list[gevent.Timeout] = []

    class Limit(gevent.Timeout):
        def start(self) -> None:
            made.append(self)

    monkeypatch.setattr(gevent, "Timeout", Limit)
    return made


class TestProber:
    def test_any_answer_counts_and_the_connection_is_kept(
        self, prober: Prober, serve: Callable[[Handler], str]
    ) -> None:
        connections: list[None] = []

        def answer(client: socket.socket, address: tuple[str, int]) -> None:
            connections.append(None)
            while b"GET /livez" in client.recv(1000):
                client.sendall(ANSWER.replace(b"200 OK", b"503 No"))

        url = serve(answer)
        assert [prober.probe(url) for _ in range(3)] == [Probe.ANSWERED] * 3
        assert len(connections) == 1

    def test_a_kept_connection_that_was_closed_is_opened_again(
        self, prober: Prober, serve: Callable[[Handler], str]
    ) -> None:
        def answer_once(client: socket.socket, address: tuple[str, int]) -> None:
            client.recv(1000)
            client.sendall(ANSWER)

        url = serve(answer_once)
        assert [prober.probe(url) for _ in range(3)] == [Probe.ANSWERED] * 3

    def test_a_closed_port_refuses_at_once(self, prober: Prober) -> None:
        with kept_ports(1) as [port]:
            began = time.monotonic()
            assert prober.probe(f"http://127.0.0.1:{port}") is Probe.REFUSED
            assert time.monotonic() - began < 30

    def test_a_broker_that_dies_between_two_probes_refuses(
        self, prober: Prober, serve: Callable[[Handler], str]
    ) -> None:
        clients: list[socket.socket] = []

        def answer(client: socket.socket, address: tuple[str, int]) -> None:
            clients.append(client)
            while client.recv(1000):
                client.sendall(ANSWER)

        with kept_ports(1) as [port]:
            listener = gevent.socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            server = StreamServer(listener, answer)
            server.start()
            url = f"http://127.0.0.1:{port}"
            assert prober.probe(url) is Probe.ANSWERED
            server.stop(timeout=0)
            for client in clients:
                client.close()
            assert prober.probe(url) is Probe.REFUSED

    def test_a_port_that_accepts_and_does_not_answer_is_silent(self, hasty: Prober) -> None:
        with socket.create_server(("127.0.0.1", 0)) as paused:
            url = f"http://127.0.0.1:{paused.getsockname()[1]}"
            began = time.monotonic()
            assert hasty.probe(url) is Probe.SILENT
            assert 0.3 < time.monotonic() - began < 30, "the probe times out"

    def test_a_partial_answer_is_no_answer(
        self,
        prober: Prober,
        serve: Callable[[Handler], str],
        limits: list[gevent.Timeout],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        heard: list[HTTPResponse] = []
        getresponse = HTTPConnection.getresponse

        def hear(connection: HTTPConnection) -> HTTPResponse:
            heard.append(getresponse(connection))
            return heard[0]

        def stutter(client: socket.socket, address: tuple[str, int]) -> None:
            client.recv(1000)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
            gevent.sleep(3_600)

        monkeypatch.setattr(HTTPConnection, "getresponse", hear)
        asking = gevent.spawn(prober.probe, serve(stutter))
        until(lambda: heard)
        gevent.kill(asking, limits[0])
        assert asking.get() is Probe.SILENT

    @pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH\r\n", b"\x00" * 100_000])
    def test_a_port_that_is_no_broker_is_silent(
        self, prober: Prober, serve: Callable[[Handler], str], said: bytes
    ) -> None:
        def talk(client: socket.socket, address: tuple[str, int]) -> None:
            client.recv(1000)
            client.sendall(said)

        assert prober.probe(serve(talk)) is Probe.SILENT

    def test_an_answer_that_arrived_while_this_process_was_busy_counts(
        self,
        prober: Prober,
        serve: Callable[[Handler], str],
        limits: list[gevent.Timeout],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        waiting: list[socket.socket] = []

        def busy(connection: HTTPConnection) -> None:
            waiting.append(connection.sock)
            gevent.sleep(3_600)

        def answer(client: socket.socket, address: tuple[str, int]) -> None:
            client.recv(1000)
            client.sendall(ANSWER)

        monkeypatch.setattr(HTTPConnection, "getresponse", busy)
        asking = gevent.spawn(prober.probe, serve(answer))
        until(lambda: waiting and select.select([waiting[0].fileno()], [], [], 0)[0], "the answer lies there, unread")
        gevent.kill(asking, limits[0])
        assert asking.get() is Probe.ANSWERED

    def test_silence_during_a_pause_of_this_process_proves_nothing(self) -> None:
        prober = Prober(timeout_s=0.4)
        with socket.create_server(("127.0.0.1", 0)) as paused:
            url = f"http://127.0.0.1:{paused.getsockname()[1]}"
            asking = gevent.spawn(prober.probe, url)
            gevent.sleep(0.05)
            time.sleep(1.0)
            assert asking.get() is Probe.UNSURE
