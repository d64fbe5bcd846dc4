"""Named producers fence their zombies: no leader takes a batch of an epoch that has been succeeded.

    POST /v1/producers {"name"}  -> epoch + 1 in the control plane
                                 -> every live broker hears of it, or is gone      "fence"
                                 -> answered

A partition's log knows the epochs that have written there, which is enough for partitions that the successor has
reached already. For the others each broker keeps the epoch of every *named* producer in memory, and a leader looks
there before it allots offsets. An unnamed producer is in no such list: a look into a dict is all that it costs.

Nobody can be missed. Who is registered when the epoch is raised is told, and the answer waits for that, or for the end
of his registration. Who registers later reads all epochs then, before it takes a stamped batch. And a broker that has
not heard from the control plane for so long that its registration may have ended takes no batch of a named producer:
those need ZooKeeper, where all others go on without.

An instance that has to take a new epoch (what became of its last batch, nobody knows) must not fence its own successor
by that: it names itself, and is refused when another one has the name by then.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import gevent
import msgspec

from portalmq.broker.cluster.peers import Peers
from portalmq.broker.core.replica.stamp import Stamp
from portalmq.broker.partition.clock import Clock
from portalmq.control_plane.catalog import PRODUCER_ID_BLOCK, Catalog
from portalmq.control_plane.plane import PlaneError, PlaneState
from portalmq.errors import Fenced, InvalidRequest, PortalMQError, Unavailable
from portalmq.wire import ProducerIdentity

log = logging.getLogger(__name__)

FENCE_TIMEOUT_S = 2.0
# A broker that stands still keeps its registration for a session.
HEARD_WITHIN_SESSIONS = 1.5
HEARD_PAUSE_S = 0.05
READ_AGAIN_S = 0.2
# A question that got no answer took a session timeout: batches do not wait for that one after the other.
ASK_AGAIN_MS = 5_000


class Fence(msgspec.Struct, array_like=True, frozen=True):
    """The named producer of this id is of this epoch now."""

    producer_id: int
    epoch: int


class FencingConfirmed(msgspec.Struct, array_like=True, frozen=True):
    """No older epoch is taken here any more."""


_decode = msgspec.msgpack.Decoder(Fence).decode
_HEARD = msgspec.msgpack.encode(FencingConfirmed())


class FencingMembership(Protocol):
    """What is needed of broker/cluster/membership.py."""

    @property
    def registered(self) -> bool: ...
    @property
    def lease_ms(self) -> int: ...
    def answered_ms(self) -> int: ...


class ProducerFencing:
    """The newest epoch of every named producer, as far as this broker has to know it.

    Invariant: once all was read in the session that goes on, an epoch is known here before `take_over` anywhere answers
    with it.
    """

    def __init__(
        self, broker_id: int, catalog: Catalog, membership: FencingMembership, peers: Peers, clock: Clock
    ) -> None:
        self._broker_id = broker_id
        self._catalog = catalog
        self._membership = membership
        self._peers = peers
        self._clock = clock
        self._epochs: dict[int, int] = {}
        # Ids below were given away. The first ones may be anybody's: they cannot be many.
        self._given_below = PRODUCER_ID_BLOCK
        # Before this time nobody asks for more of them.
        self._ask_from_ms = 0
        # The session in which everything was read; 0 before the first time.
        self._read_in = 0
        self._reading: gevent.Greenlet | None = None

    # --- the leader's question ---------------------------------------------------------------------------------------

    def check(self, stamp: Stamp) -> None:
        """Raises Fenced when the producer has been succeeded, Unavailable when that cannot be known just now. Does not
        switch greenlets: what is appended right after it is appended before any later fence."""
        if self._read_in != self._catalog.plane.session_id:
            self.sync()
            raise Unavailable("this broker has just come back, and reads who was fenced meanwhile", retry_after_s=0.1)
        epoch = self._epochs.get(stamp.producer_id)
        if epoch is None:
            return
        if stamp.producer_epoch < epoch:
            raise Fenced(
                f"producer {stamp.producer_id} has moved on to epoch {epoch}, this batch is of epoch"
                f" {stamp.producer_epoch}: another instance of the producer has taken over"
            )
        if not self._is_in_touch():
            raise Unavailable(
                "the control plane does not answer, so nobody can tell whether this producer was succeeded: a named"
                " producer waits for it",
                retry_after_s=0.5,
            )

    def check_given(self, producer_id: int) -> None:
        """Raises InvalidRequest for an id that nobody was given, as far as the control plane can be asked."""
        if producer_id < self._given_below or self._clock.now_ms() < self._ask_from_ms:
            return
        if self._catalog.plane.state is not PlaneState.CONNECTED:
            return
        try:
            self._given_below = max(self._given_below, self._catalog.producer_ids_below())
        except (PlaneError, Unavailable) as fault:
            log.info("whether producer %d is known cannot be asked now: %s", producer_id, fault)
            self._ask_from_ms = self._clock.now_ms() + ASK_AGAIN_MS
            return
        if producer_id >= self._given_below:
            raise InvalidRequest(f"producer id {producer_id} was given to nobody: take one with POST /v1/producers")

    def _is_in_touch(self) -> bool:
        """Whether this broker's registration is certain to stand, so that whoever raises an epoch waits for it."""
        return (
            self._membership.registered
            and self._clock.now_ms() - self._membership.answered_ms() < self._membership.lease_ms
        )

    # --- knowing -----------------------------------------------------------------------------------------------------

    def on_cluster_changed(self, _: object = None) -> None:
        """The control plane shows something new. In a new session all is read before anybody leads in it."""
        if self._read_in == self._catalog.plane.session_id:
            return
        try:
            self.read()
        except (PlaneError, PortalMQError) as fault:
            log.info("the epochs of named producers cannot be read now: %s", fault)
        self.sync()

    def sync(self) -> None:
        """See to it that all is read in the session that goes on. Does not block."""
        if self._read_in != self._catalog.plane.session_id and self._reading is None:
            self._reading = gevent.spawn(self._read_patiently)

    def read(self) -> bool:
        """Read every epoch, when this broker is registered; whether that was done. Raises PlaneError."""
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

    def serve(self, body: bytes) -> bytes:
        """Another broker tells of a new epoch."""
        fence = _decode(body)
        self._learn(fence.producer_id, fence.epoch)
        return _HEARD

    # --- taking over -------------------------------------------------------------------------------------------------

    def take_over(self, name: str, instance: str = "", *, renews: bool = False) -> ProducerIdentity:
        """The name's id with the next epoch. When it is answered no leader takes an older one any more.

        `instance` is the process that asks; with `renews` it has had the name before, and is refused (Fenced) when
        another instance has it now. Raises Unavailable (unknown) when a live broker does not answer for too long:
        asking again is safe.
        """
        identity = self._catalog.next_producer(name, instance=instance, renews=renews)
        fence = Fence(identity.id, identity.epoch)
        self._learn(identity.id, identity.epoch)
        deadline = time.monotonic() + FENCE_TIMEOUT_S + HEARD_WITHIN_SESSIONS * self._catalog.plane.session_timeout_s
        told: set[tuple[int, int]] = set()
        while True:
            # Read, and not taken from the mirror: who registered before the epoch was raised must stand in it.
            live = {(number, broker.incarnation) for number, broker in self._catalog.brokers().items()}
            left = sorted(place for place in live - told if place[0] != self._broker_id)
            if not left:
                return identity
            asked = {place: gevent.spawn(self._tell, place[0], fence) for place in left}
            gevent.joinall(asked.values())
            told |= {place for place, heard in asked.items() if heard.value}
            silent = [number for number, incarnation in left if (number, incarnation) not in told]
            if not silent:
                return identity
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"broker {silent[0]} gives no answer and has not been given up yet: until it is, it might take what"
                    f" an older instance of producer {name!r} sends",
                    outcome="unknown",
                    retry_after_s=1.0,
                )
            gevent.sleep(HEARD_PAUSE_S)

    def _tell(self, broker_id: int, fence: Fence) -> bool:
        try:
            self._peers.call(broker_id, "fence", fence, FencingConfirmed, timeout_s=FENCE_TIMEOUT_S)
        except PortalMQError as error:
            log.info("broker %d does not hear of a fence yet: %s", broker_id, error)
            return False
        return True
