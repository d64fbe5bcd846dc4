"""Schedules on one broker with a real log, and a clock that the test sets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from support.domain import Fixture, HandClock, own_turns, running, schedule_turn
from support.held_writes import held_writes
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.schedules.runner import RETRY_MS
from portalmq.broker.schedules.timetable import moment_text
from portalmq.broker.storage.batch import Record
from portalmq.contract.schedules import SCHEDULE_BYTES_MAX, SCHEDULE_IDS_FROM
from portalmq.control_plane.plane import OutcomeUnknown
from portalmq.control_plane.schedules import ScheduleSpec, ScheduleState
from portalmq.control_plane.tree import Versioned
from portalmq.errors import (
    InvalidRequest,
    MessageTooLarge,
    PortalMQError,
    ScheduleNotFound,
    TopicNotFound,
    Unavailable,
)

DAY_MS = 86_400_000
START_MS = 1_700_000_000_000
EACH_SECOND = ScheduleSpec("t", None, 1_000, "UTC", b"hi", "text/plain")


@pytest.fixture
def clock() -> HandClock:
    return HandClock(START_MS)


@pytest.fixture
def fixture(tmp_path: Path, clock: HandClock) -> Iterator[Fixture]:
    with running(tmp_path, clock) as started:
        own_turns(started)
        yield started


def spec(**changes: object) -> ScheduleSpec:
    return msgspec.structs.replace(EACH_SECOND, **changes)


def look(fixture: Fixture) -> None:
    """Have the runner read and publish once."""
    schedule_turn(fixture)


def after(fixture: Fixture, seconds: float) -> None:
    fixture.clock.advance(round(seconds * 1_000))
    look(fixture)


def records(fixture: Fixture, topic: str = "t", number: int = 0) -> list[Record]:
    partition = fixture.broker.topics.get(topic).local[number]
    eventually(lambda: partition.high_watermark == partition.replica.next_offset)
    return [
        record
        for piece in partition.reader.pieces(partition.start.offset, partition.high_watermark, 10_000)
        for record in piece.records()
    ]


def ticks(fixture: Fixture, topic: str = "t", number: int = 0) -> list[float]:
    """The ticks in the log, as seconds since the start."""
    moments = [datetime.fromisoformat(each.headers["portalmq-tick"]) for each in records(fixture, topic, number)]
    return [moment.timestamp() - START_MS / 1_000 for moment in moments]


def test_each_tick_is_one_message_with_the_schedule_and_the_moment(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", spec(key=b"k", headers={"x": "1"}))
    after(fixture, 1)
    after(fixture, 1)
    first, second = records(fixture)
    assert (first.value, first.content_type, first.key) == (b"hi", "text/plain", b"k")
    assert first.headers == {"x": "1", "portalmq-schedule": "beat", "portalmq-tick": moment_text(START_MS + 1_000)}
    assert second.headers["portalmq-tick"] == moment_text(START_MS + 2_000)


def test_looking_often_publishes_nothing_twice(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 1)
    for _ in range(20):
        after(fixture, 0.01)
    assert ticks(fixture) == [1]


def test_the_same_definition_changes_nothing_and_an_interval_goes_on(fixture: Fixture) -> None:
    assert fixture.broker.schedules.put("beat", spec(every_ms=10_000))[1]
    after(fixture, 7)
    shown, created = fixture.broker.schedules.put("beat", spec(every_ms=10_000))
    assert not created
    assert shown.next_ms == START_MS + 10_000
    shown, _ = fixture.broker.schedules.put("beat", spec(every_ms=10_000, value=b"other"))
    assert shown.next_ms == START_MS + 10_000
    shown, _ = fixture.broker.schedules.put("beat", spec(every_ms=20_000))
    assert shown.next_ms == START_MS + 27_000


def test_a_tick_that_is_due_at_a_change_is_of_the_old_definition(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    fixture.clock.advance(2_500)
    fixture.broker.schedules.put("beat", spec(value=b"new"))
    after(fixture, 1)
    assert [(each, record.value) for each, record in zip(ticks(fixture), records(fixture), strict=True)] == [
        *((1, b"hi"), (2, b"hi"), (3, b"new"))
    ]


def test_a_paused_schedule_skips_its_ticks(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 1)
    assert fixture.broker.schedules.pause("beat", paused=True).next_ms is None
    after(fixture, 5)
    fixture.broker.schedules.pause("beat", paused=False)
    after(fixture, 1)
    assert ticks(fixture) == [1, 7]


def test_after_a_deletion_nothing_is_published_and_the_name_is_free(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 1)
    fixture.broker.schedules.delete("beat")
    after(fixture, 5)
    assert ticks(fixture) == [1]
    with pytest.raises(ScheduleNotFound):
        fixture.broker.schedules.show("beat")
    with pytest.raises(ScheduleNotFound):
        fixture.broker.schedules.delete("beat")
    assert fixture.broker.schedules.put("beat", EACH_SECOND)[1]
    after(fixture, 1)
    assert ticks(fixture) == [1, 7]


@pytest.mark.parametrize(("catch_up", "expected"), [(True, [1, 11]), (False, [1])])
@pytest.mark.parametrize("down_s", [10.5])
def test_ticks_missed_while_the_broker_was_down(
    tmp_path: Path, clock: HandClock, down_s: float, catch_up: bool, expected: list[int]
) -> None:
    with running(tmp_path, clock) as fixture:
        fixture.broker.schedules.put("beat", spec(catch_up=catch_up))
        after(fixture, 1)
        assert ticks(fixture) == [1]
    clock.advance(round(down_s * 1_000))
    with running(tmp_path, clock) as fixture:
        look(fixture)
        assert ticks(fixture) == expected
        after(fixture, 1)
        assert ticks(fixture) == [*expected, 12]


def is_silent(fixture: Fixture, brokers: set[int]) -> None:
    """Have these brokers registered, without an answer to the question for how long they are up."""
    agreement: Any = fixture.broker.clock_agreement
    agreement.compare = lambda: None
    agreement._unheard = brokers


def test_no_tick_is_missed_before_the_other_brokers_have_told_how_long_they_are_up(
    tmp_path: Path, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, clock) as fixture:
        fixture.broker.schedules.put("beat", EACH_SECOND)
        after(fixture, 1)
    clock.advance(5_500)
    with running(tmp_path, clock) as fixture:
        monkeypatch.setattr(fixture.broker.leaders, "_patience_s", 0.0)
        is_silent(fixture, {2})
        look(fixture)
        after(fixture, 1)
        assert ticks(fixture) == [1]
        for change in (
            lambda: fixture.broker.schedules.put("beat", spec(value=b"new")),
            lambda: fixture.broker.schedules.pause("beat", paused=True),
            lambda: fixture.broker.schedules.delete("beat"),
        ):
            with pytest.raises(Unavailable, match="have not told yet for how long"):
                change()
        fixture.broker.clock_agreement._up_since_ms -= 5_400
        is_silent(fixture, set())
        look(fixture)
        assert ticks(fixture) == [1, 2, 3, 4, 5, 6, 7]


def test_a_tick_that_is_due_during_a_change_that_is_none_is_published_after_it(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    look(fixture)
    fixture.broker.schedule_runner.frozen.add("beat")
    after(fixture, 1)
    assert ticks(fixture) == []
    fixture.broker.schedule_runner.frozen.remove("beat")
    after(fixture, RETRY_MS / 1_000)
    assert ticks(fixture) == [1]


def test_what_is_not_missed_does_not_wait_for_the_other_brokers(fixture: Fixture) -> None:
    is_silent(fixture, {2})
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 2)
    assert ticks(fixture) == [1, 2]


def test_the_last_tick_is_known_long_after_the_dedup_window(tmp_path: Path, clock: HandClock) -> None:
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(config={"dedup_window_ms": 1_000}))
        fixture.broker.schedules.put("yearly", spec(every_ms=365 * DAY_MS))
        after(fixture, 365 * 86_400)
        assert len(ticks(fixture)) == 1
        for _ in range(3):
            fixture.clock.advance(30 * DAY_MS)
            fixture.broker.produce("t", ProduceRequest([Record(b"other", headers={"portalmq-tick": "1970-01-01"})]))
            fixture.broker.maintenance.retain()
            fixture.broker.maintenance.save_state()
    with running(tmp_path, clock) as fixture:
        look(fixture)
        assert [each.headers.get("portalmq-schedule") for each in records(fixture)].count("yearly") == 1
        producers = fixture.broker.topics.get("t").local[0].replica.producers
        assert producers.epoch_of(SCHEDULE_IDS_FROM + 1) is not None


def test_a_clock_that_was_put_back_repeats_nothing(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 3)
    fixture.clock.day_ms -= 3_600_000
    look(fixture)
    after(fixture, 10)
    assert ticks(fixture) == [1, 2, 3]
    fixture.clock.day_ms += 3_600_000
    look(fixture)
    assert ticks(fixture) == list(range(1, 14))


def test_a_refused_tick_is_published_later_and_a_deletion_does_not_wait_for_it(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    look(fixture)
    fixture.disk.is_full = True
    after(fixture, 1)
    after(fixture, 1)
    assert ticks(fixture) == []
    fixture.disk.is_full = False
    after(fixture, 1)
    assert ticks(fixture) == [1, 2, 3]
    fixture.disk.is_full = True
    after(fixture, 1)
    fixture.broker.schedules.delete("beat")
    fixture.disk.is_full = False
    after(fixture, 5)
    assert ticks(fixture) == [1, 2, 3]


def test_a_tick_that_the_disk_refuses_on_its_way_is_published_later(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.broker.schedules.put("beat", spec(every_ms=60_000))
    look(fixture)
    partition = fixture.broker.topics.get("t").local[0]
    with held_writes(monkeypatch, partition) as writes:
        after(fixture, 60)
        assert partition.replica.producers.snapshot() != []
        writes.refuse()
        eventually(lambda: partition.replica.producers.snapshot() == [])

    def is_published() -> bool:
        after(fixture, RETRY_MS / 1_000)
        return ticks(fixture) == [60]

    eventually(is_published)
    after(fixture, 60)
    assert ticks(fixture) == [60, 120]


def test_a_change_with_an_unknown_outcome_publishes_nothing_before_the_definition_is_read(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    look(fixture)
    store = fixture.broker.schedule_runner._store
    change = store.change

    def lost(*arguments: object) -> int:
        change(*arguments)
        raise OutcomeUnknown("the answer was lost")

    monkeypatch.setattr(store, "change", lost)
    monkeypatch.setattr(fixture.broker.leaders, "_patience_s", 0.0)
    with pytest.raises(Unavailable):
        fixture.broker.schedules.pause("beat", paused=True)
    monkeypatch.undo()
    fixture.clock.advance(2_000)
    look(fixture)
    assert ticks(fixture) == []
    assert fixture.broker.schedules.show("beat").state.spec.paused


@pytest.mark.parametrize("refusal", [Unavailable, ScheduleNotFound])
@pytest.mark.parametrize("asked", ["pause", "put"])
def test_a_change_that_its_leader_may_have_made_is_unknown_though_it_is_refused_without_one(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, refusal: type[PortalMQError], asked: str
) -> None:
    schedules = fixture.broker.schedules
    schedules.put("beat", EACH_SECOND)

    def no_answer(*_: object, **options: object) -> NoReturn:
        raise Unavailable("no answer", outcome="unknown")

    def refuse(*_: object) -> NoReturn:
        raise refusal("changed by another broker")

    monkeypatch.setattr(fixture.broker.leaders, "call_one", no_answer)
    monkeypatch.setattr(schedules, "_without_leader", lambda schedule: (None,))
    monkeypatch.setattr(schedules, "_change_here", refuse)
    with pytest.raises((Unavailable, ScheduleNotFound)) as raised:
        schedules.pause("beat", paused=True) if asked == "pause" else schedules.put("beat", spec(value=b"new"))
    assert raised.value.outcome == "unknown"


def while_all_are_read(fixture: Fixture, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Have the runner read all definitions, with `meanwhile`, and two seconds, between the answer and its use."""
    runner = fixture.broker.schedule_runner
    read_all = runner._store.all

    def slowly() -> dict[str, Versioned[ScheduleState]]:
        found = read_all()
        meanwhile()
        fixture.clock.advance(2_000)
        return found

    runner._on_plane_event(None)
    with monkeypatch.context() as patched:
        patched.setattr(runner._store, "all", slowly)
        look(fixture)


