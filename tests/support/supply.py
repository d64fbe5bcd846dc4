"""The messages of a partition as a list: the input of a group's selection, without a log."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED, lane_position
from portalmq.broker.core.queue.records import Grant
from portalmq.broker.core.queue.selection import NEVER_MS, Run, Selection, read_keys, select, update_keys


@dataclass(frozen=True, slots=True)
class Message:
    """`key` is a number here; 0 for none."""

    offset: int
    priority: int = 0
    deliver_at_ms: int | None = None
    expires_at_ms: int | None = None
    key: int = 0
    appended_at_ms: int = 0
    size: int = 0

    @property
    def spot(self) -> tuple[int, int, int]:
        return lane_position(self.offset, self.priority, self.deliver_at_ms, self.appended_at_ms)


class ListSupply:
    """`pieces` joins adjacent, equal messages in lane 0, as batches do."""

    def __init__(self, *, by_key: bool = False, pieces: bool = False) -> None:
        self.messages: list[Message] = []
        self.by_key = by_key
        self.pieces = pieces

    def add(self, count: int = 1, **more: object) -> list[Message]:
        """Append `count` messages; offsets continue from the last one."""
        first = self.messages[-1].offset + 1 if self.messages else 0
        added = [Message(offset, **more) for offset in range(first, first + count)]  # type: ignore[arg-type]
        self.messages += added
        return added

    def lane_of(self, message: Message) -> int:
        lane, _, _ = message.spot
        return 0 if self.by_key and lane < DELAYED else lane

    def lanes(self) -> Collection[int]:
        return {message.spot[0] for message in self.messages} - {0}

    def fresh(self, lane: int, due_ms: int, offset: int) -> Iterator[Run]:
        places = sorted(
            (message.spot[1] if lane >= DELAYED else 0, message.offset, message)
            for message in self.messages
            if self.lane_of(message) == lane
        )
        runs = [self._run(message, due) for due, at, message in places if (due, at) >= (due_ms, offset)]
        if self.pieces and lane == 0:
            runs = _joined(runs)
        yield from runs

    def returned(self, start: int, end: int) -> Iterator[Run]:
        for message in self.messages:
            if start <= message.offset < end:
                yield self._run(message, 0)

    def _run(self, message: Message, due_ms: int) -> Run:
        expires_at_ms = NEVER_MS if message.expires_at_ms is None else message.expires_at_ms
        key = message.key if self.by_key else 0
        return Run(message.offset, message.offset + 1, None, due_ms, expires_at_ms, key, message.size)


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.end == run.start and last.expires_at_ms == run.expires_at_ms and not run.key:
            joined[-1] = Run(last.start, run.end, None, 0, run.expires_at_ms, size=last.size + run.size)
        else:
            joined.append(run)
    return joined


def offsets_of(choice: Selection) -> list[int]:
    return [offset for handed in choice.delivered for offset in range(handed.start, handed.end)]


def chosen(
    group: GroupDelivery,
    supply: ListSupply,
    now_ms: int,
    max_messages: int = 100,
    *,
    max_deliveries: int = 1_000,
    committed: int = 1 << 60,
    cancelled: frozenset[int] = frozenset(),
    max_bytes: int = NEVER_MS,
) -> Selection:
    """Select messages, with one clock for leases and for the time of day."""
    while supply.by_key and not read_keys(group, supply, now_ms):
        pass
    return select(
        group,
        supply,
        now_ms=now_ms,
        wall_ms=now_ms,
        due_by_ms=now_ms,
        max_messages=max_messages,
        max_deliveries=max_deliveries,
        by_key=supply.by_key,
        committed=committed,
        cancelled=cancelled,
        max_bytes=max_bytes,
    )


def granted(group: GroupDelivery, choice: Selection, now_ms: int, deadline_ms: int) -> None:
    """Apply the selection as the shell does."""
    group.apply(
        Grant(
            tuple((start, end, deliveries) for start, end, deliveries, _, _ in choice.delivered),
            choice.next,
            now_ms,
            deadline_ms,
            lanes=tuple(lane for _, _, _, lane, _ in choice.delivered),
            cursors=choice.lane_positions(),
            gone=tuple(choice.gone),
            held=tuple(choice.held),
        )
    )
    update_keys(group, choice, now_ms)
