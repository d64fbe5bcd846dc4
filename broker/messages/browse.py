"""Browsing and purging messages on the leaders of their partitions. Browsing consumes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar, NamedTuple

import msgspec
from gevent.event import Event

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one, place_of, together
from portalmq.broker.cluster.rpc import TopicNumbers, TopicPartition, first_error
from portalmq.broker.cluster.rpc.messages import BROWSE, OPEN_ORDERS, PURGE, Browse, Browsed, PurgeCall
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.partition.answer_size import first_of
from portalmq.broker.partition.long_poll import LongPolls, Peer
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.retention import ORDERS_WITHIN_S
from portalmq.broker.partition.yielding import TimeSlice, in_short_turns
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, NotFound, PortalMQError, Unavailable

PAGE_MESSAGES = 1_000


class StoredMessage(msgspec.Struct, gc=False, frozen=True):
    """A message in the log."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: Record
    # Encoders show it as a LeasedMessage without a lease.
    receipt: ClassVar[None] = None
    delivery_count: ClassVar[None] = None
    lease_expires_at_ms: ClassVar[None] = None


class StoredPage(NamedTuple):
    """A page of a partition; the next page begins at `next_offset`."""

    messages: list[StoredMessage]
    next_offset: int
    log_start_offset: int
    high_watermark: int


# offset, timestamp_ms, record
FoundMessage = tuple[int, int, Record]
_record_of: Callable[[FoundMessage], Record] = itemgetter(2)


@dataclass(eq=False, repr=False)
class _Client:
    """Ends a wait when the client disconnects or the broker closes, whichever comes first."""

    _peer: Peer | None
    _long_polls: LongPolls

    def gone(self) -> bool:
        return self._long_polls.closed or (self._peer is not None and self._peer.gone())

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        event = Event()
        event.rawlink(lambda _: on_gone())
        let_go = self._long_polls.hold(event)
        unwatch = self._peer.watch(event.set) if self._peer is not None else lambda: None

        def stop() -> None:
            unwatch()
            let_go()

        return stop


