"""Failure detection between brokers, by probes of /livez.

A ZooKeeper session outlives its broker by seconds. So the controller probes each broker twice a second over a kept
connection, and the others probe the controller. `ProbeHistory` and `gone` decide what the answers mean. A wrong verdict
is safe: leader epochs and controller epochs make sure of that.

    refused    nothing listens at the port any more: the process has ended
    silent     the port accepts connections (the kernel does that), and no answer comes within a second: paused, or cut
               off. Two in a row count, since a broker under load may be late once
    unsure     this process was itself paused during the probe, so nothing is known

If none of at least two others answers, this broker is as likely the one that is cut off, by a firewall that rejects as
well as by one that drops. Then no verdict is given, and the sessions decide.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import gevent
import gevent.socket
import gevent.ssl
from gevent.event import Event

from portalmq.control_plane.plane import clock_s
from portalmq.control_plane.state import BrokerState

log = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 1.0
# After a refusal the next probe follows soon: it decides whether a controller is removed.
PROBE_AGAIN_S = 0.1
SILENT_MAX = 2
# A probe that took this much longer than its timeout was timed by a process that was paused.
STALL_S = 0.3
ANSWER_BYTES_MAX = 64 * 1024

BrokerKey = tuple[int, int]


class Probe(Enum):
    """The result of one probe."""

    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"
    UNSURE = "unsure"


@dataclass(slots=True)
class ProbeHistory:
    """The failed probes of one incarnation of a broker since its last answer."""

    incarnation: int
    refused: int = 0
    silent: int = 0

    def record(self, probe: Probe) -> None:
        match probe:
            case Probe.ANSWERED:
                self.refused = self.silent = 0
            case Probe.REFUSED:
                self.refused += 1
            case Probe.SILENT:
                self.silent += 1
            case Probe.UNSURE:
                pass


def gone(histories: Mapping[int, ProbeHistory], *, refusals: int) -> set[BrokerKey]:
    """Return (id, incarnation) of the dead: their port refused that many times, or they were silent twice."""
    found = {
        broker_id
        for broker_id, history in histories.items()
        if history.refused >= refusals or history.silent >= SILENT_MAX
    }
    if len(found) >= 2 and len(found) == len(histories):
        return set()
    return {(broker_id, histories[broker_id].incarnation) for broker_id in found}


class FailureDetector:
    """Probes brokers, each in a greenlet. `on_change` is called when a probe changes what is known of one."""

    def __init__(self, probe: Callable[[str], Probe], on_change: Callable[[], None]) -> None:
        self._probe = probe
        self._on_change = on_change
        self._known: dict[int, BrokerState] = {}
        self._histories: dict[int, ProbeHistory] = {}
        self._probed: frozenset[int] = frozenset()
        self._greenlets: dict[int, gevent.Greenlet] = {}
        self._requests: dict[int, Event] = {}

    def watch(self, known: Mapping[int, BrokerState], probed: Collection[int]) -> None:
        """Probe the brokers in `probed` from now on. Keep the history of those in `known` until they register with
        another incarnation."""
        self._known = dict(known)
        self._probed = frozenset(probed) & known.keys()
        for broker_id in self._histories.keys() - known.keys():
            del self._histories[broker_id]
        for broker_id, broker in known.items():
            history = self._histories.get(broker_id)
            if history is None or history.incarnation != broker.incarnation:
                self._histories[broker_id] = ProbeHistory(broker.incarnation)
        for broker_id in self._probed - self._greenlets.keys():
            self._requests[broker_id] = Event()
            self._greenlets[broker_id] = gevent.spawn(self._probe_repeatedly, broker_id)

    def probe_now(self, broker_id: int) -> None:
        """Probe a suspected broker at once."""
        event = self._requests.get(broker_id)
        if event is not None:
            event.set()

    def gone(self, *, refusals: int = 1) -> set[BrokerKey]:
        return gone(self._histories, refusals=refusals)

    def last_probe_failed(self, broker_id: int) -> bool:
        """Whether this broker probes that one and its last probe failed."""
        history = self._histories.get(broker_id)
        return broker_id in self._probed and history is not None and history.refused + history.silent > 0

    def close(self) -> None:
        self._probed = frozenset()
        gevent.killall(list(self._greenlets.values()))
        self._greenlets.clear()

    def _probe_repeatedly(self, broker_id: int) -> None:
        requested = self._requests[broker_id]
        try:
            while broker_id in self._probed:
                requested.clear()
                began = clock_s()
                broker = self._known[broker_id]
                probe = self._probe(broker.url)
                self._record(broker_id, broker.incarnation, probe)
                every = PROBE_AGAIN_S if probe is Probe.REFUSED and self._is_undecided(broker_id) else PROBE_EVERY_S
                requested.wait(max(0.0, began + every - clock_s()))
        finally:
            del self._greenlets[broker_id]

    def _is_undecided(self, broker_id: int) -> bool:
        history = self._histories.get(broker_id)
        return history is not None and history.refused < 2

    def _record(self, broker_id: int, incarnation: int, probe: Probe) -> None:
        history = self._histories.get(broker_id)
        if history is None or history.incarnation != incarnation:
            return
        before = (history.refused, history.silent)
        history.record(probe)
        if (history.refused, history.silent) == before:
            return
        if probe is Probe.ANSWERED:
            log.info("broker %d answers again", broker_id)
        elif history.refused + history.silent <= SILENT_MAX:
            log.warning("broker %d at %s: a probe was %s", broker_id, self._known[broker_id].url, probe.value)
        self._on_change()


# A certificate and its key, for brokers that ask their clients for one.
CertificatePaths = tuple[Path, Path]


class Prober:
    """Requests /livez over kept connections, one request at a time for each broker. It works on greenlets in any
    process, since its sockets are gevent's own."""

    def __init__(self, timeout_s: float = PROBE_TIMEOUT_S, certificate: CertificatePaths | None = None) -> None:
        self._timeout_s = timeout_s
        self._certificate = certificate
        self._connections: dict[str, HTTPConnection] = {}

    def probe(self, url: str) -> Probe:
        began = clock_s()
        limit = gevent.Timeout(self._timeout_s)
        limit.start()
        try:
            self._ask(url)
            return Probe.ANSWERED
        except gevent.Timeout as over:
            if over is not limit:
                raise
            # An answer that lies unread in the socket came in time: this process was too slow to read it.
            is_answered = self._has_unread_answer(url)
            self._drop(url)
            stalled = clock_s() - began > self._timeout_s + STALL_S
            return Probe.ANSWERED if is_answered else Probe.UNSURE if stalled else Probe.SILENT
        except ConnectionRefusedError:
            self._drop(url)
            return Probe.REFUSED
        except (OSError, HTTPException):
            self._drop(url)
            return Probe.SILENT
        finally:
            limit.close()

    def close(self) -> None:
        for url in list(self._connections):
            self._drop(url)

    def _ask(self, url: str) -> None:
        kept = url in self._connections
        try:
            self._exchange(url)
        except (ConnectionError, HTTPException):
            if not kept:
                raise
            self._drop(url)
            self._exchange(url)  # the other side had closed the kept connection, which proves nothing

    def _exchange(self, url: str) -> None:
        connection = self._connections.get(url)
        if connection is None:
            connection = self._connections[url] = _connection_to(url, self._timeout_s, self._certificate)
        connection.request("GET", urlsplit(url).path + "/livez")
        answer = connection.getresponse()
        answer.read(ANSWER_BYTES_MAX)
        if not answer.isclosed():
            self._drop(url)

    def _has_unread_answer(self, url: str) -> bool:
        connection = self._connections.get(url)
        if connection is None or connection.sock is None:
            return False
        poll = select.poll()
        poll.register(connection.sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _drop(self, url: str) -> None:
        connection = self._connections.pop(url, None)
        if connection is not None:
            connection.close()


def probe_once(url: str, certificate: CertificatePaths | None = None) -> Probe:
    """Send one probe, beside those of a Prober."""
    prober = Prober(PROBE_TIMEOUT_S / 2, certificate)
    try:
        return prober.probe(url)
    finally:
        prober.close()


def _connection_to(url: str, timeout_s: float, certificate: CertificatePaths | None) -> HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: HTTPConnection
    if parts.scheme == "https":
        # A completed handshake proves that the broker is alive. No secret is sent, so no certificate is verified.
        context = gevent.ssl.SSLContext(gevent.ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = gevent.ssl.CERT_NONE
        if certificate is not None:
            context.load_cert_chain(*certificate)
        connection = HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
    else:
        connection = HTTPConnection(host, parts.port, timeout=timeout_s)
    connection._create_connection = gevent.socket.create_connection  # type: ignore[attr-defined]
    return connection
