"""The membership of this broker in the cluster: its session, its registration, and what it knows of the others.

    mirror greenlet       change in the control plane -> session, registration, mirror brought up to date
    sessions greenlet     reports the end of a session at once
    subscribers greenlet  calls `on_changed` with all changes since its last call
    controller loop       does the controller's work, or watches for a missing controller (controller_loop.py)
    failure detector      probes the controller; on the controller, every broker (failure_detector.py)

The registration ends with its session. Then `on_session_lost` is called first (leaders step down), the broker registers
again as the same incarnation, the mirror reads everything, and `on_changed` is called. What is read shows whether other
leaders were elected in between.

The same code runs over the one-process control plane. No other broker exists there, so this broker becomes controller
and elects itself for all its partitions before `start` returns.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.cluster.controller_loop import ControllerLoop
from portalmq.broker.cluster.failure_detector import CertificatePaths, FailureDetector, Probe, Prober, probe_once
from portalmq.broker.cluster.peer_queries import PeerQueries
from portalmq.broker.cluster.retry_budget import AT_ONCE, RetryBudget
from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.core.replica.events import IsrAnswered, Outcome, PartitionStateChanged, ProposeIsr
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition_state import partition_state_of
from portalmq.broker.partition.yielding import TimeSlice
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog, Versioned
from portalmq.control_plane.controller import View, departures, elect
from portalmq.control_plane.mirror import Changes, Mirror, PartitionKey, SetBack
from portalmq.control_plane.plane import (
    Conflict,
    PlaneError,
    PlaneRefused,
    PlaneState,
    clock_s,
)
from portalmq.control_plane.state import BrokerState, PartitionState, with_isr
from portalmq.errors import Unavailable

log = logging.getLogger(__name__)

READ_ALL_EVERY_S = 30.0
CONFIRM_EVERY_S = 5.0
RETRY_PAUSE_S = 0.2
REGISTER_WITHIN_SESSIONS = 2
DRAIN_WITHIN_S = 5.0
POLL_S = 0.02
# How long a leader serves without an answer of the control plane, as a fraction of the session timeout.
LEASE_PART = 2 / 3


class ClusterGone(PlaneError):
    """The control plane belongs to another cluster, was emptied, or was restored from an older copy.

    The broker keeps topics that such a plane does not know, and trusts none of its ISRs.
    """


class Membership:
    """This broker as a member of the cluster.

    `on_fatal` is called when the broker must end: its id belongs to another broker now, or its credentials are refused.
    `has_files(topic_id)` says whether any file of a topic is on this broker's disk. `probe` requests /livez at a URL;
    `chance` is random.random.
    """

    def __init__(
        self,
        catalog: Catalog,
        broker_id: int,
        me: BrokerState,
        clock: Clock,
        *,
        cluster_id: str = "",
        on_fatal: Callable[[BaseException], None],
        has_files: Callable[[str], bool] | None = None,
        peers: PeerCaller | None = None,
        own_log_ends: Callable[[Sequence[PartitionKey]], Sequence[ReplicaLogEnd | None]] = lambda keys: (
            [None] * len(keys)
        ),
        probe: Callable[[str], Probe] | None = None,
        chance: Callable[[], float] = random.random,
        certificate: CertificatePaths | None = None,
    ) -> None:
        self.broker_id = broker_id
        self.me = me
        self.incarnation = me.incarnation
        self.on_changed: list[Callable[[Changes], None]] = []
        self.on_session_lost: list[Callable[[], None]] = []
        self._catalog = catalog
        self._plane = catalog.plane
        self._clock = clock
        self._on_fatal = on_fatal
        self._has_files = has_files
        self._read_all_every_s = READ_ALL_EVERY_S * (0.75 + chance() / 2)
        self._noted = Event()
        self._session_noted = Event()
        self.mirror = Mirror(self._plane, on_noted=self._noted.set, new_pace=lambda: TimeSlice().paced)
        self._prober = Prober(certificate=certificate)
        self._probe = probe or self._prober.probe
        self.failure_detector = FailureDetector(self._probe, self._wake_controller_loop)
        self.peer_queries = PeerQueries(
            (broker_id, me.incarnation),
            self.mirror,
            self.failure_detector,
            clock,
            probe or partial(probe_once, certificate=certificate),
            peers,
            own_log_ends,
            is_controller=lambda: self.is_controller,
            on_suspicion=lambda suspect, incarnation: self.controller_loop.note_suspicion(suspect, incarnation),
        )
        self.controller_loop = ControllerLoop(
            self, catalog, self.mirror, self.failure_detector, self.peer_queries, clock, chance
        )
        self._cluster_id = cluster_id
        # The session in which this broker is registered; 0 for none.
        self._session = 0
        self._answered_s = 0.0
        self._was_unavailable = False
        self._undelivered = Changes()
        self._has_undelivered = Event()
        self._closing = Event()
        self._greenlets: list[gevent.Greenlet] = []
        self._confirmed: set[str] = set()

    @property
    def is_controller(self) -> bool:
        return self.controller_loop.held is not None

    @property
    def registered(self) -> bool:
        return self._session != 0 and self._session == self._plane.session_id

    @property
    def lease_ms(self) -> int:
        """How long a leader serves without an answer of the control plane: shorter than its session."""
        return int(1_000 * self._plane.session_timeout_s * LEASE_PART)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, patience: RetryBudget = AT_ONCE) -> None:
        """Register, read everything, run the controller loop once, and notify the subscribers. Wait for an unavailable
        control plane as long as `patience` allows.

        Raises BrokerIdTaken when a broker with another data directory holds this id and stays; PlaneError.
        """
        self._cluster_id = self._cluster_id or patience(self._catalog.cluster_id)
        self._plane.watch(self._note_change)
        patience(self._join)
        self._greenlets = [
            gevent.spawn(work) for work in (self._run_mirror, self._run_sessions, self.controller_loop.run)
        ]
        self._notify_subscribers()
        self._greenlets.append(gevent.spawn(self._run_subscribers))
        self._wake_controller_loop()

    def _join(self) -> None:
        """Register, and read everything. Repeat a broken attempt safely: each step finds what is done already."""
        self._register_patiently()
        self._undelivered.add(self.mirror.refresh())
        self.controller_loop.update_watched_brokers()
        if self.mirror.brokers.keys() <= {self.broker_id}:
            self.controller_loop.run_pass_safely()
            self._undelivered.add(self.mirror.refresh())

    def drain(self) -> None:
        """Ask for other leaders, and wait for them within DRAIN_WITHIN_S, as long as another broker can lead."""
        if not self.registered:
            return
        self.me = msgspec.structs.replace(self.me, draining=True)
        try:
            self._catalog.register_broker(self.broker_id, self.me)
            deadline = clock_s() + DRAIN_WITHIN_S
            while self._could_hand_over() and clock_s() < deadline:
                gevent.sleep(POLL_S)
            self.controller_loop.resign()
        except (PlaneError, Unavailable) as fault:
            log.warning("leadership is not handed over: %s", fault)

    def close(self) -> None:
        """Leave the cluster, after fetching has stopped. The controller finds other leaders for what is still led."""
        self._closing.set()
        self.controller_loop.close()
        self.failure_detector.close()
        gevent.killall(self._greenlets)
        self._prober.close()
        if not self.registered:
            return
        try:
            self.controller_loop.resign()
            # In this order: nobody lets a broker back into an ISR that is not registered.
            self._catalog.unregister_broker(self.broker_id)
            view = View(self.mirror.topics, self.mirror.partitions, {})
            self._catalog.commit_fitting(departures(view, self.broker_id))
        except PlaneError as fault:
            log.warning("the registration ends with the session: %s", fault)
        self._session = 0

    def _could_hand_over(self) -> bool:
        """Whether this broker leads a partition that another one can lead."""
        others = {number: broker for number, broker in self.controller_loop.live().items() if not broker.draining}
        others.pop(self.broker_id, None)
        return any(
            held.value.leader == self.broker_id and elect(held.value, others).leader is not None
            for held in list(self.mirror.partitions.values())
        )

    # --- the session and the registration ----------------------------------------------------------------------------

    def _register_patiently(self) -> None:
        """Register. Wait for the entry of a killed broker to end with its session, unless that broker is alive."""
        deadline = clock_s() + REGISTER_WITHIN_SESSIONS * self._plane.session_timeout_s
        while True:
            try:
                return self._register()
            except BrokerIdTaken as taken:
                # No other broker can listen at this broker's own URL.
                lives = taken.url not in ("", self.me.url) and self._probe(taken.url) is Probe.ANSWERED
                if lives or clock_s() > deadline:
                    raise
                log.warning("%s; waiting for its session to end", taken)
            gevent.sleep(RETRY_PAUSE_S)

    def _register(self) -> None:
        session = self._plane.session_id
        self._check_cluster("ZooKeeper has lost what was committed in it" if self._plane.set_back else "")
        self._catalog.register_broker(self.broker_id, self.me)
        if self._session != session:
            # At the first registration "is ready" follows, and is enough for a person.
            level = logging.INFO if self._was_unavailable else logging.DEBUG
            log.log(
                level, "broker %d is registered at %s, incarnation %d", self.broker_id, self.me.url, self.incarnation
            )
        self._session = session

    def _check_cluster(self, set_back: str = "") -> None:
        """Raise ClusterGone if the cluster has changed. `set_back` describes how the control plane knows less than
        before; it is empty when it does not."""
        found = self._catalog.find_cluster_id()
        if found != self._cluster_id:
            raise ClusterGone(
                f"the control plane is of {f'cluster {found}' if found else 'no cluster'} now, and this broker of "
                f"cluster {self._cluster_id}: was ZooKeeper wiped? `portalmq adopt` writes back what the brokers hold"
            )
        if set_back:
            raise ClusterGone(
                f"{set_back}: was it restored from an older copy? Stop all brokers. Then give ZooKeeper its newest "
                "data, or empty it, and `portalmq adopt` writes back what the brokers hold"
            )

    def _note_change(self, path: str | None) -> None:
        """Note a change in the control plane. Called by the plane; never blocks."""
        self.mirror.note(path)
        if path is None:
            self._session_noted.set()

    def _run_sessions(self) -> None:
        """Report the end of a session at once: the mirror's greenlet may be waiting for the next session."""
        while not self._closing.is_set():
            self._session_noted.wait()
            self._session_noted.clear()
            self._check_session()

    def _check_session(self) -> None:
        if self._session in (0, self._plane.session_id):
            return
        self._session = 0
        self._was_unavailable = True
        log.warning("the session with the control plane is lost")
        self.controller_loop.step_down()
        for on_lost in self.on_session_lost:
            _safely(on_lost)

    def _keep_session(self) -> None:
        """Register in a new session."""
        self._check_session()
        self._was_unavailable |= self._plane.state is not PlaneState.CONNECTED
        if self._session == 0 and self._plane.session_id != 0:
            self._register()
            self.mirror.note(None)

    # --- the mirror and its subscribers ------------------------------------------------------------------------------

    def _run_mirror(self) -> None:
        read_all_at = clock_s() + self._read_all_every_s
        while not self._closing.is_set():
            pause_s = min(read_all_at - clock_s(), CONFIRM_EVERY_S if self._unconfirmed() else READ_ALL_EVERY_S)
            self._noted.wait(max(0.001, pause_s))
            self._noted.clear()
            if clock_s() >= read_all_at:
                read_all_at = clock_s() + self._read_all_every_s
                self.mirror.note(None)
            try:
                self._keep_session()
                self._refresh()
            except (PlaneRefused, BrokerIdTaken, ClusterGone, SetBack) as fault:
                log.critical("this broker is no member any more: %s", fault)
                return self._on_fatal(fault)
            except Exception as fault:
                self._was_unavailable = True
                if not isinstance(fault, Unavailable):
                    log.exception("the control plane could not be read")
                self._noted.set()
                self._closing.wait(RETRY_PAUSE_S)

    def _refresh(self) -> None:
        try:
            changes = self.mirror.refresh()
        except SetBack as fault:
            self._check_cluster(str(fault))
            raise
        self._undelivered.add(changes)
        if not self.registered:
            self._noted.set()  # the session ended during the refresh, which is reported first
            return
        if self.mirror.brokers.get(self.broker_id) != self.me:
            self._register()  # the entry was removed, or is not read yet
        if self._was_unavailable:
            self._was_unavailable = False
            self.controller_loop.begin_grace(self._plane.session_timeout_s)
        self.controller_loop.update_watched_brokers()
        if changes:
            self._has_undelivered.set()
            self._wake_controller_loop()
        self._confirm_removed()

    def _run_subscribers(self) -> None:
        while not self._closing.is_set():
            self._has_undelivered.wait()
            self._has_undelivered.clear()
            self._notify_subscribers()

    def _notify_subscribers(self) -> None:
        changes, self._undelivered = self._undelivered, Changes()
        if changes:
            for changed in self.on_changed:
                _safely(partial(changed, changes))

    def _unconfirmed(self) -> list[str]:
        self._confirmed &= self.mirror.tombstones.keys()
        return [topic_id for topic_id in self.mirror.tombstones if topic_id not in self._confirmed]

    def _confirm_removed(self) -> None:
        """Confirm for each deleted topic that none of its files are left on this broker."""
        has_files = self._has_files
        if has_files is None:
            return
        for topic_id in self._unconfirmed():
            if not has_files(topic_id):
                self._catalog.confirm_removed(topic_id, self.broker_id)
                self._confirmed.add(topic_id)

    def _wake_controller_loop(self) -> None:
        self.controller_loop.wake.set()

    def suspect(self, broker_id: int, incarnation: int, *, refused: bool) -> None:
        """See PeerQueries.suspect."""
        self.peer_queries.suspect(broker_id, incarnation, refused=refused)

    # --- what partitions need ----------------------------------------------------------------------------------------

    def answered_ms(self) -> int:
        """Return when the last request that the control plane answered was begun, on the clock that times leases.

        An answer in a session that this broker has not reported yet renews nothing: the previous session has ended, and
        its leaders must step down first.
        """
        if self.registered:
            self._answered_s = self._plane.last_answered
        return self._clock.now_ms() - ceil(1_000 * (clock_s() - self._answered_s))

    def change_isr(
        self, topic_id: str, number: int, proposal: ProposeIsr, configured_min_insync: int | None
    ) -> IsrAnswered:
        """Compare-and-set what a replica proposes. Blocks until the outcome is known, or unknowable; never raises."""
        try:
            return self._change_isr(topic_id, number, proposal, configured_min_insync)
        except Conflict:
            return IsrAnswered(proposal.version, Outcome.CONFLICT)
        except Exception as fault:
            # An unavailable plane applied nothing of this attempt; an earlier attempt may still apply.
            if not isinstance(fault, Unavailable):
                log.exception("the ISR of %s/%d could not be changed", topic_id, number)
            return IsrAnswered(proposal.version, Outcome.UNKNOWN)

    def _change_isr(
        self, topic_id: str, number: int, proposal: ProposeIsr, configured_min_insync: int | None
    ) -> IsrAnswered:
        held = self.mirror.partitions.get((topic_id, number))
        if held is None or held.version != proposal.version:
            held = self.mirror.reread(topic_id, number)
        if held is None or held.version != proposal.version:
            return IsrAnswered(proposal.version, Outcome.CONFLICT)
        wanted = with_isr(
            held.value,
            proposal.isr,
            proposal.store_uuids,
            proposal.incarnations,
            resigning=self.broker_id if proposal.resigns else None,
        )
        version = self._catalog.set_partition(topic_id, number, wanted, held.version)
        return IsrAnswered(
            proposal.version, Outcome.APPLIED, partition_state_of(wanted, version, configured_min_insync)
        )

    def reread(
        self, topic_id: str, number: int, refresh: int, configured_min_insync: int | None
    ) -> PartitionStateChanged | None:
        """Return the state of a partition after a sync; None when it is gone or the control plane does not answer, in
        which case the caller asks again. Never raises."""
        try:
            held: Versioned[PartitionState] | None = self.mirror.reread(topic_id, number)
        except Exception as fault:
            if not isinstance(fault, Unavailable):
                log.exception("%s/%d could not be read again", topic_id, number)
            return None
        return (
            None
            if held is None
            else partition_state_of(held.value, held.version, configured_min_insync, refresh=refresh)
        )


def _safely(call: Callable[[], None]) -> None:
    """Call a subscriber. If it fails, the others are still called."""
    try:
        call()
    except Exception:
        log.exception("a subscriber of the control plane failed")