@dataclass(eq=False, repr=False)
class MessageBrowser:
    """Browses and purges. `_known` finds a topic by name, and waits for one that was just created."""

    _known: Callable[[str], Topic]
    _metadata_cache: MetadataCache
    _leaders: LeaderRouter
    _long_polls: LongPolls

    # --- a page ------------------------------------------------------------------------------------------------------

    def browse(
        self,
        topic: str,
        number: int,
        *,
        offset: int | None = None,
        position: str | None = None,
        at_ms: int | None = None,
        limit: int,
        wait_ms: int = 0,
        peer: Peer | None = None,
        forward: bool = True,
    ) -> StoredPage:
        """Return messages from an offset, a position or a time on; wait up to `wait_ms` for the first one."""
        place = place_of(self._known(topic).state, number)
        request = Browse(*place, offset, position, at_ms, limit, wait_ms)
        client = _Client(peer, self._long_polls) if wait_ms else None
        local = self.local_browse(request, peer)
        browsed = self._leaders.call_one(BROWSE, request, local, forward=forward, repeatable=True, waiting=client)
        messages = [StoredMessage(place.topic, number, *message) for message in browsed.messages]
        return StoredPage(messages, browsed.next_offset, browsed.log_start_offset, browsed.high_watermark)

    def local_browse(self, request: Browse, peer: Peer | None) -> LocalWork[Browsed]:
        return one_by_one(lambda place: self._page_here(place, request, peer))

    def _page_here(self, place: TopicPartition, call: Browse, peer: Peer | None) -> Browsed:
        partition = self._metadata_cache.partition(place)
        start = self._start(partition, call)
        if call.wait_ms:
            self._wait_readable(partition, start, call.wait_ms, peer)
            partition = self._metadata_cache.partition(place)  # the wait may have seen it deleted or led elsewhere
        there = self._messages_here(place, start, partition.high_watermark, call.limit)
        messages, _ = first_of(there, _record_of, call.limit)
        partition = self._metadata_cache.partition(place)
        high_watermark = partition.high_watermark
        next_offset = messages[-1][0] + 1 if messages else start
        if next_offset >= partition.readable_end:
            next_offset = high_watermark
        return Browsed(messages, next_offset, partition.log.log_start_offset, high_watermark)

    def _messages_here(self, place: TopicPartition, offset: int, end: int, left: int) -> Iterator[FoundMessage]:
        """Yield at most `left` messages in [offset, end). Files are read on a native thread, and others run between
        messages; the partition may be deleted meanwhile, or led elsewhere, which raises its error."""
        turn = TimeSlice()
        while left > 0:
            self._metadata_cache.partition(place).read_ahead(offset)
            reader = self._metadata_cache.partition(place).reader
            piece = next(reader.pieces(offset, end, left), None)
            if piece is None:
                return
            for at, record in turn.paced(enumerate(piece.records(), piece.start)):
                yield at, piece.batch.appended_at_ms, record
            left -= piece.end - piece.start
            offset = piece.end

    def _start(self, partition: Partition, call: Browse) -> int:
        if call.at_ms is not None:
            return min(partition.log.offset_for_time(call.at_ms), partition.high_watermark)
        if call.position == "latest":
            return partition.high_watermark
        if call.offset is None:
            return partition.log.log_start_offset
        partition.check_offset(call.offset)
        return call.offset

    def _wait_readable(self, partition: Partition, offset: int, wait_ms: int, peer: Peer | None) -> None:
        event = Event()
        unwatch = peer.watch(event.set) if peer is not None else None
        let_go = self._long_polls.hold(event)
        try:
            partition.wait_readable(offset, event, wait_ms / 1000)
        finally:
            let_go()
            if unwatch is not None:
                unwatch()

    # --- the whole queue ---------------------------------------------------------------------------------------------

    def read_all(self, topic: str, limit: int | None, *, forward: bool = True) -> Iterator[StoredMessage]:
        """Yield all messages that are in the queue now, partition by partition, a page at a time from each leader."""
        state = self._known(topic).state
        places = [place_of(state, number) for number in range(state.partitions)]
        if not forward:
            self._leaders.check_led_here(places)
        first = [self.browse(topic, place.number, limit=1, forward=forward) for place in in_short_turns(places)]
        ends = [page.high_watermark for page in first]
        return self._read_all(topic, ends, limit, forward)

    def _read_all(self, topic: str, ends: list[int], limit: int | None, forward: bool) -> Iterator[StoredMessage]:
        left = limit if limit is not None else 1 << 62
        for number, end in in_short_turns(enumerate(ends)):
            offset: int | None = None
            while left > 0 and (offset is None or offset < end):
                try:
                    size = min(left, PAGE_MESSAGES)
                    page = self.browse(topic, number, offset=offset, limit=size, forward=forward)
                except NotFound as gone:
                    raise Unavailable(f"the topic was deleted during the read: {gone}", outcome="unknown") from gone
                for message in page.messages:
                    if message.offset < end:
                        left -= 1
                        yield message
                if page.next_offset == offset or not page.messages:
                    break
                offset = max(page.next_offset, page.log_start_offset)

    # --- purging -----------------------------------------------------------------------------------------------------

    def purge(self, topic: str, *, partition: int | None, before_offset: int | None, forward: bool = True) -> None:
        """Remove messages below `before_offset`, or all readable ones."""
        state = self._known(topic).state
        if before_offset is not None and partition is None and state.partitions > 1:
            raise InvalidRequest("before_offset is an offset of one partition: name it with partition=")
        numbers = range(state.partitions) if partition is None else [partition]
        places = [place_of(state, number) for number in numbers]
        if not forward:
            self._leaders.check_led_here(places)
        request = PurgeCall(topic, state.topic_id, list(numbers), before_offset)
        local, repeatable = self.local_purge(request), before_offset is not None
        outcomes = self._leaders.call(PURGE, request, local, forward=forward, repeatable=repeatable)
        error = first_error(outcomes.values())
        if error is not None:
            if True in outcomes.values():
                error.outcome = "unknown"  # some partitions were purged
            raise error

    def check_outputs(self, topic: str) -> None:
        """Wait until the outputs that committed records of the topic have ordered are appended to theirs. Raises
        Unavailable. A partition without a leader is passed over: nobody can say when it has one."""
        state = self._known(topic).state
        request = TopicNumbers(topic, state.topic_id, list(range(state.partitions)))
        local = self.local_open_orders(request)
        outcomes = self._leaders.call(OPEN_ORDERS, request, local, repeatable=True)
        for place, found in outcomes.items():
            if isinstance(found, NotFound) or self._leaders.leader_of(place) is None:
                continue
            if found is True:
                why = "outputs of its commits, or copies of its dead letters, are still to be appended to their topics"
            elif isinstance(found, PortalMQError):
                why = f"the leader of partition {place.number} has not told whether outputs are open: {found.detail}"
            else:
                continue
            raise Unavailable(
                f"topic {topic!r} was not deleted: {why}. Repeat, or delete it with force=true, and lose them",
                retry_after_s=1,
            )

    def local_open_orders(self, request: TopicNumbers) -> LocalWork[bool]:
        deadline = time.monotonic() + ORDERS_WITHIN_S

        def begin(place: TopicPartition) -> Callable[[], bool]:
            partition = self._metadata_cache.partition(place)
            end = partition.high_watermark
            return lambda: partition.retention.has_order_below(end, deadline - time.monotonic())

        return together(begin)

    def local_purge(self, request: PurgeCall) -> LocalWork[bool]:
        def purge(place: TopicPartition) -> bool:
            self._metadata_cache.partition(place).retention.purge(request.before_offset)
            return True

        return one_by_one(purge)
