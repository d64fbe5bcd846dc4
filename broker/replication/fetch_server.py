"""Serving the brokers that follow this one: one session for each, one long poll at a time.

    request -> new fetches to their partitions -> answered at once, or parked there
            <- what is ready: other answers, and records, in turn over the partitions, bounded in bytes
    parked  <- a partition with new records marks its fetch in `ready`, one whose high watermark moved in `moved`

So a poll over a hundred idle partitions costs nothing until one of them has something to send. Records wake it at once;
a high watermark alone within HW_LINGER_MS, since it usually travels with the next records. The fetches of a session are
current as long as the follower polls: each request renews all that wait, by a Poll that their partitions share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
from gevent.event import Event

from portalmq.broker.core.replica.events import BelowStart, Diverging, Fetch, Poll, Rejected, Reply
from portalmq.broker.core.replica.isr import NEVER_MS
from portalmq.broker.core.replica.state import VOUCHED_FOR_MS
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.fetch_answers import (
    BelowStartAnswer,
    DivergingAnswer,
    Echo,
    PartitionAnswer,
    PartitionKey,
    RecordsAnswer,
    RejectedAnswer,
    echo_of,
)
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.partition.partition import Partition
from portalmq.broker.replication.fetch_protocol import (
    AskedPartition,
    ReplicaFetchAnswer,
    ReplicaFetchRequest,
    decode_request,
    encode,
    fetch_of,
)
from portalmq.errors import InvalidRequest

HW_LINGER_MS = 100
WAIT_MS_MAX = 5_000
REPLY_BYTES_MAX = 64 * 1024 * 1024
SHARE_BYTES_MIN = 64 * 1024
# How many requests of a session, at least, may arrive after a later one.
OVERTAKEN_MAX = 8


class ReplicationHost(Protocol):
    cluster_id: str
    clock: Clock


class LocalPartitions(Protocol):
    """The replicas that are open on this broker. `on_opened` is called with each one that is opened."""

    on_opened: Callable[[Partition], None]

    def local(self, topic_id: str, number: int) -> Partition | None: ...


class SessionFetch:
    """A fetch in a session. It waits until it is answered once, with `answer` or with records, or withdrawn."""

    __slots__ = ("answer", "fetch", "is_waiting", "key", "known_hw", "partition", "session")

    def __init__(self, session: FetchSession, asked: AskedPartition, fetch: Fetch, partition: Partition | None) -> None:
        self.session = session
        self.key = asked.key
        self.fetch = fetch
        self.known_hw = asked.known_hw
        self.partition = partition
        self.answer: Reply | None = None
        self.is_waiting = True

    @property
    def echo(self) -> Echo:
        return echo_of(self.fetch)

    @property
    def poll(self) -> Poll:
        return self.session.poll

    @property
    def knows_compressed(self) -> bool:
        return self.session.knows_compressed

    def reply(self, reply: Reply) -> None:
        self.answer = reply
        self.session.mark_ready(self)

    def has_records(self) -> None:
        self.session.mark_ready(self)

    def high_watermark_moved(self) -> None:
        assert self.partition is not None
        if min(self.partition.high_watermark, self.fetch.fetch_offset) > self.known_hw:
            self.session.mark_moved(self)

    def withdraw(self) -> None:
        self.is_waiting = False
        if self.partition is not None:
            self.partition.serving.on_withdrawn(self)


class FetchSession:
    """One follower's broker. `fetches` are its fetches, answered ones included, until they are replaced or left."""

    def __init__(
        self, broker_id: int, incarnation: int, number: int, clock: Clock, *, knows_compressed: bool = False
    ) -> None:
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.number = number
        self.knows_compressed = knows_compressed
        self.turn = 0
        self._overtaken: set[int] = set()  # earlier turns that have not arrived
        self.poll = Poll(clock.now_ms(), NEVER_MS)
        self.fetches: dict[PartitionKey, SessionFetch] = {}
        self.ready: dict[SessionFetch, None] = {}
        self.moved: dict[SessionFetch, None] = {}
        self.moved_ms = 0
        self.wakeup = Event()
        self.polls = 0
        self.ended = False
        self._clock = clock

    def take_turn(self, turn: int) -> None:
        """Begin a turn, and end the poll of the earlier one."""
        self._overtaken.update(range(max(self.turn + 1, turn - OVERTAKEN_MAX), turn))
        self.turn = turn
        self.wakeup.set()

    def was_overtaken(self, turn: int) -> bool:
        """Whether a request of an earlier turn arrives only now. Else it is a copy: the answer to the first may be
        lost, and with it the answers to fetches that the follower will not repeat, so it has to begin anew."""
        try:
            self._overtaken.remove(turn)
        except KeyError:
            return False
        return True

    def mark_ready(self, pending: SessionFetch) -> None:
        if pending.is_waiting:
            self.ready[pending] = None
            self.wakeup.set()

    def mark_moved(self, pending: SessionFetch) -> None:
        if not pending.is_waiting:
            return
        if not self.moved:
            self.moved_ms = self._clock.now_ms()
            self.wakeup.set()
        self.moved[pending] = None

    def forget(self, key: PartitionKey) -> None:
        pending = self.fetches.pop(key, None)
        if pending is not None:
            pending.withdraw()
            self.ready.pop(pending, None)
            self.moved.pop(pending, None)

    def end(self) -> None:
        self.ended = True
        for key in tuple(self.fetches):
            self.forget(key)
        self.wakeup.set()

    def patience_ms(self, deadline_ms: int) -> int:
        """Return how long to wait for more. This poll sends a high watermark that moved, even if that takes longer."""
        until_ms = self.moved_ms + HW_LINGER_MS if self.moved else deadline_ms
        return max(0, until_ms - self._clock.now_ms())


