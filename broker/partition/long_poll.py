"""Receives that wait for a message: what they wait for, and which of them is woken.

A receive asks its sources, here and on other brokers, one after the other. If none has a message it parks at all of
them. A source with a message wakes one waiter, which takes what it can and wakes the next one if something is left. So
one message wakes one consumer, and a thousand waiters cost nothing. When leadership moves, waiters look for their
sources again and go on waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.partition.answer_size import ANSWER_BYTES_MAX, sizes_of
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.storage.batch import Record
from portalmq.errors import Backpressure, PortalMQError, Unavailable


class Peer(Protocol):
    """The connection of a client that waits."""

    def gone(self) -> bool:
        """Whether the other side has closed."""
        ...

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Call `on_gone` once when the client goes away; returns a function that ends the watch."""
        ...


class LeasedMessage(msgspec.Struct, gc=False, frozen=True, array_like=True):
    """A message under a lease."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: Record
    receipt: str
    delivery_count: int
    lease_expires_at_ms: int


class Portion(Protocol):
    """The room in this broker's memory that an answer may fill with messages."""

    def begin(self) -> int:
        """Return how many bytes may be taken now. Raises Backpressure when there is no room."""
        ...

    def end(self) -> None:
        """Give the room back: no message was taken."""
        ...


class Leaderships:
    """The leaderships of this broker under which the messages of one answer were taken."""

    def __init__(self) -> None:
        self._held: list[Callable[[], bool]] = []

    def note(self, source: Source) -> None:
        self._held.append(source.leadership())

    def check(self) -> None:
        """Raise Unavailable, with an unknown outcome, unless all of them hold: after a pause of this process another
        broker may have delivered the messages, or acked them. A repeat of the attempt gets those that are left."""
        if not all(holds() for holds in self._held):
            raise Unavailable("the leadership may have moved meanwhile", outcome="unknown", retry_after_s=0.1)


class ReceiveOptions(NamedTuple):
    """`is_first`: the client says that the attempt id is new. `max_bytes`: take no more messages once those taken have
    so many bytes. `patient`: a partition may wait until its followers confirm its leader. `is_move`: also take
    from a paused group, and count no delivery. `leaderships`: to be checked before the answer."""

    max_messages: int
    visibility_timeout_ms: int
    consumer: str
    attempt_id: str | None
    is_first: bool = False
    max_bytes: int = ANSWER_BYTES_MAX
    patient: bool = True
    is_move: bool = False
    portion: Portion | None = None
    leaderships: Leaderships | None = None


class Waiter:
    """A parked receive, or with `is_interest` another broker's. It is woken at most once a round, by one source.
    `topics` are those it waits for."""

    __slots__ = ("cancelled", "event", "is_interest", "moved", "topics", "woken")

    def __init__(self, topics: Collection[str] = (), *, is_interest: bool = False) -> None:
        self.event = Event()
        self.topics = topics
        self.is_interest = is_interest
        self.woken = False
        self.moved = False
        self.cancelled = False

    def wake(self) -> None:
        self.woken = True
        self.event.set()

    def move(self) -> None:
        """Note that the list of sources is out of date."""
        self.moved = True
        self.event.set()

    def cancel(self) -> None:
        self.cancelled = True
        self.event.set()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until woken, moved, cancelled or out of time; then be ready for the next round."""
        self.event.wait(timeout_s)
        self.event.clear()
        self.woken = False


class Source(Protocol):
    """A source of a group's messages: a partition here, or another broker with all that it leads."""

    @property
    def is_remote(self) -> bool:
        """Whether asking takes a round trip."""
        ...

    def leadership(self) -> Callable[[], bool]:
        """Return a function that tells whether what was taken here just now may be handed out."""
        ...

    def replay(self, attempt_id: str) -> list[LeasedMessage] | None:
        """Return what the first receive with this attempt id got and still holds; None for an unknown one."""
        ...

    def has_messages(self) -> bool:
        """Whether a message is known to be available. Another broker's messages are known while a waiter is parked."""
        ...

    def take(self, options: ReceiveOptions) -> list[LeasedMessage]: ...

    def park(self, waiter: Waiter) -> None:
        """Wake `waiter` when a message is available, in turn with the other parked ones."""
        ...

    def leave(self, waiter: Waiter) -> None: ...

    def notify(self) -> None:
        """Wake one waiter: a message may be available."""
        ...


