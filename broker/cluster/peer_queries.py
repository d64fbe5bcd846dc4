"""Questions of brokers about each other: which broker reaches which, and how far their logs go.

A broker without an answer from another reports that to the controller. Before the controller replaces a leader that its
followers miss, or a broker removes a controller, it asks all others whether they reach that broker. Before an election
among replicas that have all restarted the controller asks for their log ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import gevent

from portalmq.broker.cluster.failure_detector import FailureDetector, Probe
from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.brokers import (
    REACH,
    STANDING,
    STANDINGS,
    SUSPECT,
    LogEndRequest,
    LogEndsRequest,
    Reached,
    ReachRequest,
    ReplicaLogEnd,
    ReplicaLogEnds,
    Suspicion,
    SuspicionNoted,
)
from portalmq.broker.partition.clock import Clock
from portalmq.control_plane.mirror import Mirror, PartitionKey
from portalmq.errors import NotFound, PartitionNotFound, PortalMQError, Unavailable

log = logging.getLogger(__name__)

SUSPECT_AGAIN_MS = 300


@dataclass(eq=False, repr=False)
class PeerQueries:
    """Asks other brokers, and answers them. `broker` is this broker's (id, incarnation), `probe` sends one probe to a
    URL. `on_suspicion(broker_id, incarnation)` is called on the controller for a broker that another one misses."""

    _broker: tuple[int, int]
    _mirror: Mirror
    _failure_detector: FailureDetector
    _clock: Clock
    _probe: Callable[[str], Probe]
    peers: PeerCaller | None
    own_log_ends: Callable[[Sequence[PartitionKey]], Sequence[ReplicaLogEnd | None]]
    is_controller: Callable[[], bool]
    on_suspicion: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self._broker_id, self._incarnation = self._broker
        self._suspected_ms: dict[tuple[int, int], int] = {}
        self._reporting: set[int] = set()

    # --- suspicions --------------------------------------------------------------------------------------------------

    def suspect(self, broker_id: int, incarnation: int, *, refused: bool) -> None:
        """Note that a broker does not answer this one. Never blocks.

        The controller receives the report and verifies it with a probe of its own. This broker probes instead when it
        is the controller, or when the controller is the one that does not answer.
        """
        now_ms = self._clock.now_ms()
        again_ms = self._suspected_ms.get((broker_id, incarnation), 0) + SUSPECT_AGAIN_MS
        if broker_id == self._broker_id or now_ms < again_ms:
            return
        self._suspected_ms = {key: at for key, at in self._suspected_ms.items() if now_ms - at < SUSPECT_AGAIN_MS}
        self._suspected_ms[(broker_id, incarnation)] = now_ms
        controller = self._mirror.controller
        if self.is_controller() or (controller is not None and controller.value.broker_id == broker_id):
            self._failure_detector.probe_now(broker_id)
            self.on_suspicion(self._broker_id, self._incarnation)
        elif controller is not None and self.peers is not None and broker_id not in self._reporting:
            self._reporting.add(broker_id)
            suspicion = Suspicion(broker_id, incarnation, refused)
            gevent.spawn(self._report, self.peers, controller.value.broker_id, suspicion)

    def _report(self, peers: PeerCaller, controller: int, suspicion: Suspicion) -> None:
        try:
            SUSPECT.ask(peers, controller, suspicion)
        except PortalMQError as fault:
            log.info("the controller cannot be notified about broker %d: %s", suspicion.broker_id, fault)
        finally:
            self._reporting.discard(suspicion.broker_id)

    def on_report(self, suspicion: Suspicion) -> SuspicionNoted:
        if self.is_controller():
            self._failure_detector.probe_now(suspicion.broker_id)
            self.on_suspicion(suspicion.broker_id, suspicion.incarnation)
        return SuspicionNoted()

    # --- reachability ------------------------------------------------------------------------------------------------

    def is_reached_by_others(self, broker_id: int, incarnation: int) -> bool:
        """Whether another broker reaches this one. True also when others are registered and none of them answers: then
        this broker is the one that is cut off. Blocks for at most a second."""
        others = self._mirror.brokers.keys() - {self._broker_id, broker_id}
        votes = self._votes(broker_id, incarnation, of_older=False).values()
        return any(votes) or (bool(others) and not votes)

    def reachability_of(self, brokers: Collection[int]) -> dict[int, dict[int, bool]]:
        """Return by broker which brokers reach it now, this one included. Brokers that cannot be asked are left out.
        Blocks for at most a second."""
        known = {id: broker for id in brokers if (broker := self._mirror.brokers.get(id)) is not None}
        asked = {id: gevent.spawn(self._votes, id, broker.incarnation) for id, broker in known.items()}
        gevent.joinall(list(asked.values()))
        reach = {id: each.get() for id, each in asked.items()}
        for id in reach.keys() - {self._broker_id}:
            reach[id][self._broker_id] = not self._failure_detector.last_probe_failed(id)
        return reach

    def _votes(self, broker_id: int, incarnation: int, *, of_older: bool | None = None) -> dict[int, bool]:
        """Return by broker whether it reaches this one, for each other broker that can be asked. `of_older` is the vote
        of a broker of the previous version, which does not know the question; None leaves it out as well."""
        others = self._mirror.brokers.keys() - {self._broker_id, broker_id}
        asked = {id: gevent.spawn(self._ask_reach, id, ReachRequest(broker_id, incarnation), of_older) for id in others}
        gevent.joinall(list(asked.values()))
        return {id: vote for id, each in asked.items() if (vote := each.value) is not None}

    def _ask_reach(self, other: int, reach: ReachRequest, of_older: bool | None) -> bool | None:
        assert self.peers is not None
        try:
            return REACH.ask(self.peers, other, reach).answers
        except Unavailable:
            return None
        except PortalMQError:
            return of_older

    def answer_reach(self, asked: ReachRequest) -> Reached:
        broker = self._mirror.brokers.get(asked.broker_id)
        if broker is None or broker.incarnation != asked.incarnation:
            return Reached(False)
        if self._failure_detector.last_probe_failed(asked.broker_id):
            return Reached(False)
        found = self._probe(broker.url)
        if found is Probe.UNSURE:
            raise Unavailable("this broker was paused during its probe, and knows nothing")
        return Reached(found is Probe.ANSWERED)

    # --- log ends ----------------------------------------------------------------------------------------------------

    def log_ends(self, broker_id: int, keys: Sequence[PartitionKey]) -> Sequence[ReplicaLogEnd | None]:
        """Return how far the logs of these partitions go on a broker. Raises PortalMQError."""
        if broker_id == self._broker_id:
            return self.own_log_ends(keys)
        if self.peers is None:
            raise Unavailable("other brokers cannot be asked yet")
        asked = LogEndsRequest([LogEndRequest(*key) for key in keys])
        try:
            return STANDINGS.ask(self.peers, broker_id, asked).standings
        except NotFound:  # a broker of the previous version answers for one partition a call
            return [self._log_end(self.peers, broker_id, each) for each in asked.partitions]

    def _log_end(self, peers: PeerCaller, broker_id: int, asked: LogEndRequest) -> ReplicaLogEnd | None:
        try:
            return STANDING.ask(peers, broker_id, asked, timeout_s=STANDINGS.timeout_s)
        except PartitionNotFound:
            return None

    def answer_log_ends(self, asked: LogEndsRequest) -> ReplicaLogEnds:
        found = self.own_log_ends([(each.topic_id, each.number) for each in asked.partitions])
        return ReplicaLogEnds(list(found))
