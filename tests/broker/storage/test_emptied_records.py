"""Control records of groups that a compaction empties: their offsets stay, and readers know them from lost ones."""

from __future__ import annotations

from collections.abc import Sequence

from support.log_files import Writer, everything, open_log

from portalmq.broker.storage.batch import Batch, BatchKind, Record, batch_of_frame, frame_of, verified_header
from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.log import Log


def put(log: Log) -> None:
    Writer(log).put(Record(b"value", key=b"key"))


def empty(log: Log, upto: int) -> None:
    """Compact the rolled segments below `upto`."""
    log.seal(log.end_offset)
    work = Compaction(log, CompactionOrder(upto, 0, 1_000_000, (), blanks=True))
    while work.step():
        pass
    work.close()


def copies(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches as a follower receives them."""
    return [batch_of_frame(frame, verified_header(frame)) for frame in map(frame_of, batches)]


def test_records_of_groups_lose_their_content_and_keep_their_offsets(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    kinds = [
        BatchKind.EPOCH_START,
        BatchKind.GROUP_START,
        BatchKind.STATE,
        BatchKind.GRANT,
        BatchKind.CANCEL,
        BatchKind.COMPACT,
        BatchKind.DEAD,
    ]
    log.append([writer.control_batch(kind, b"x" * 1_000, "g") for kind in kinds])
    put(log)
    Writer(log).put_control(BatchKind.ACK, b"body", "g")
    log.roll()
    copy = open_log(tmp_path / "copy")
    copy.append(log.read(0))
    copy.roll()
    for each in (log, copy):
        empty(each, 8)
        kept = [
            BatchKind.EPOCH_START,
            BatchKind.BLANK,
            BatchKind.BLANK,
            BatchKind.BLANK,
            BatchKind.BLANK,
            BatchKind.COMPACT,
            BatchKind.BLANK,
        ]
        assert [batch.kind for batch in everything(each)] == [*kept, BatchKind.MESSAGES, BatchKind.ACK]
        assert [batch.kind for batch in each.control_records()] == [
            BatchKind.EPOCH_START,
            BatchKind.COMPACT,
            BatchKind.ACK,
        ]
        assert each.newest_state() is None
    assert copies(everything(log)) == everything(copy)


def test_emptied_records_that_were_copied_and_others_are_read_together(tmp_path):
    """A copy has rows of records that were emptied before it began, and none of those that it emptied itself."""
    log = open_log(tmp_path / "leader")
    copy = open_log(tmp_path / "follower")

    def write(start: int) -> None:
        writer = Writer(log)
        log.append([writer.control_batch(BatchKind.ACK, b"body", "g")])
        put(log)
        copy.append(copies(log.read(start)))

    def compact_both() -> None:
        for each in (log, copy) if copy.end_offset else (log,):
            each.roll()
            empty(each, each.end_offset)

    Writer(log).put_control(BatchKind.ACK, b"body", "g")
    put(log)
    compact_both()
    copy.append(copies(everything(log)))
    write(2)
    compact_both()
    write(4)
    for each in (log, copy):
        for offset in range(5):
            kept = [batch.base_offset for batch in each.control_records(offset) if batch.kind == BatchKind.ACK]
            assert kept == [4], "the others are emptied"