def test_a_deletion_while_the_definitions_are_read_is_one(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    look(fixture)
    while_all_are_read(fixture, monkeypatch, lambda: fixture.broker.schedules.delete("beat"))
    assert ticks(fixture) == []
    after(fixture, 1)
    assert ticks(fixture) == []


def test_a_schedule_that_is_created_again_while_the_definitions_are_read_is_the_new_one(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    look(fixture)

    def create_again() -> None:
        fixture.broker.schedules.delete("beat")
        fixture.broker.schedules.put("beat", spec(value=b"new"))
        fixture.broker.schedules.put("beat", spec(value=b"newer"))

    while_all_are_read(fixture, monkeypatch, create_again)
    after(fixture, 1)
    assert {each.value for each in records(fixture)} == {b"newer"}
    assert ticks(fixture) == [1, 2, 3]


def test_a_change_with_an_unknown_outcome_while_the_definitions_are_read_is_read_first(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    look(fixture)
    store = fixture.broker.schedule_runner._store
    change = store.change

    def lost(*arguments: object) -> int:
        change(*arguments)
        raise OutcomeUnknown("the answer was lost")

    def pause() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store, "change", lost)
            patched.setattr(fixture.broker.leaders, "_patience_s", 0.0)
            with pytest.raises(Unavailable):
                fixture.broker.schedules.pause("beat", paused=True)

    while_all_are_read(fixture, monkeypatch, pause)
    after(fixture, 1)
    assert ticks(fixture) == []


def test_the_messages_of_a_key_go_to_its_partition_also_when_the_topic_grows(fixture: Fixture) -> None:
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
    fixture.broker.schedules.put("keyed", spec(key=b"k2"))
    fixture.broker.schedules.put("plain", spec(key=None))
    after(fixture, 1)
    fixture.broker.alter_topic("t", wire.AlterTopic(partitions=7))
    place = zlib.crc32(b"k2") % 7
    assert place != 0
    eventually(lambda: fixture.broker.schedules.show("keyed").state.partition == place)
    assert fixture.broker.schedules.show("plain").state.partition == 0
    after(fixture, 1)
    assert ticks(fixture, number=place) == [2]
    assert sorted(ticks(fixture)) == [1, 1, 2]


def test_a_schedule_waits_for_a_topic_that_was_deleted(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 1)
    fixture.broker.delete_topic("t")
    eventually(lambda: fixture.broker.topics.get("t") is None)
    after(fixture, 5)
    assert fixture.broker.topics.get("t") is None, "a tick creates no topic"
    assert fixture.broker.schedules.show("beat").next_ms is None
    fixture.broker.create_topic("t", wire.CreateTopic())
    eventually(
        lambda: fixture.broker.schedules.show("beat").state.topic_id == fixture.broker.topics.get("t").state.topic_id
    )
    after(fixture, 1)
    assert ticks(fixture) == [7]


def test_a_schedule_of_a_deleted_topic_can_be_deleted(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    fixture.broker.delete_topic("t")
    fixture.broker.schedules.delete("beat")
    assert fixture.broker.schedules.list_all() == []


def test_a_schedule_may_move_to_another_topic(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 2)
    fixture.clock.advance(500)
    fixture.broker.schedules.put("beat", spec(topic="u"))
    after(fixture, 1)
    assert (ticks(fixture), ticks(fixture, "u")) == ([1, 2], [3])
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 1)
    assert (ticks(fixture), ticks(fixture, "u")) == ([1, 2, 4], [3])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"cron": "* * * * *"}, InvalidRequest),
        ({"every_ms": None}, InvalidRequest),
        ({"every_ms": None, "cron": "61 * * * *"}, InvalidRequest),
        ({"timezone": "Nowhere"}, InvalidRequest),
        ({"topic": "no/name"}, InvalidRequest),
        ({"value": b"x" * (SCHEDULE_BYTES_MAX + 1)}, InvalidRequest),
        ({"topic": "small"}, MessageTooLarge),
        ({"topic": "compacted"}, InvalidRequest),
    ],
)
def test_a_definition_that_cannot_work_is_refused(
    fixture: Fixture, wrong: dict[str, object], error: type[Exception]
) -> None:
    fixture.broker.create_topic("small", wire.CreateTopic(config={"max_message_bytes": 1}))
    fixture.broker.create_topic("compacted", wire.CreateTopic(config={"cleanup": "compact"}))
    with pytest.raises(error):
        fixture.broker.schedules.put("beat", spec(**wrong))
    assert fixture.broker.schedules.list_all() == []


