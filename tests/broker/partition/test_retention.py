"""Retention by age over restarts: the age of a log goes on from where it was, whatever the last appends are stamped."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.domain import Fixture, HandClock, records, running

from portalmq import wire
from portalmq.broker.core.replica.age import Age
from portalmq.broker.messages.produce import ProduceRequest

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def fill(fixture: Fixture, batches: int = 8) -> None:
    for _ in range(batches):
        fixture.broker.produce("t", ProduceRequest(records(*["x" * 20_000] * 20)))


def log_start(fixture: Fixture) -> int:
    fixture.broker.maintenance.retain()
    (partition,) = fixture.broker.topics.get("t").local.values()
    assert partition.log.sealed_segments
    return partition.log.log_start_offset


def check_old_in_hours(fixture: Fixture) -> None:
    assert log_start(fixture) == 0
    fixture.clock.advance(8 * HOUR_MS)
    assert log_start(fixture) > 0


def filled(fixture: Fixture) -> None:
    config = {"segment_bytes": 1024 * 1024, "retention_ms": 7 * DAY_MS}
    fixture.broker.create_topic("t", wire.CreateTopic(config=config))
    fill(fixture)
    assert log_start(fixture) == 0
    fixture.broker.maintenance.save_state()


@pytest.mark.parametrize("is_mended", [False, True])
def test_messages_that_a_wrong_clock_stamped_make_nothing_old_after_a_restart(tmp_path: Path, is_mended: bool) -> None:
    """Found by `make simulate-shell SEED=43944`."""
    clock = HandClock()
    with running(tmp_path, clock) as before:
        filled(before)
        clock.day_ms += 8 * DAY_MS
        fill(before)
        assert log_start(before) == 0
    clock.day_ms -= 8 * DAY_MS if is_mended else 0
    with running(tmp_path, clock) as after:
        fill(after)
        assert log_start(after) == 0
        clock.advance(HOUR_MS)
        assert log_start(after) == 0


def test_messages_of_before_a_restart_are_old_in_time(tmp_path: Path) -> None:
    clock = HandClock()
    with running(tmp_path, clock) as before:
        filled(before)
    clock.advance(8 * DAY_MS)
    with running(tmp_path, clock) as after:
        fill(after)
        check_old_in_hours(after)


def test_a_broker_that_runs_for_minutes_a_day_keeps_up(tmp_path: Path) -> None:
    clock = HandClock()
    with running(tmp_path, clock) as first:
        filled(first)
    for day in range(1, 12):
        clock.advance(DAY_MS - HOUR_MS // 6)
        with running(tmp_path, clock) as again:
            fill(again, 1)
            clock.advance(HOUR_MS // 6)
            start = log_start(again)
            again.broker.maintenance.save_state()
        assert (start > 0) == (day >= 8), day


def test_a_log_that_was_saved_before_its_first_append_ages_from_that(tmp_path: Path) -> None:
    clock = HandClock()
    with running(tmp_path, clock) as before:
        before.broker.create_topic("t", wire.CreateTopic(config={"segment_bytes": 1024 * 1024}))
        (partition,) = before.broker.topics.get("t").local.values()
        partition.retention._age = Age(0, clock.now_ms(), 0)  # as of a log that is begun again
        partition.replica.last_timestamp_ms = 0
        partition.retention.forget_snapshot()
        before.broker.maintenance.save_state()
        assert partition.state_file.age is None
    with running(tmp_path, clock) as after:
        fill(after)
        (partition,) = after.broker.topics.get("t").local.values()
        assert partition.retention._age_ms() == clock.wall_ms()


def test_without_the_state_file_ages_go_on_from_the_oldest_messages(tmp_path: Path) -> None:
    """Found by `make simulate-shell SEED=57283`: a power cut had taken the file, and a clock was days ahead."""
    clock = HandClock()
    with running(tmp_path, clock) as before:
        filled(before)
        clock.advance(8 * DAY_MS)
        fill(before, 1)
    for path in tmp_path.glob("partitions/*/*/state.sqlite*"):
        path.unlink()
    with running(tmp_path, clock) as after:
        check_old_in_hours(after)


def test_a_segment_that_is_rolled_and_not_sealed_tells_where_a_log_begins(tmp_path: Path) -> None:
    """Found by `make simulate-shell SEED=57283`."""
    clock = HandClock()
    with running(tmp_path, clock) as before:
        before.broker.create_topic("t", wire.CreateTopic(config={"retention_ms": 7 * DAY_MS}))
        fill(before, 1)
        before.broker.pool.apply(before.broker.topics.get("t").partition(0).log.roll)
        clock.day_ms += 8 * DAY_MS
        fill(before, 1)
    for path in tmp_path.glob("partitions/*/*/state.sqlite*"):
        path.unlink()
    with running(tmp_path, clock) as after:
        fill(after, 1)
        assert log_start(after) == 0
