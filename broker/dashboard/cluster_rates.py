"""The rates of the whole cluster, for the pages that are open on this broker.

    every second, while a page is open:   ask each broker for its newest rows -> sum them -> one event for all pages

Every broker keeps its own rows (messages/rates.py), so the first event of a page has the past too. An event is encoded
once for all pages. A second is unknown, and a gap in the charts, while the row of a broker that was there then is
missing: it does not answer, or is gone and took its rows with it. A broker that was not there is no part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any
from weakref import WeakKeyDictionary

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.broker import Broker
from portalmq.broker.cluster.rpc.brokers import (
    RATES,
    ClusterMark,
    GroupLagNow,
    Rate,
    RatesAnswer,
    RatesRequest,
    Registered,
    TopicRate,
)
from portalmq.broker.messages.rates import LAGS_EVERY_S, SECONDS_KEPT
from portalmq.errors import PortalMQError

TOP = 10
# The sum of a second is shown so much later, when the rows of all brokers are there.
BEHIND_S = 2
STREAMS_MAX = 200
ANSWER_WITHIN_S = 0.8
PAST_WITHIN_S = 2.0
MARKS_SHOWN = 100

# A broker from one start to its end: its id and incarnation.
Incarnation = tuple[int, int]

_encode = msgspec.json.Encoder().encode


class ClusterRates:
    """Invariant: the greenlet runs while there are streams."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._rows: dict[Incarnation, dict[int, Rate]] = {}
        self._marks: dict[tuple[int, str, str], ClusterMark] = {}
        self._answers: dict[int, RatesAnswer] = {}
        self._greenlet: gevent.Greenlet | None = None
        self._shown = 0
        # Seconds that were sent as unknown, and those of the rows that came last.
        self._unknown: set[int] = set()
        self._came: set[int] = set()
        self._ticked = Event()
        self._asked = Event()
        self._history: tuple[int, bytes] = (0, b"")
        self.streams = 0
        self.event = b""

    def enter(self) -> None:
        """Count a stream; begin to ask with the first one."""
        self.streams += 1
        if self.streams == 1:
            self._rows.clear()
            self._unknown.clear()
            self._answers.clear()
            self._asked.clear()
            self._history, self._shown = (0, b""), 0
            self._greenlet = gevent.spawn(self._run)
        # The second page has a past too, when it comes while the first one's is asked for.
        self._asked.wait(PAST_WITHIN_S)

    def leave(self) -> None:
        self.streams -= 1
        if self.streams == 0 and self._greenlet is not None:
            self._greenlet.kill(block=False)

    def wait(self, seconds: float) -> None:
        """Wait for the next event."""
        self._ticked.wait(seconds)

    def history(self) -> bytes:
        """Return the event that a new stream begins with, made once a second for all of them."""
        upto = self._upto()
        if self._history[0] == upto:
            return self._history[1]
        found = {
            "rows": self._sums(range(upto - SECONDS_KEPT + 1, upto + 1)),
            "marks": self._newest_marks(),
            **self._now(),
        }
        self._history = (upto, _event("history", found))
        return self._history[1]

    def all(self, after: Callable[[int], int] = lambda broker_id: 0, **wanted: Any) -> list[RatesAnswer]:
        """Return the answers of all brokers to one request. `after` is asked for each broker."""
        own = self._broker.broker_id
        others = [each for each in self._broker.mirror.brokers if each != own]
        asked = [gevent.spawn(self._answer_of, each, RatesRequest(after=after(each), **wanted)) for each in others]
        gevent.joinall(asked)
        answers = [self._broker.rates.answer(RatesRequest(after=after(own), **wanted)), *(each.value for each in asked)]
        return [answer for answer in answers if answer is not None]

    # --- each second -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._ask()
        self._asked.set()
        while True:
            gevent.sleep(1.0 - self._broker.clock.wall_ms() % 1_000 / 1_000 + 0.05)
            if self._upto() == self._shown:
                continue
            self._ask()
            self._tick()

    def _upto(self) -> int:
        return self._broker.clock.wall_ms() // 1_000 - BEHIND_S

    def _ask(self) -> None:
        after_ms = max([mark.at_ms for mark in self._marks.values()], default=0) - 10_000
        answers = self.all(self._newest_of, marks_after_ms=after_ms, top=5 * TOP)
        self._answers = {answer.broker_id: answer for answer in answers}
        self._came = {row.second for answer in answers for row in answer.rows}
        for answer in answers:
            rows = self._rows.setdefault(incarnation_of(answer), {})
            rows.update((row.second, row) for row in answer.rows)
            for second in sorted(rows)[: max(0, len(rows) - SECONDS_KEPT - 10)]:
                del rows[second]
            for mark in answer.marks:
                # Each broker sees the events of the cluster; those of its own machine only it.
                if answer.broker_id == self._broker.broker_id or mark.kind == "disk":
                    self._marks[mark.at_ms, mark.kind, mark.text] = mark

    def _newest_of(self, broker_id: int) -> int:
        """Return the last second whose row of this broker is here; 0 without one."""
        state = self._broker.mirror.brokers.get(broker_id)
        return max(self._rows.get((broker_id, state.incarnation), ()), default=0) if state is not None else 0

    def _answer_of(self, broker_id: int, request: RatesRequest) -> RatesAnswer | None:
        try:
            return RATES.ask(self._broker.peers, broker_id, request, timeout_s=ANSWER_WITHIN_S)
        except PortalMQError:
            return None

    def _tick(self) -> None:
        upto = self._upto()
        kept_from = upto - SECONDS_KEPT
        new = range(max(self._shown or upto - 6, kept_from) + 1, upto + 1)
        self._rows = {each: rows for each, rows in self._rows.items() if max(rows, default=0) > kept_from}
        self._unknown = {second for second in self._unknown if second > kept_from}
        late = [row for row in self._sums(sorted(self._unknown & self._came)) if len(row) > 1]
        self._shown = upto
        found = {"rows": [*late, *self._sums(new)], "marks": self._newest_marks(), **self._now()}
        self.event = _event("tick", found)
        ticked, self._ticked = self._ticked, Event()
        ticked.set()

    def _sums(self, seconds: Iterable[int]) -> list[list[float]]:
        """Return the sum of each second of which anything is known, as sum_of does, and note those that are not."""
        histories = [answer.registered for answer in self._answers.values()]
        found = []
        for second in seconds:
            rows = {each: own[second] for each, own in self._rows.items() if second in own}
            there = there_at(histories, second, 1)
            if rows or there:
                found.append(sum_of(second, rows, there))
        self._unknown.update(int(row[0]) for row in found if len(row) == 1)
        return found

    def _newest_marks(self) -> list[ClusterMark]:
        marks = sorted(self._marks.values(), key=lambda mark: mark.at_ms)
        for mark in marks[:-MARKS_SHOWN]:
            del self._marks[mark.at_ms, mark.kind, mark.text]
        return marks[-MARKS_SHOWN:]

    def _now(self) -> dict[str, Any]:
        """Return the present state of brokers, groups and topics."""
        cluster, answers = self._broker.overview.cluster(), self._answers.values()
        topics, groups = topics_of(answers), groups_of(answers)
        return {
            "at_ms": self._broker.clock.wall_ms(),
            "controller": cluster.controller,
            "offline": self._broker.overview.offline_partitions(),
            "brokers": [
                _broker_now(each.id, each.url, each.live, self._answers.get(each.id)) for each in cluster.brokers
            ],
            "topics": sorted(topics.values(), key=lambda each: each.published + each.delivered, reverse=True)[:TOP],
            "groups": sorted(groups.values(), key=lambda each: each.lag, reverse=True)[:TOP],
        }