def test_there_are_not_too_many(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.broker.schedules.service.SCHEDULES_MAX", 2)
    for name in "ab":
        fixture.broker.schedules.put(name, EACH_SECOND)
    with pytest.raises(InvalidRequest, match="2 schedules already"):
        fixture.broker.schedules.put("c", EACH_SECOND)
    fixture.broker.schedules.put("a", spec(value=b"changed"))


def test_a_missing_topic_is_no_place_where_topics_are_not_created(fixture: Fixture) -> None:
    fixture.broker.topics._auto_create = False
    with pytest.raises(TopicNotFound):
        fixture.broker.schedules.put("beat", EACH_SECOND)


def test_clients_cannot_use_the_ids_of_schedules(fixture: Fixture) -> None:
    fixture.broker.create_topic("t", wire.CreateTopic())
    stamp = wire.ProducerStamp(SCHEDULE_IDS_FROM + 1, 0, 0)
    with pytest.raises(InvalidRequest):
        fixture.broker.produce("t", ProduceRequest([Record(b"x")], partition=0, producer=stamp))


def test_many_schedules_at_one_moment_are_published_once_each(fixture: Fixture) -> None:
    for number in range(300):
        fixture.broker.schedules.put(f"s{number}", EACH_SECOND)
    after(fixture, 1)
    eventually(lambda: len(records(fixture)) == 300)
    assert {each.headers["portalmq-schedule"] for each in records(fixture)} == {f"s{n}" for n in range(300)}


def test_the_runner_publishes_by_itself(tmp_path: Path, clock: HandClock) -> None:
    with running(tmp_path, clock) as fixture:
        fixture.broker.schedules.put("beat", EACH_SECOND)
        clock.advance(1_000)
        fixture.broker.schedule_runner._wake.set()
        eventually(lambda: ticks(fixture) == [1])


def test_the_replaced_entries_of_the_heap_are_bounded(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.broker.schedules.runner.REPLACED_MAX", 10)
    for number in range(50):
        fixture.broker.schedules.put("beat", spec(value=str(number).encode()))
    assert len(fixture.broker.schedule_runner._heap) <= 12


def test_the_log_refuses_an_older_tick(fixture: Fixture) -> None:
    fixture.broker.schedules.put("beat", EACH_SECOND)
    after(fixture, 2)
    partition = fixture.broker.topics.get("t").local[0]
    id = fixture.broker.schedules.show("beat").state.schedule_id
    assert partition.replica.producers.find_duplicate(Stamp(id, START_MS + 2_000, 0), 1) is not None
    with pytest.raises(Exception, match="is in epoch"):
        partition.replica.producers.find_duplicate(Stamp(id, START_MS + 1_000, 0), 1)
