"""Fencing of named producers: no leader appends a batch of an older epoch.

    POST /v1/producers {"name"}  -> epoch + 1 in the control plane
                                 -> every live broker confirms it, or is gone      "fence"
                                 -> answered

The log of a partition holds the epochs that have written there. That is enough for partitions that the new epoch has
reached. For the others each broker keeps the epochs of all *named* producers in memory, and a leader checks them before
it assigns offsets. Unnamed producers cost one dict lookup.

No broker is missed. The answer waits until every broker that is registered when the epoch is raised has confirmed it,
or is no longer registered. A broker that registers later reads all epochs before it takes a stamped batch. A broker
without contact to the control plane for so long that its registration may have ended refuses batches of named
producers. So named producers need ZooKeeper; all others do not.

An instance whose last batch has an unknown outcome takes a new epoch. It must not fence its own successor with that. So
it sends its instance name, and is refused when another instance has the producer's name.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import gevent

from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.messages import FENCE, Fence, FencingConfirmed
from portalmq.broker.core.replica.producers import Stamp
from portalmq.broker.partition.clock import Clock
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.control_plane.catalog import PRODUCER_ID_BLOCK, Catalog
from portalmq.control_plane.plane import PlaneError, PlaneState
from portalmq.errors import Fenced, InvalidRequest, PortalMQError, Unavailable
from portalmq.wire import ProducerIdentity

log = logging.getLogger(__name__)

FENCE_TIMEOUT_S = FENCE.timeout_s
# A paused broker stays registered for one session.
CONFIRM_WITHIN_SESSIONS = 1.5
CONFIRM_PAUSE_S = 0.05
READ_AGAIN_S = 0.2
# The pause after a failed question, which took a session timeout: the next batches do not wait for another one.
ASK_AGAIN_MS = 5_000


class FencingMembership(Protocol):
    """The part of broker/cluster/membership.py that fencing needs."""

    @property
    def registered(self) -> bool: ...
    @property
    def lease_ms(self) -> int: ...
    def answered_ms(self) -> int: ...


class ProducerFencing:
    """The newest known epoch of every named producer.

    Invariant: after a complete read in the current session, this broker knows an epoch before any broker's `take_over`
    returns it.
    """

    def __init__(
        self, broker_id: int, catalog: Catalog, membership: FencingMembership, peers: PeerCaller, clock: Clock
    ) -> None:
        self._broker_id = broker_id
        self._catalog = catalog
        self._membership = membership
        self._peers = peers
        self._clock = clock
        self._epochs: dict[int, int] = {}
        # Ids below this were allocated. The ids of the first block are accepted without a check.
        self._given_below = PRODUCER_ID_BLOCK
        # The control plane is not asked again before this time.
        self._ask_from_ms = 0
        # The session of the last complete read; 0 before the first one.
        self._read_in = 0
        self._reading: gevent.Greenlet | None = None

    # --- checks of the leader ----------------------------------------------------------------------------------------

    def check(self, stamp: Stamp) -> None:
        """Raise Fenced for an older epoch than the newest one, Unavailable when that is not known now. Does not switch
        greenlets, so an append right after it comes before any later fence."""
        if self._read_in != self._catalog.plane.session_id:
            self.sync()
            raise Unavailable(
                "this broker has a new session and is reading the epochs of named producers", retry_after_s=0.1
            )
        epoch = self._epochs.get(stamp.producer_id)
        if epoch is None:
            return
        if stamp.producer_epoch < epoch:
            raise Fenced(
                f"producer {stamp.producer_id} is at epoch {epoch}, and this batch is of epoch"
                f" {stamp.producer_epoch}: another instance of the producer has taken over"
            )
        if not self._is_in_touch():
            raise Unavailable(
                "the control plane does not answer, so this broker cannot know whether this named producer has a newer"
                " epoch",
                retry_after_s=0.5,
            )

    def check_given(self, producer_id: int) -> None:
        """Raise InvalidRequest for an id that was never allocated. Accepts any id while the control plane is away."""
        if producer_id >= SCHEDULE_IDS_FROM:
            raise InvalidRequest(f"producer id {producer_id} is a schedule's: get one with POST /v1/producers")
        if producer_id < self._given_below or self._clock.now_ms() < self._ask_from_ms:
            return
        if self._catalog.plane.state is not PlaneState.CONNECTED:
            return
        try:
            self._given_below = max(self._given_below, self._catalog.producer_ids_below())
        except (PlaneError, Unavailable) as fault:
            log.info("cannot check producer id %d now: %s", producer_id, fault)
            self._ask_from_ms = self._clock.now_ms() + ASK_AGAIN_MS
            return
        if producer_id >= self._given_below:
            raise InvalidRequest(f"producer id {producer_id} was never allocated: get one with POST /v1/producers")

    def _is_in_touch(self) -> bool:
        """Return True when this broker is certainly registered, so that a broker that raises an epoch waits for it."""
        return (
            self._membership.registered
            and self._clock.now_ms() - self._membership.answered_ms() < self._membership.lease_ms
        )

    # --- reading the epochs ------------------------------------------------------------------------------------------

    def on_cluster_changed(self, _: object = None) -> None:
        """React to a change in the control plane. In a new session, read all epochs before this broker leads."""
        if self._read_in == self._catalog.plane.session_id:
            return
        try:
            self.read()
        except (PlaneError, PortalMQError) as fault:
            log.info("the epochs of named producers cannot be read now: %s", fault)
        self.sync()

    def sync(self) -> None:
        """Start a read of all epochs if the current session had none. Does not block."""
        if self._read_in != self._catalog.plane.session_id and self._reading is None:
            self._reading = gevent.spawn(self._read_patiently)

    def read(self) -> bool:
        """Read all epochs; return False when this broker is not registered or the session ended. Raises PlaneError."""
        session = self._catalog.plane.session_id
        if not self._membership.registered:
            return False
        for producer in self._catalog.named_producers():
            self._learn(producer.id, producer.epoch)
        if session != self._catalog.plane.session_id:
            return False
        self._read_in = session
        return True

    def _read_patiently(self) -> None:
        try:
            while self._read_in != self._catalog.plane.session_id:
                try:
                    if self.read():
                        return
                except (PlaneError, PortalMQError) as fault:
                    log.info("the epochs of named producers cannot be read now: %s", fault)
                gevent.sleep(READ_AGAIN_S)
        finally:
            self._reading = None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.kill(block=False)

    def _learn(self, producer_id: int, epoch: int) -> None:
        self._epochs[producer_id] = max(epoch, self._epochs.get(producer_id, 0))

    def on_fence(self, fence: Fence) -> FencingConfirmed:
        """Learn a new epoch from another broker."""
        self._learn(fence.producer_id, fence.epoch)
        return FencingConfirmed()

    # --- taking over -------------------------------------------------------------------------------------------------

    def take_over(self, name: str, instance: str = "", *, renews: bool = False) -> ProducerIdentity:
        """Return the name's id with the next epoch. From then on all leaders refuse older epochs.

        `instance` names the calling process. With `renews` it had the name before, and is refused (Fenced) when another
        instance has it now. Raises Unavailable (unknown) when a live broker does not confirm in time; a repeat is safe.
        """
        identity = self._catalog.next_producer(name, instance=instance, renews=renews)
        fence = Fence(identity.id, identity.epoch)
        self._learn(identity.id, identity.epoch)
        deadline = time.monotonic() + FENCE_TIMEOUT_S + CONFIRM_WITHIN_SESSIONS * self._catalog.plane.session_timeout_s
        confirmed: set[tuple[int, int]] = set()
        while True:
            # Read from the control plane, not from the mirror: this must include every broker that registered before
            # the epoch was raised.
            live = {(number, broker.incarnation) for number, broker in self._catalog.brokers().items()}
            left = sorted(broker for broker in live - confirmed if broker[0] != self._broker_id)
            if not left:
                return identity
            calls = {broker: gevent.spawn(self._confirm, broker[0], fence) for broker in left}
            gevent.joinall(calls.values())
            confirmed |= {broker for broker, call in calls.items() if call.value}
            silent = [number for number, incarnation in left if (number, incarnation) not in confirmed]
            if not silent:
                return identity
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"broker {silent[0]} does not answer and is still registered: it might accept messages of an older"
                    f" instance of producer {name!r}",
                    outcome="unknown",
                    retry_after_s=1.0,
                )
            gevent.sleep(CONFIRM_PAUSE_S)

    def _confirm(self, broker_id: int, fence: Fence) -> bool:
        try:
            FENCE.ask(self._peers, broker_id, fence)
        except PortalMQError as error:
            log.info("broker %d has not confirmed a new epoch yet: %s", broker_id, error)
            return False
        return True