def incarnation_of(answer: RatesAnswer) -> Incarnation:
    return answer.broker_id, answer.incarnation


def there_at(histories: Iterable[list[Registered]], second: int, length_s: int) -> set[Incarnation] | None:
    """Return the brokers that were registered at any time in the `length_s` up to `second`, as any of the histories has
    it; None where none of them goes back so far."""
    found: set[Incarnation] | None = None
    for history in histories:
        begun = [each for each in history if each.second < second]
        first = next((at for at in range(len(begun) - 1, 0, -1) if begun[at].second < second - length_s), 0)
        for each in begun[first:]:
            found = (found or set()).union(each.brokers)
    return found


def sum_of(second: int, rows: dict[Incarnation, Rate], there: Set[Incarnation] | None) -> list[float]:
    """Return the second and the sum of the rows of all brokers; the second alone where the row of one that was there is
    missing: what it did is unknown, and not zero."""
    if there is None or not there <= rows.keys():
        return [second]
    sums = [round(sum(column), 2) for column in zip(*map(msgspec.structs.astuple, rows.values()), strict=True)]
    return [second, *sums[1:-1], max(row.oldest_ms for row in rows.values())]


def lags_of(answers: list[RatesAnswer]) -> list[tuple[int, int | None]]:
    """Return the lag of the group whose series were asked for, each LAGS_EVERY_S; None where a broker that was there
    then does not answer. A broker reads its lags at times of its own, so its last reading counts."""
    step = int(LAGS_EVERY_S)
    answered = {incarnation_of(answer) for answer in answers}
    histories = [answer.registered for answer in answers]
    readings = [{second // step * step: lag for second, lag in answer.series} for answer in answers]
    last = [0] * len(answers)
    found: list[tuple[int, int | None]] = []
    for moment in sorted(set().union(*readings)):
        last = [each.get(moment, before) for each, before in zip(readings, last, strict=True)]
        there = there_at(histories, moment + step, step)
        found.append((moment, sum(last) if there is not None and there <= answered else None))
    return found


def topics_of(answers: Iterable[RatesAnswer]) -> dict[str, TopicRate]:
    """Return the rates of topics over all brokers."""
    found: dict[str, TopicRate] = {}
    for each in (topic for answer in answers for topic in answer.topics):
        had = found.get(each.name, TopicRate(each.name, 0, 0, 0))
        sums = (had.published + each.published, had.delivered + each.delivered, had.acked + each.acked)
        found[each.name] = TopicRate(each.name, *(round(number, 1) for number in sums))
    return found


def groups_of(answers: Iterable[RatesAnswer]) -> dict[str, GroupLagNow]:
    """Return the lags of groups over all brokers."""
    found: dict[str, GroupLagNow] = {}
    for each in (group for answer in answers for group in answer.groups):
        had = found.get(each.name, GroupLagNow(each.name, 0, 0, 0, 0))
        found[each.name] = GroupLagNow(
            each.name,
            had.lag + each.lag,
            had.in_flight + each.in_flight,
            had.dead + each.dead,
            max(had.oldest_ms, each.oldest_ms),
        )
    return found


def _broker_now(broker_id: int, url: str, live: bool, answer: RatesAnswer | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": broker_id, "url": url, "live": live, "answers": answer is not None}
    if answer is not None:
        for name in ("led", "followed", "under_replicated", "disk_free_bytes", "disk_full"):
            shown[name] = getattr(answer, name)
        shown["in"] = answer.rows[-1].published if answer.rows else 0
    return shown


def _event(name: str, found: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode(found))


_rates_of: WeakKeyDictionary[Broker, ClusterRates] = WeakKeyDictionary()


def rates_of(broker: Broker) -> ClusterRates:
    """Return the one of this broker."""
    found = _rates_of.get(broker)
    if found is None:
        found = _rates_of[broker] = ClusterRates(broker)
    return found
