"""The consumer of a queue group, whose consumers compete for leased messages, or of a stream group (streams/member.py),
whose members share the partitions.

Iterating is the whole protocol: asking for the next message acks the one before. After an exception in the loop's body
nothing asks, so that message stays unacked and goes back to the group when the consumer closes (or is garbage
collected).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Literal

from portalmq import wire
from portalmq.closeable import Closeable
from portalmq.consumers.commit import Output, commit_receipts
from portalmq.consumers.lease import Leases
from portalmq.consumers.lease_calls import (
    RELEASE_OPTIONS,
    Verb,
    extend_options,
    nack_options,
    receipts_of,
    reject_options,
)
from portalmq.consumers.receiver import LAST_ANSWER_S as LAST_ANSWER_S
from portalmq.consumers.receiver import Receiver, end_receiving
from portalmq.consumers.subscription import (
    VISIBILITY_TIMEOUT_S,
    Delivery,
    only_for_queues,
    only_for_streams,
    seek_position,
    subscription_of,
)
from portalmq.message import Message
from portalmq.network.either import finish
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import TlsFiles
from portalmq.streams.member import StreamMember
from portalmq.transport.transport import Bootstrap, Transport


class Consumer(Closeable):
    """Receives messages of `topics` for a group. For one thread, except that messages may be
    settled, and the consumer closed, from others.

        for message in Consumer("orders", group="billing"):
            handle(message)

    Messages are delivered at least once: a message whose lease expires, or that is given back, comes again with a
    higher `delivery_count`.

    The child of a fork has another consumer of the group, with no messages: those in hand stay the parent's. The child
    settles one of them only by an explicit call (`message.ack()`).
    """

    def __init__(
        self,
        *topics: str,
        group: str = "default",
        bootstrap: Bootstrap = None,
        mode: Literal["queue", "stream"] = "queue",
        delivery: Delivery = "at_least_once",
        max_messages: int = 100,
        visibility_timeout_s: float = VISIBILITY_TIMEOUT_S,
        start: Literal["earliest", "latest"] | datetime = "earliest",
        manual_ack: bool = False,
        prefetch: bool = True,
        idle_timeout_s: float | None = None,
        token: str | None = None,
        member_id: str | None = None,
        session_timeout_s: float = 10,
        max_handling_s: float | None = None,
        transport: Transport | None = None,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        """`max_messages`: the most messages of one fetch; the first fetch asks for 10, later ones for the number
        handled in a second. `prefetch`: while messages are handled the next fetch is under way, if that takes them less
        than a second altogether; not with manual_ack, nor in a group that delivers at_most_once. `start`: where the
        group begins on a partition that is new to it. `idle_timeout_s`: iteration ends when no message came for this
        long. `delivery`: a setting of the group, fixed when the group is created. `max_handling_s`: how long the lease
        of a message in hand is renewed while it is handled; 0 is never, as with manual_ack. The default is 300, or 0 if
        `visibility_timeout_s` is given: then leases last exactly that long. If a lease is lost all the same, asking for
        the next message raises LeaseLost. `transport`, `tls_…` and `allow_advertised` are those of Producer.

        With mode="stream" one member of the group reads each partition, in order and without leases; asking for more
        commits what was handed out. `member_id` is a permanent name: a consumer that returns under it within
        `session_timeout_s` gets its partitions back, and close() does not give them up.
        """
        self._subscription = subscription_of(
            topics,
            group=group,
            mode=mode,
            delivery=delivery,
            max_messages=max_messages,
            visibility_timeout_s=visibility_timeout_s,
            start=start,
            manual_ack=manual_ack,
            prefetch=prefetch,
            member_id=member_id,
            session_timeout_s=session_timeout_s,
            max_handling_s=max_handling_s,
        )
        self.topics, self.group = self._subscription.topics, self._subscription.group
        self._idle_timeout_s = idle_timeout_s
        self._mode = mode
        # Two transports: close() cuts a waiting receive off, and still acks and nacks.
        tls = TlsFiles(tls_ca, tls_client_cert, tls_client_key)
        self._receiving = transport or Transport(bootstrap, token=token, tls=tls, allow_advertised=allow_advertised)
        self._settle_transport = self._receiving.another()
        self._closed = threading.Event()
        self._begin()
        reset_in_children(self)

    def __repr__(self) -> str:
        return self._subscription.shown("Consumer", self._receiving.urls, is_closed=self._closed.is_set())

    def _begin(self) -> None:
        """Start with no messages, under a new name."""
        subscription = self._subscription
        self._leases = Leases(
            self._settle_transport,
            self.group,
            subscription.visibility_timeout_s,
            max_handling_s=subscription.max_handling_s,
        )
        self._receiver = Receiver(self._receiving, self._leases, subscription, self._closed)
        self._stream: StreamMember | None = None
        if self._mode == "stream":
            self._stream = StreamMember(self._receiving, self._settle_transport, subscription)
        self._shut_down = weakref.finalize(
            self, _shut_down, self._closed, self._receiving, self._settle_transport, self._leases, self._stream
        )

    def _reset_in_child(self) -> None:
        """Start afresh in the child of a fork: leases, assignments and buffered messages are the parent's, and so is
        their finalizer."""
        self._shut_down.detach()
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        parent = self._stream
        self._begin()
        if parent is not None and self._stream is not None:
            self._stream.begin_in_child(parent)
        if was_closed:
            self._closed.set()
            if self._stream is not None:
                self._stream.buffers.closed = True

    # --- receiving ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        """Return the next message; the one before is acked. Waits up to `idle_timeout_s`, then ends the iteration;
        raises Unavailable if no broker answers."""
        if self._stream is not None:
            message = self._stream.next_of_batch(self)
            if message is None:
                message = finish(self._stream.next_message(self._idle_timeout_s, self))
            if message is None:
                raise StopIteration
            return message
        messages = finish(self._receiver.next_messages(1, self._idle_timeout_s, self, ends=True))
        if not messages:
            raise StopIteration
        return messages[0]

    def poll(self, timeout_s: float = 1.0, max_messages: int | None = None) -> list[Message]:
        """Return up to `max_messages` messages, as soon as there are any; an empty list after `timeout_s`.

        Messages of the previous poll are acked, unless manual_ack is set. Raises Unavailable if no broker answers and
        none ever has, or none has for 10 s; RuntimeError once closed.
        """
        if self._closed.is_set():
            raise RuntimeError("the consumer is closed")
        at_most = self._subscription.at_most(max_messages)
        if self._stream is not None:
            return finish(self._stream.poll(timeout_s, at_most, self))
        return finish(self._receiver.next_messages(at_most, timeout_s, self, ends=False))

    # --- settling ----------------------------------------------------------------------------------------------------

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Ack messages. Raises StaleReceipt if a lease was lost; the other messages are acked all the same
        (`error.extra["results"]` says which). In stream mode this includes all earlier messages of their partitions,
        and is committed within a second."""
        if self._stream is not None:
            self._stream.finished([messages] if isinstance(messages, Message) else messages)
            return
        self._settle("ack", messages, {})

    def nack(
        self, messages: Message | Iterable[Message], delay_s: float | None = None, reason: str | None = None
    ) -> None:
        """Return messages to the group for redelivery, after `delay_s` seconds (default: the group's back-off)."""
        self._check_leases("nack")
        self._settle("nack", messages, nack_options(delay_s, reason))

    def reject(self, messages: Message | Iterable[Message], reason: str | None = None) -> None:
        """Make dead letters of messages at once: to deliver them again would not help."""
        self._check_leases("reject")
        self._settle("nack", messages, reject_options(reason))

    def release(self, messages: Message | Iterable[Message]) -> None:
        """Return messages to the group, at once and as if they had not been delivered."""
        self._check_leases("release")
        self._settle("nack", messages, RELEASE_OPTIONS)

    def extend(self, messages: Message | Iterable[Message], visibility_timeout_s: float | None = None) -> None:
        """Extend leases to `visibility_timeout_s` seconds from now (default: this consumer's)."""
        self._check_leases("extend")
        seconds = self._subscription.visibility_timeout_s if visibility_timeout_s is None else visibility_timeout_s
        self._settle("extend", messages, extend_options(seconds))

    def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Output]) -> wire.Committed:
        """Ack messages of one partition and publish `outputs`, both or neither, exactly once.

        An output is a dict: `topic` and `value` (bytes, text or a JSON value), and optionally `key` (a `Message.key`
        may be passed on), `headers`, `content_type`, `partition`, `delay_ms`, `deliver_at_ms`, `ttl_ms`, `priority`.
        Raises StaleReceipt if a message was acked, or leased to another consumer: then nothing was done. A commit with
        an unknown outcome is repeated until the outcome is known. After an error whose `outcome` is "unknown" the
        messages are not acked, and come again unless the commit was applied.
        """
        given = [messages] if isinstance(messages, Message) else list(messages)
        if self._stream is not None:
            return finish(self._stream.commit_with(given, outputs))
        # Before anything can fail: after an error, asking for more must not ack messages without outputs.
        self._leases.forget([message.receipt for message in given if message.receipt is not None])
        return finish(commit_receipts(self._settle_transport, self.group, given, outputs))

    def _settle(self, verb: Verb, messages: Message | Iterable[Message], options: dict[str, object]) -> None:
        if receipts := receipts_of(messages):
            finish(self._leases.settle(verb, receipts, options))

    # --- streams ------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Ack all messages that were handed out; durable on return. Raises IllegalGeneration for messages of a
        partition that moved to another member, which receives them again."""
        if self._stream is not None:
            finish(self._stream.commit())
        elif self._subscription.manual_ack:
            raise ValueError("with manual_ack in a queue group, ack the messages")
        else:
            finish(self._leases.finish_handed())
            finish(self._leases.commit())

    def commit_finished(self) -> None:
        """Send pending acks, and no acks for messages still in hand; durable on return."""
        if self._stream is not None:
            finish(self._stream.commit_finished())
        else:
            finish(self._leases.commit())

    def seek(
        self,
        topic: str,
        to: Literal["earliest", "latest"] | int | datetime = "earliest",
        partition: int | None = None,
    ) -> None:
        """Move the group to another position in a topic: its beginning, its end, a time, or an offset of one partition.

        This affects all members of the group: messages that they have read and not committed are discarded.
        """
        finish(self._streaming("seek").seek(topic, seek_position(to), partition))

    def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Hand out nothing of a topic, of one of its partitions, or of any topic, until resume(). This member keeps the
        partitions."""
        stream = self._streaming("pause")
        stream.pause(stream.places(topic, partition))

    def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """Undo pause()."""
        stream = self._streaming("resume")
        stream.resume(stream.places(topic, partition))

    @property
    def assignment(self) -> list[tuple[str, int]]:
        """The (topic, partition) pairs that this member of a stream group reads now."""
        return self._streaming("assignment").assignment()

    @property
    def member_id(self) -> str:
        """The id of this consumer in its stream group."""
        return self._streaming("member_id").member_id

    def _streaming(self, what: str) -> StreamMember:
        if self._stream is None:
            raise only_for_streams(what)
        return self._stream

    def _check_leases(self, what: str) -> None:
        if self._stream is not None:
            raise only_for_queues(what)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End a wait in another thread, send the last acks, and return all other messages to the group. A second close
        does nothing."""
        if self._subscription.manual_ack:
            self._leases.forget_handed()
        self._shut_down()


def _shut_down(
    closed: threading.Event,
    receiving: Transport,
    settle_transport: Transport,
    leases: Leases,
    stream: StreamMember | None,
) -> None:
    """Release what the consumer holds. Runs once: at close(), when the consumer is garbage collected, or when the
    interpreter ends."""
    closed.set()
    if stream is not None:
        finish(stream.close())
        return
    if leases.is_receiving_in_this_thread:
        # A signal handler inside the receive: the receive continues when the handler returns, and releases by itself.
        receiving.hang_up()
        cut = threading.Timer(LAST_ANSWER_S, receiving.close)
        cut.daemon = True
        cut.start()
        finish(leases.release())
    else:
        finish(end_receiving(receiving, leases, LAST_ANSWER_S))
    # Not closed: with manual_ack, other threads may still have messages in hand to ack.
    settle_transport.rest()
