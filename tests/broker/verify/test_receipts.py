"""Receipts: each acknowledged message is looked for where it was acknowledged, and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from portalmq import RecordMetadata, wire
from portalmq.broker.verify.receipts import MessagePage, Receipts, StoredContent
from portalmq.cli.receipts import BadReceipts, checksum_to_send, open_receipts, receipt_line
from portalmq.errors import Unavailable

PAGE = 7


class StoredMessages:
    """A partition with a message at each offset from `start` to 100."""

    name = "t/0"

    def __init__(self, *, start: int = 0, without: tuple[int, ...] = (), is_compacted: bool = False) -> None:
        self.is_compacted = is_compacted
        self.start = start
        self.there = {
            offset: StoredContent(offset, b"key", b"%d" % offset, wire.TEXT, {"b": "2", "a": "1"})
            for offset in range(start, 100)
            if offset not in without
        }
        self.pages = 0
        self.fails_from = 1 << 62

    def page(self, offset: int) -> MessagePage:
        self.pages += 1
        if offset >= self.fails_from:
            raise Unavailable("no leader")
        first = max(offset, self.start)
        found = [self.there[at] for at in range(first, min(first + PAGE, 100)) if at in self.there]
        return MessagePage(found, min(first + PAGE, 100), self.start, 100)


def written(path: Path, offsets: list[int], text: str = "") -> Receipts:
    lines = [
        receipt_line(
            RecordMetadata("t", 0, offset, 0), checksum_to_send("key", text or str(offset), None, {"a": "1", "b": "2"})
        )
        for offset in offsets
    ]
    path.write_bytes(b"".join(lines))
    return Receipts(path)


def outcomes(receipts: Receipts, source: StoredMessages) -> dict[str, int]:
    receipts.check(("t", 0), source)
    return dict(receipts.found.outcomes)


def test_messages_that_are_there_are_present_in_whatever_order_the_receipts_are(tmp_path):
    receipts = written(tmp_path / "r", [*range(50, 100), *range(50)])
    source = StoredMessages()
    assert outcomes(receipts, source) == {"present": 100}
    assert source.pages == 15  # each page once


def test_pages_without_a_receipt_are_not_read(tmp_path):
    source = StoredMessages()
    assert outcomes(written(tmp_path / "r", [3, 90]), source) == {"present": 2}
    assert source.pages == 2


def test_missing_and_different_messages_are_named(tmp_path):
    receipts = written(tmp_path / "r", [1, 2, 3, 99, 100, 2_000])
    source = StoredMessages(without=(2,))
    source.there[3] = source.there[3]._replace(value=b"4")
    assert outcomes(receipts, source) == {"present": 2, "missing": 3, "different": 1}
    named = [(each.offset, each.outcome) for each in receipts.found.problems]
    assert named == [(2, "missing"), (3, "different"), (100, "missing"), (2_000, "missing")]


@pytest.mark.parametrize(
    "change", [{"key": None}, {"value": b"x"}, {"content_type": wire.BYTES}, {"headers": {"a": "1", "b": "3"}}]
)
def test_every_part_of_a_message_is_compared(tmp_path, change):
    source = StoredMessages()
    source.there[3] = source.there[3]._replace(**change)
    assert outcomes(written(tmp_path / "r", [3]), source) == {"different": 1}


def test_what_was_purged_or_may_be_superseded_is_unknown(tmp_path):
    assert outcomes(written(tmp_path / "r", [1, 50]), StoredMessages(start=40)) == {"purged": 1, "present": 1}
    compacted = StoredMessages(without=(50,), is_compacted=True)
    assert outcomes(written(tmp_path / "r", [50, 100]), compacted) == {"superseded": 1, "missing": 1}


def test_what_cannot_be_read_is_unknown(tmp_path):
    receipts = written(tmp_path / "r", [1, 50, 60])
    source = StoredMessages()
    source.fails_from = 40
    assert outcomes(receipts, source) == {"present": 1, "unknown": 2}
    assert receipts.found.reasons == ["t/0: no leader"]


@pytest.mark.parametrize("line", [b"{}\n", b"rubbish\n", b'{"topic": "t", "partition": 0'])
def test_a_line_that_is_no_receipt_is_an_error(tmp_path, line):
    written(tmp_path / "r", [1])
    with open(tmp_path / "r", "ab") as file:
        file.write(line)
    with pytest.raises(BadReceipts, match="line 2"):
        Receipts(tmp_path / "r")


def test_the_beginning_of_a_receipt_that_a_kill_left_is_skipped_and_appended_to(tmp_path):
    file = tmp_path / "r"
    written(file, [1, 2])
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole) + 1):
        file.write_bytes(whole[:cut])
        there = 2 if cut >= len(whole) - 1 else 1
        assert Receipts(file).found.receipts == there
        with open_receipts(file) as again:
            again.write(whole)
        assert Receipts(file).found.receipts == there + 2


def test_what_is_no_receipt_is_not_cut_off(tmp_path):
    file = tmp_path / "r"
    file.write_bytes(b"a letter")
    open_receipts(file).close()
    assert file.read_bytes() == b"a letter\n"


def test_at_offsets_that_another_replica_may_have_nothing_is_missing(tmp_path):
    receipts = written(tmp_path / "r", [1, 2, 50, 60, 100, 2_000])
    source = StoredMessages(without=(2, 60))
    source.there[50] = source.there[50]._replace(value=b"of a former leader")
    receipts.check(("t", 0), source, range(40, 200))
    assert receipts.found.outcomes == {"present": 1, "missing": 2, "unknown": 3}
    named = [(each.offset, each.outcome) for each in receipts.found.problems]
    assert named == [(2, "missing"), (50, "unknown"), (60, "unknown"), (100, "unknown"), (2_000, "missing")]