class FetchServer:
    """The server of other brokers' fetches."""

    def __init__(self, host: ReplicationHost, partitions: LocalPartitions) -> None:
        self._host = host
        self._partitions = partitions
        partitions.on_opened = self.opened
        self._sessions: dict[int, FetchSession] = {}
        self._closed = False

    def polls(self, broker_id: int) -> bool:
        """Whether a fetch of that broker is parked here right now: then it is neither overdue nor gone."""
        session = self._sessions.get(broker_id)
        return session is not None and session.polls > 0

    def serve(self, body: bytes, peer: Peer | None) -> bytes:
        """Answer one request. Raises InvalidRequest for an invalid one, or one of another cluster."""
        try:
            request = decode_request(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"not a fetch: {error}") from error
        if request.cluster_id != self._host.cluster_id:
            raise InvalidRequest(f"this is cluster {self._host.cluster_id}, the fetch is of {request.cluster_id}")
        if peer is not None and peer.gone():
            # The request was buffered while this process was paused: what it says is out of date.
            return self._encode_answer(True)
        session = self._session_of(request)
        if session is None:
            return self._encode_answer(False)
        if request.turn <= session.turn:
            return self._encode_answer(session.was_overtaken(request.turn))
        session.take_turn(request.turn)
        for key in request.left:  # first: the request renews what it does not leave
            session.forget(key)
        session.poll.heard_ms = self._host.clock.now_ms()
        session.poll.sent_after_ms = request.answered_ms or (None if request.answered_ms is None else NEVER_MS)
        for asked in request.partitions:
            self._ask(session, request, asked)
        return self._poll(session, request, peer)

    def _encode_answer(self, known: bool, answers: Sequence[PartitionAnswer] = ()) -> bytes:
        return encode(ReplicaFetchAnswer(known, list(answers), self._host.clock.now_ms()))

    def close(self) -> None:
        """Stop answering."""
        self._closed = True
        for session in self._sessions.values():
            session.end()

    def _session_of(self, request: ReplicaFetchRequest) -> FetchSession | None:
        session = self._sessions.get(request.broker_id)
        if session is not None and session.incarnation == request.incarnation and session.number == request.session:
            return session
        newer = session is None or (session.incarnation, session.number) < (request.incarnation, request.session)
        if request.turn != 1 or not newer or self._closed:
            return None
        if session is not None:
            session.end()
        session = FetchSession(
            request.broker_id,
            request.incarnation,
            request.session,
            self._host.clock,
            knows_compressed=request.knows_compressed,
        )
        self._sessions[request.broker_id] = session
        return session

    # --- fetches -----------------------------------------------------------------------------------------------------

    def _ask(self, session: FetchSession, request: ReplicaFetchRequest, asked: AskedPartition) -> None:
        fetch = fetch_of(request, asked)
        before = session.fetches.get(asked.key)
        if before is not None:
            if before.fetch == fetch:
                return  # repeated: the follower cannot know whether it arrived
            session.forget(asked.key)
        pending = session.fetches[asked.key] = SessionFetch(session, asked, fetch, self._partitions.local(*asked.key))
        self._submit(pending)

    def _submit(self, pending: SessionFetch) -> None:
        """Pass a fetch to its partition. A partition that is not open yet will be, or loses the leadership: wait."""
        partition = pending.partition
        if partition is None:
            return
        if partition.closed or partition.rebuild_reason:
            pending.reply(Rejected(0))
        else:
            partition.serving.on_fetch(pending)

    def opened(self, partition: Partition) -> None:
        """Pass waiting fetches to a partition that was opened, or opened again."""
        for session in tuple(self._sessions.values()):
            pending = session.fetches.get((partition.topic_id, partition.number))
            if pending is not None and pending.is_waiting and pending.answer is None:
                pending.partition = partition
                self._submit(pending)

    # --- the poll ----------------------------------------------------------------------------------------------------

    def _poll(self, session: FetchSession, request: ReplicaFetchRequest, peer: Peer | None) -> bytes:
        # Followers confirm their leader by its answers, so an answer comes in time for that.
        deadline_ms = self._host.clock.now_ms() + min(request.wait_ms, WAIT_MS_MAX, VOUCHED_FOR_MS // 2)
        unwatch = peer.watch(session.wakeup.set) if peer is not None else None
        session.polls += 1
        try:
            while True:
                session.wakeup.clear()
                if session.ended or session.turn != request.turn:
                    return self._encode_answer(True)
                answers = self._collect(session, request.max_bytes)
                if answers:
                    return self._encode_answer(True, answers)
                patience_ms = session.patience_ms(deadline_ms)
                if patience_ms == 0 and not session.moved:
                    return self._encode_answer(True)
                session.wakeup.wait(patience_ms / 1000)
                if peer is not None and peer.gone():
                    return self._encode_answer(True)
                if self._host.clock.now_ms() >= deadline_ms and not session.ready and not session.moved:
                    return self._encode_answer(True)
        finally:
            session.polls -= 1
            if unwatch is not None:
                unwatch()

    def _collect(self, session: FetchSession, max_bytes: int) -> list[PartitionAnswer]:
        """Return the answers that are ready, up to `max_bytes`; the rest comes first next time."""
        answers: list[PartitionAnswer] = []
        left = min(max_bytes, REPLY_BYTES_MAX)
        share = max(SHARE_BYTES_MIN, left // max(1, len(session.ready)))
        for pending in tuple(session.ready):
            if left <= 0:
                break
            if session.ready.pop(pending, 0) == 0:
                continue  # another poll of this session was faster
            answer = self._answer(pending, min(left, share))
            if not pending.is_waiting:
                continue
            self._answered(session, pending)
            answers.append(answer)
            if isinstance(answer, RecordsAnswer):
                left -= sum([frame.size_bytes for frame in answer.frames])
        if session.moved and (answers or self._host.clock.now_ms() - session.moved_ms >= HW_LINGER_MS):
            answers += self._moved(session)
        return answers

    def _answered(self, session: FetchSession, pending: SessionFetch) -> None:
        pending.withdraw()
        session.ready.pop(pending, None)
        session.moved.pop(pending, None)

    def _moved(self, session: FetchSession) -> Iterator[PartitionAnswer]:
        moved, session.moved = session.moved, {}
        for pending in moved:
            partition = pending.partition
            if (
                pending.is_waiting
                and pending not in session.ready
                and partition is not None
                and _still_leads(partition, pending)
            ):
                self._answered(session, pending)
                yield RecordsAnswer(*pending.key, pending.echo, [], partition.high_watermark)

    def _answer(self, pending: SessionFetch, max_bytes: int) -> PartitionAnswer:
        """Return the answer to a ready fetch: the one it was given, or the records for it."""
        partition = pending.partition
        if pending.answer is None and partition is not None:
            frames = partition.serving.frames(pending.fetch.fetch_offset, max_bytes)
            if frames is not None and _still_leads(partition, pending):
                return RecordsAnswer(*pending.key, pending.echo, frames, partition.high_watermark)
            if pending.answer is None and not partition.closed:
                partition.serving.on_fetch(pending)  # the fetch may have to continue elsewhere: at the log's start, say
        match pending.answer:
            case Diverging(epoch, end):
                return DivergingAnswer(*pending.key, pending.echo, epoch, end)
            case BelowStart(offset, epochs) if partition is not None:
                start = partition.start
                return BelowStartAnswer(
                    *pending.key, pending.echo, offset, list(epochs), start.messages_before, start.timestamp_before_ms
                )
            case Rejected(leader_epoch):
                return RejectedAnswer(*pending.key, pending.echo, leader_epoch)
            case _:
                return RejectedAnswer(*pending.key, pending.echo, 0)


def _still_leads(partition: Partition, pending: SessionFetch) -> bool:
    replica = partition.replica
    return replica.leading and replica.leader_epoch == pending.fetch.leader_epoch and pending.answer is None
