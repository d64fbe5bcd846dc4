"""Lanes in the files: read by index, in their order, over all segments, and only where a segment has them."""

from __future__ import annotations

import apsw
from support.log_files import Writer, open_log

from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.lane_indexes import DELAYED_MESSAGES, PRIORITY_MESSAGES
from portalmq.broker.storage.lanes import Lanes

END = 1 << 60


def delayed(due_ms: int, **more) -> Record:
    return Record(b"x", deliver_at_ms=due_ms, **more)


def offsets(lanes: Lanes, lane: int, due_ms: int = 0, offset: int = 0, end: int = END) -> list[int]:
    return [row[1] for row in lanes.after(lane, due_ms, offset, end)]


def test_a_log_of_plain_messages_has_no_lanes(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(b"a", b"b", Record(b"c", deliver_at_ms=10))  # due before it was appended: plain
    assert log.lanes.present == frozenset()
    assert not log.lanes.has_expiring


def test_lanes_are_read_in_their_order_over_segments(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(delayed(9_000), delayed(5_000), b"plain", Record(b"p", priority=3))
    log.roll()
    writer.put(delayed(7_000), Record(b"p", priority=3), delayed(5_000), delayed(6_000, priority=3))
    assert log.lanes.present == {3, DELAYED, DELAYED + 3}
    assert offsets(log.lanes, DELAYED) == [1, 6, 4, 0]
    assert offsets(log.lanes, DELAYED, 5_000, 2) == [6, 4, 0]
    assert offsets(log.lanes, DELAYED, end=6) == [1, 4, 0]
    assert offsets(log.lanes, 3) == [3, 5]
    assert offsets(log.lanes, 3, offset=4) == [5]
    assert offsets(log.lanes, DELAYED + 3) == [7]


def test_a_lane_is_read_in_pages_that_join_without_a_seam(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    for part in range(4):
        writer.put(*[delayed(5_000 + (number * 7) % 100) for number in range(300)])
        if part == 1:
            log.roll()
    rows = list(log.lanes.after(DELAYED, 0, 0, END))
    assert [(row[0], row[1]) for row in rows] == sorted((row[0], row[1]) for row in rows)
    assert len(rows) == len({row[1] for row in rows}) == 1_200


def test_lane_counts_and_the_oldest_segment_needed(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(delayed(5_000), delayed(8_000))
    log.roll()
    writer.put(delayed(6_000), Record(b"p", priority=1))
    lanes = log.lanes
    assert lanes.count(DELAYED, 0, 0, END) == 3
    assert lanes.count(DELAYED, 0, 0, END, until_ms=6_000) == 2
    assert lanes.count(DELAYED, 5_000, 1, END) == 2
    assert lanes.count(DELAYED, 0, 0, END, start=2) == 1
    assert lanes.count(1, 0, 0, END) == 1
    assert lanes.first_segment_after(DELAYED, 5_000, 1, END) == 0, "8,000 is still to come"
    assert lanes.first_segment_after(DELAYED, 8_000, 2, END) is None
    assert lanes.first_segment_after(DELAYED, 5_500, 0, END, start=2) == 2
    assert lanes.first_segment_after(1, 0, 0, END) == 2


def test_the_next_plain_message_is_found_behind_many_others(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(*[delayed(5_000)] * 50, Record(b"p", priority=2), b"plain")
    assert log.lanes.next_plain(0, 52, 1_000) == 51
    assert log.lanes.next_plain(0, 52, 1_000, any_priority=True) == 50
    assert log.lanes.next_plain(0, 52, 20) == 20, "the search stops at its limit"
    assert log.lanes.next_plain(52, 52, 20) == 52


def test_reopened_sealed_and_truncated_logs_know_their_lanes(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(delayed(5_000), Record(b"x", expires_at_ms=9))
    log.roll()
    writer.put(Record(b"p", priority=4))
    log.seal(2)
    log.close()
    log = open_log(tmp_path)
    assert log.lanes.present == {4, DELAYED}
    assert log.lanes.has_expiring
    assert log.lanes.lane_positions([99, 0]) == [(DELAYED, 5_000, 0)]
    log.truncate(2)
    assert offsets(log.lanes, 4) == []


def test_a_file_of_an_earlier_release_gets_its_indexes_when_it_is_written_to(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(b"a")
    log.close()
    with apsw.Connection(str(tmp_path / f"{0:020d}.sqlite")) as old:
        for name in ("messages_by_priority", "messages_by_time", "messages_by_expiry"):
            old.execute(f"DROP INDEX {name}")
    old.close()
    log = open_log(tmp_path)
    Writer(log).put(delayed(5_000))
    assert offsets(log.lanes, DELAYED) == [1]


def test_a_lane_is_found_by_its_index(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(delayed(5_000), Record(b"p", priority=4))
    with apsw.Connection(str(tmp_path / f"{0:020d}.sqlite")) as connection:
        for rest in (
            f"{DELAYED_MESSAGES} AND priority = 0 AND (deliver_at_ms, offset) >= (1, 1) ORDER BY deliver_at_ms, offset",
            f"{PRIORITY_MESSAGES} AND priority = 4 AND offset >= 0 ORDER BY offset",
        ):
            plan = " ".join(
                row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN SELECT offset FROM messages WHERE {rest}")
            )
            assert "USING INDEX messages_by" in plan or "USING COVERING INDEX messages_by" in plan
            assert "B-TREE" not in plan, "no sorting"
    connection.close()
