"""The fold of a log, recovered from the newest snapshot that is left."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.log_files import IDENTITY, Writer, open_log

from portalmq.broker.core.fold import GroupFold, PartitionFold, ProducerFold, encode_fold
from portalmq.broker.core.queue.records import Ack, Commit, Dead, Done, Grant, GroupStart, Output, Purge
from portalmq.broker.partition.folding import GroupsFold, last_message_end, recover
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.state import StateFile

encode = msgspec.msgpack.encode


@pytest.fixture
def files(tmp_path: Path):
    return open_log(tmp_path), StateFile(tmp_path, identity=IDENTITY)


def filled(log) -> Writer:
    """Append EPOCH_START, a group's start, five messages of a producer, and an ack of the first two."""
    writer = Writer(log)
    log.append(
        [
            writer.control_batch(BatchKind.EPOCH_START),
            writer.control_batch(BatchKind.GROUP_START, encode(GroupStart(0, 1)), "g"),
            writer.messages_batch([b"m"] * 5, stamp=(7, 0, 0)),
            writer.control_batch(BatchKind.ACK, encode(Ack(((2, 4),), 1, ((0, 0, 2), (0, 0, 3)))), "g"),
        ]
    )
    return writer


def test_without_a_snapshot_the_whole_log_is_folded_and_nothing_is_known_to_be_committed(files):
    log, state_file = files
    filled(log)
    found = recover(log, state_file)
    assert (found.epochs, found.high_watermark, found.lost) == ([(1, 0)], 0, "")
    assert [found.groups.delivery["g"].is_ahead(offset) for offset in (2, 3, 4)] == [True, True, False]
    assert found.producers.snapshot() == [ProducerFold(7, 0, [(0, 5, 2, 1_000)])]
    assert (found.readable_end, found.recovered_end) == (0, 7)


def test_with_a_saved_fold_only_later_records_are_folded(files):
    log, state_file = files
    filled(log)
    state_file.save(PartitionFold(7, 0, [(1, 0)], [], [GroupFold("g", 0, 3, [])]), 7)
    found = recover(log, state_file)
    assert found.groups.delivery["g"].is_ahead(3), "the ack follows the snapshot"
    assert found.producers.snapshot() == [], "the snapshot has no producers"
    assert (found.high_watermark, found.readable_end) == (7, 7)


def test_a_later_state_record_replaces_the_saved_fold(files):
    log, state_file = files
    writer = filled(log)
    state_file.save(PartitionFold(7, 0, [(1, 0)], [], [GroupFold("g", 0, 3, [])]), 7)
    newer = PartitionFold(8, 0, [(1, 0)], [ProducerFold(9, 0, [(0, 1, 1, 1)])], [GroupFold("h", 0, 6, [])])
    log.append([writer.control_batch(BatchKind.STATE, encode_fold(newer))])
    found = recover(log, state_file)
    assert list(found.groups.delivery) == ["h"]
    assert [producer.producer_id for producer in found.producers.snapshot()] == [9]
    assert found.high_watermark == 7, "a STATE record does not need to be committed"
    assert found.groups.state_offset == 8


def test_a_fold_saved_for_a_reset_that_did_not_happen_does_not_count(files):
    log, state_file = files
    filled(log)
    state_file.save(PartitionFold(5, 5, [(3, 2)]), 5, durable=True)
    found = recover(log, state_file)
    assert (found.epochs, found.lost) == ([(1, 0)], "")
    log.reset(5, 3, 1_000)
    found = recover(log, state_file)
    assert (found.epochs, found.high_watermark, found.lost) == ([(3, 2)], 5, "")


def test_a_log_that_ends_below_a_committed_offset_is_not_complete(files):
    log, state_file = files
    filled(log)
    state_file.save(PartitionFold(8, 0, [(1, 0)]), 8)
    log.truncate(2)
    assert "committed records up to 8" in recover(log, state_file).lost


def test_a_log_that_begins_late_without_a_saved_fold_is_not_complete(files):
    log, state_file = files
    log.reset(100, 50, 1_000)
    assert "begins at 100" in recover(log, state_file).lost


def test_a_purge_moves_the_log_start_when_a_state_record_behind_it_is_committed():
    fold = GroupsFold()
    fold.purge(10, 4)
    assert (fold.due(100), fold.purged_upto) == (0, 4)
    fold.state_written(11, 4)
    assert fold.due(11) == 0
    assert fold.due(12) == 4
    assert fold.due(12) == 0, "it is due once"


def test_recovery_finds_an_unfinished_purge(files):
    log, state_file = files
    writer = filled(log)
    log.append([writer.control_batch(BatchKind.PURGE, encode(Purge(5)))])
    found = recover(log, state_file)
    assert (found.groups.purges, found.groups.delivery["g"].next) == ([(8, 5)], 5)
    state = PartitionFold(9, 5, [(1, 0)], [], [])
    log.append([writer.control_batch(BatchKind.STATE, encode_fold(state))])
    found = recover(log, state_file)
    assert (found.groups.purges, found.groups.due(10)) == ([], 5)


def test_the_end_of_the_last_message_is_found_behind_control_records(files):
    log, _ = files
    filled(log)
    assert [last_message_end(log, below) for below in (0, 1, 2, 3, 5, 7, 8)] == [0, 0, 0, 3, 5, 7, 7]


def test_the_offset_an_open_order_needs_is_exact_from_its_record_and_low_from_a_snapshot():
    groups = GroupsFold()
    groups.apply("g", GroupStart(0, 1), 0)
    groups.apply("g", Grant(((1, 9, 1),), 9, 1, 100), 10)
    assert groups.ordered_from() is None
    groups.apply("g", Dead(((1, 2, 1),), 2, "old", ""), 11)
    assert groups.ordered_from() is None, "without a topic there is no order"
    groups.apply("g", Dead(((5, 7, 1), (8, 9, 1)), 2, "new", "t.dlq"), 12)
    groups.apply("g", Commit(b"id", 3, (Output("out", None),), ((2, 4),)), 13)
    assert groups.ordered_from() == 5
    later = GroupsFold(groups.snapshot_into(PartitionFold()))
    assert later.ordered_from() == 0
    groups.end("g")
    assert groups.ordered_from() == 5, "the orders outlive the group"
    later = GroupsFold(groups.snapshot_into(PartitionFold()))
    assert later.ordered_from() == 0, "the snapshot has no dead letters to show the offset"
    groups.apply("g", Done(12), 14)
    assert groups.ordered_from() == 13
    groups.apply("g", Done(13), 15)
    assert groups.ordered_from() is None


def test_a_fold_is_saved_while_the_state_file_has_all_of_the_log_and_its_high_watermark(files):
    log, state_file = files
    filled(log)
    assert not recover(log, state_file).is_saved
    fold = PartitionFold(applied=log.end_offset)
    state_file.save(fold, log.end_offset)
    assert recover(log, state_file).is_saved
    state_file.save(fold, log.end_offset - 1)
    assert not recover(log, state_file, log.end_offset).is_saved, "a higher high watermark is known"
    state_file.save(PartitionFold(applied=log.end_offset - 1), log.end_offset)
    assert not recover(log, state_file).is_saved
    state_file.save(fold, log.end_offset)
    log.advance_log_start(2)
    assert not recover(log, state_file).is_saved
