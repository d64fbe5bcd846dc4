"""Following: one greenlet for each broker that leads something here, with one long poll for all its partitions.

    Partition.SendFetch -> follow(): the fetch waits for the next request
    request -> leader, parked there until something is ready
            <- answers, each to its partition, which writes and sends its next fetch when that is durable

The next request leaves as soon as a partition has something new to send, above all an acknowledgement, even while one
is parked: the leader then ends the parked one. So at most two are on their way, and a partition that writes slowly
delays no other. After a failure the fetcher pauses briefly; the calls' carrier reports it to the control plane.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.core.replica.events import Fetch
from portalmq.broker.core.replica.isr import NEVER_MS
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.fetch_answers import PartitionKey, RecordsAnswer, echo_of
from portalmq.broker.partition.greenlets import KeptGreenlets
from portalmq.broker.partition.host import FollowedPartition
from portalmq.broker.replication.fetch_protocol import (
    FETCH,
    FETCH_BYTES_MAX,
    FETCH_WAIT_MS,
    ReplicaFetchAnswer,
    ReplicaFetchRequest,
    asked_of,
    decode_answer,
    encode,
)
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 1.0
POLLS_MAX = 2
# Received records are usually written within this time: then the next request carries the acknowledgement.
WRITE_LINGER_S = 0.005
COMPANY_LINGER_S = 0.0005
# The times at which partitions were left are searched for old ones when there are so many.
LEFT_MAX = 1_000
LEFT_REMEMBERED_MS = 10_000
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 0.5


class Calls(Protocol):
    """Carries a request to another broker and returns the answer. Raises PortalMQError."""

    def call_bytes(self, broker_id: int, name: str, body: bytes, *, timeout_s: float) -> bytes: ...


class FetchersHost(Protocol):
    cluster_id: str
    broker_id: int
    incarnation: int
    store_uuid: str
    clock: Clock
    greenlets: KeptGreenlets


class Fetchers:
    """All brokers that are followed from here. `chance` gives the jitter of pauses: a number in [0, 1)."""

    def __init__(
        self,
        host: FetchersHost,
        calls: Calls,
        *,
        wait_ms: int = FETCH_WAIT_MS,
        max_bytes: int = FETCH_BYTES_MAX,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.host = host
        self.calls = calls
        self.wait_ms = wait_ms
        self.max_bytes = max_bytes
        self.chance = chance
        self._fetchers: dict[int, Fetcher] = {}
        self._followed: dict[FollowedPartition, Fetcher] = {}
        self._left_ms: dict[PartitionKey, int] = {}
        self._closed = False

    def follow(self, partition: FollowedPartition, leader: int, fetch: Fetch) -> None:
        """Fetch this from `leader` until it is answered, replaced or withdrawn."""
        if self._closed:
            return
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = Fetcher(self, leader)
        before = self._followed.get(partition)
        if before is not None and before is not fetcher:
            self._leave(partition, before)
        self._followed[partition] = fetcher
        fetcher.ask(partition, fetch)

    def unfollow(self, partition: FollowedPartition) -> None:
        fetcher = self._followed.pop(partition, None)
        if fetcher is not None:
            self._leave(partition, fetcher)

    def _leave(self, partition: FollowedPartition, fetcher: Fetcher) -> None:
        if len(self._left_ms) >= LEFT_MAX:
            recently_ms = self.host.clock.now_ms() - LEFT_REMEMBERED_MS
            self._left_ms = {key: left_ms for key, left_ms in self._left_ms.items() if left_ms > recently_ms}
        self._left_ms[partition.topic_id, partition.number] = fetcher.heard_ms
        fetcher.drop(partition)

    def heard_ms(self, partition: FollowedPartition) -> int:
        """Return when the followed leader's broker last answered. Once it is not followed any more: no later than its
        last answer to which this replica was a follower."""
        fetcher = self._followed.get(partition)
        left_ms = self._left_ms.get((partition.topic_id, partition.number), NEVER_MS)
        return max(left_ms, fetcher.heard_ms if fetcher is not None else NEVER_MS)

    def close(self) -> None:
        self._closed = True
        for fetcher in self._fetchers.values():
            fetcher.close()


class Fetcher:
    """The fetches of one leader's broker. `_asked` are those that wait; `_unsure` those of them that the leader may not
    have, with the first turn they were sent in, 0 before; `_left` likewise. `_writing` were answered and have not
    fetched again.
    """

    def __init__(self, fetchers: Fetchers, leader: int) -> None:
        self._fetchers = fetchers
        self._leader = leader
        self._asked: dict[FollowedPartition, Fetch] = {}
        self._by_key: dict[PartitionKey, FollowedPartition] = {}
        self._unsure: dict[FollowedPartition, int] = {}
        self._left: dict[PartitionKey, int] = {}
        self._writing: set[FollowedPartition] = set()
        self._session = 1
        self._turn = 0
        self._answered_ms = 0
        self.heard_ms = NEVER_MS
        self._polls = 0
        self._failures = 0
        self._failed = False
        self._wakeup = Event()
        self._greenlet = gevent.spawn(self._run)

    def ask(self, partition: FollowedPartition, fetch: Fetch) -> None:
        self._asked[partition] = fetch
        self._by_key[partition.topic_id, partition.number] = partition
        self._unsure[partition] = 0
        self._writing.discard(partition)
        self._wakeup.set()

    def drop(self, partition: FollowedPartition) -> None:
        self._asked.pop(partition, None)
        self._unsure.pop(partition, None)
        self._writing.discard(partition)
        key = (partition.topic_id, partition.number)
        if self._by_key.get(key) is partition:
            del self._by_key[key]
            self._left[key] = 0
            self._wakeup.set()

    def close(self) -> None:
        self._greenlet.kill(block=False)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wakeup.clear()
            if self._failed:
                self._failed = False
                pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(self._failures, 10))
                gevent.sleep(pause_s * (0.5 + 0.5 * self._fetchers.chance()))
            if self._has_news() and self._polls < POLLS_MAX:
                if self._writing:
                    gevent.sleep(COMPANY_LINGER_S)
                self._send()
            elif self._asked and self._polls == 0:
                # Received records are being written: waiting a moment for their acknowledgement saves a request.
                if not (self._writing and self._wakeup.wait(WRITE_LINGER_S)):
                    self._send()
            else:
                self._wakeup.wait()

    def _has_news(self) -> bool:
        return 0 in self._unsure.values() or (bool(self._asked) and 0 in self._left.values())

    def _send(self) -> None:
        self._turn += 1
        for unsure in (self._unsure, self._left):
            for key, first_turn in unsure.items():
                if first_turn == 0:
                    unsure[key] = self._turn  # type: ignore[index]
        self._writing.clear()
        host = self._fetchers.host
        request = ReplicaFetchRequest(
            host.cluster_id,
            host.broker_id,
            host.incarnation,
            host.store_uuid,
            self._session,
            self._turn,
            self._fetchers.wait_ms,
            self._fetchers.max_bytes,
            [asked_of(partition, self._asked[partition], host.store_uuid) for partition in self._unsure],
            list(self._left),
            self._answered_ms,
            knows_compressed=True,
        )
        self._polls += 1
        host.greenlets.run(partial(self._poll, self._session, self._turn, encode(request)))

    # --- answers -----------------------------------------------------------------------------------------------------

    def _poll(self, session: int, turn: int, body: bytes) -> None:
        try:
            timeout_s = self._fetchers.wait_ms / 1000 + ANSWER_WITHIN_S
            answer = decode_answer(self._fetchers.calls.call_bytes(self._leader, FETCH, body, timeout_s=timeout_s))
        except (PortalMQError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            if session == self._session:
                if self._failures == 0:
                    log.info("the fetch from broker %d failed, and is tried again: %s", self._leader, error)
                self._restart_session()
        else:
            if session == self._session:
                self._take(turn, answer)
        finally:
            self._polls -= 1
            self._wakeup.set()

    def _restart_session(self) -> None:
        """Begin a new session after a pause and name everything: the leader's state of this one is unknown."""
        self._session += 1
        self._turn = 0
        self._answered_ms = 0
        self._unsure = dict.fromkeys(self._asked, 0)
        self._left.clear()
        self._failures += 1
        self._failed = True

    def _take(self, turn: int, answer: ReplicaFetchAnswer) -> None:
        if not answer.known:
            self._restart_session()
            return
        self._failures = 0
        self._answered_ms = max(self._answered_ms, answer.answered_ms)
        self.heard_ms = self._fetchers.host.clock.now_ms()
        self._unsure = {key: first for key, first in self._unsure.items() if not 0 < first <= turn}
        self._left = {key: first for key, first in self._left.items() if not 0 < first <= turn}
        for each in answer.partitions:
            partition = self._by_key.get(each.key)
            fetch = self._asked.get(partition) if partition is not None else None
            if partition is None or fetch is None or echo_of(fetch) != each.echo:
                continue
            del self._asked[partition]
            self._unsure.pop(partition, None)
            if isinstance(each, RecordsAnswer) and each.frames:
                self._writing.add(partition)
            try:
                partition.following.replied(each)
            except Exception:  # the other partitions were answered too, and would not be answered again
                log.exception("%s: the answer of broker %d could not be taken", partition, self._leader)