class LongPolls:
    """The receives that wait on this broker, in a bounded number; further ones are refused with Backpressure."""

    def __init__(self, parked_max: int) -> None:
        self.parked_max = parked_max
        self.waiters: dict[Waiter, None] = {}
        self._events: dict[Event, None] = {}
        self.closed = False

    def enter(self, waiter: Waiter) -> None:
        if len(self.waiters) >= self.parked_max:
            raise Backpressure(f"{self.parked_max} receives wait on this broker already", retry_after_s=1)
        self.waiters[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        self.waiters.pop(waiter, None)

    @property
    def interests(self) -> int:
        """Return how many of the waiters are other brokers' interests."""
        return sum(waiter.is_interest for waiter in self.waiters)

    def move(self, topics: Collection[str]) -> None:
        """Let all waiters of these topics look for their sources again: leadership of partitions has moved."""
        for waiter in self.waiters:
            if not waiter.moved and any(topic in topics for topic in waiter.topics):
                waiter.move()

    def hold(self, event: Event) -> Callable[[], None]:
        """Set `event` at `close`; returns a function that cancels this."""
        self._events[event] = None
        if self.closed:
            event.set()
        return lambda: self._events.pop(event, None)

    def close(self) -> None:
        """End every wait, now and from now on."""
        self.closed = True
        for event in tuple(self._events):
            event.set()
        for waiter in tuple(self.waiters):
            waiter.cancel()


def receive(
    plan: Callable[[], Sequence[Source]],
    topics: Collection[str],
    options: ReceiveOptions,
    wait_s: float,
    peer: Peer | None,
    long_polls: LongPolls,
) -> list[LeasedMessage]:
    """Return messages from any of the sources that `plan` names, in its order; wait up to `wait_s` for the first.

    With an attempt id, a client whose connection is closed gets nothing: it may have repeated the attempt at another
    broker while this process was paused. Without one it may have closed only its sending half: it gets what is
    available now, and does not wait.

    Raises the error of a source when nothing was found and no time to wait is left; Backpressure.
    """
    if options.attempt_id is not None and peer is not None and peer.gone():
        return []
    sources = plan()
    if options.attempt_id is not None and not options.is_first:
        replayed = replay(sources, options.attempt_id, options.leaderships)
        if replayed is not None:
            return replayed
    taken = take(sources, options, ask=True, insist=wait_s <= 0)
    if taken or wait_s <= 0 or long_polls.closed:
        return taken
    waiter = Waiter(topics)
    long_polls.enter(waiter)
    unwatch = peer.watch(waiter.cancel) if peer is not None else lambda: None
    deadline = time.monotonic() + wait_s
    try:
        _park(sources, waiter)
        while True:
            left_s = deadline - time.monotonic()
            waiter.sleep(max(0.0, left_s))
            if waiter.cancelled or (peer is not None and peer.gone()):
                return []
            moved, waiter.moved = waiter.moved, False
            if moved:
                before, sources = sources, plan()
                _park_anew(before, sources, waiter)
            taken = take(sources, options, ask=moved)
            if taken or left_s <= 0:
                return taken
    finally:
        unwatch()
        long_polls.leave(waiter)
        for source in sources:
            source.leave(waiter)
            source.notify()


def _park_anew(before: Sequence[Source], after: Sequence[Source], waiter: Waiter) -> None:
    """Park at new sources, leave removed ones. At the others the waiter keeps its place in the queue."""
    for source in before:
        if source not in after:
            source.leave(waiter)
            source.notify()
    _park([source for source in after if source not in before], waiter)


def _park(sources: Sequence[Source], waiter: Waiter) -> None:
    """Park, unless a message came while the sources were asked: it woke no waiter. Other greenlets run in between, and
    may wake the waiter before it sleeps."""
    for source in in_short_turns(sources):
        source.park(waiter)
        source.notify()


def take(
    sources: Sequence[Source], options: ReceiveOptions, *, ask: bool = False, insist: bool = False
) -> list[LeasedMessage]:
    """Return what is available, as much as the options allow; with `ask`, ask remote sources without known messages.

    A source that refuses is skipped; with `insist` an empty result means that all sources answered, and otherwise a
    refusal is raised. The waits of sources do not add up: none waits after a refusal, nor while messages are taken, as
    their leases run already. Raises Backpressure before anything is leased when the portion is used up.
    """
    portion = options.portion
    if portion is None:
        return _take(sources, options, options.max_bytes, ask=ask, insist=insist)
    taken: list[LeasedMessage] = []
    try:
        taken = _take(sources, options, min(options.max_bytes, portion.begin()), ask=ask, insist=insist)
    finally:
        if not taken:
            portion.end()
    return taken


def _take(
    sources: Sequence[Source], options: ReceiveOptions, left_bytes: int, *, ask: bool, insist: bool
) -> list[LeasedMessage]:
    taken: list[LeasedMessage] = []
    refused: list[PortalMQError] = []
    for source in in_short_turns(sources):
        left = options.max_messages - len(taken)
        if left <= 0 or left_bytes <= 0:
            break
        if source.has_messages() or (ask and source.is_remote) or options.is_move:
            try:
                patient = options.patient and not taken and not refused
                found = source.take(options._replace(max_messages=left, max_bytes=left_bytes, patient=patient))
                if found and options.leaderships is not None:
                    options.leaderships.note(source)
                taken += found
                if len(taken) < options.max_messages:  # the next source brings more
                    left_bytes -= sizes_of([message.record for message in found])
            except PortalMQError as error:
                refused.append(error)
    if insist and refused and not taken:
        raise next((error for error in refused if error.outcome == "unknown"), refused[0])
    return taken


def replay(sources: Sequence[Source], attempt_id: str, leaderships: Leaderships | None) -> list[LeasedMessage] | None:
    """Return what a repeated receive gets from all sources; None when the attempt is new to them. Remote sources are
    asked at once. One that does not answer is unknown; what it leased is delivered again when that lease ends."""
    remote = [gevent.spawn(_replay, source, attempt_id) for source in sources if source.is_remote]
    found: list[list[LeasedMessage] | None] = []
    for source in sources:
        if not source.is_remote:
            found.append(source.replay(attempt_id))
            if found[-1] and leaderships is not None:
                leaderships.note(source)
    found += [greenlet.get() for greenlet in remote]
    known = [messages for messages in found if messages is not None]
    return [message for messages in known for message in messages] if known else None


def _replay(source: Source, attempt_id: str) -> list[LeasedMessage] | None:
    try:
        return source.replay(attempt_id)
    except PortalMQError:
        return None
