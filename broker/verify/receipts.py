"""Checking a producer's receipts: each acknowledged message is where it was acknowledged, and as it was sent.

A receipt takes 24 bytes of memory, and messages are read by the page, so files of any size can be checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from portalmq.cli.receipts import CHECKSUM_DIGITS, checksum_of, receipts_in
from portalmq.errors import PortalMQError

CHECKSUM_BYTES = CHECKSUM_DIGITS // 2
NAMED_MAX = 1_000

Outcome = Literal["present", "missing", "different", "purged", "superseded", "unknown"]


class StoredContent(NamedTuple):
    """A stored message, as far as a receipt tells of it."""

    offset: int
    key: bytes | None
    value: bytes
    content_type: str
    headers: Mapping[str, str]


class MessagePage(NamedTuple):
    """Messages in the order of offsets: all that there are below `next_offset`, from the offset that was asked for or
    from `log_start` on. Nothing at or above `end` is committed."""

    messages: list[StoredContent]
    next_offset: int
    log_start: int
    end: int


class MessageReader(Protocol):
    """A partition, or one replica of it, to read messages from."""

    name: str
    # Whether compaction may have removed messages that a later one of their key supersedes.
    is_compacted: bool

    def page(self, offset: int) -> MessagePage: ...


class ReceiptProblem(msgspec.Struct):
    """A receipt whose message is not `present`. `where` says at which partition, or replica of it."""

    topic: str
    partition: int
    offset: int
    outcome: Outcome
    where: str


class ReceiptsFinding(msgspec.Struct):
    """How many receipts have which outcome, counted once for each replica that was read, and the first of them that are
    not `present`."""

    receipts: int = 0
    outcomes: dict[Outcome, int] = {}
    problems: list[ReceiptProblem] = []
    not_named: int = 0
    reasons: list[str] = []


class Receipts:
    """The receipts of a file, in little memory."""

    def __init__(self, path: Path) -> None:
        """Raises BadReceipts, OSError."""
        self._offsets: dict[tuple[str, int], array[int]] = {}
        self._checksums: dict[tuple[str, int], bytearray] = {}
        for receipt in receipts_in(path):
            key = (receipt.topic, receipt.partition)
            self._offsets.setdefault(key, array("q")).append(receipt.offset)
            self._checksums.setdefault(key, bytearray()).extend(bytes.fromhex(receipt.checksum))
        self.found = ReceiptsFinding(sum(map(len, self._offsets.values())))

    @property
    def partitions(self) -> list[tuple[str, int]]:
        return sorted(self._offsets)

    def _sorted(self, key: tuple[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, checksum)."""
        offsets, checksums = self._offsets[key], self._checksums[key]
        for at in sorted(range(len(offsets)), key=offsets.__getitem__):
            yield offsets[at], bytes(checksums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES])

    def fail(self, key: tuple[str, int], outcome: Outcome, reason: str) -> None:
        """Note the same outcome of all receipts of a partition."""
        self.found.reasons.append(f"{key[0]}/{key[1]}: {reason}")
        for offset, _ in self._sorted(key):
            self._note(key, offset, outcome, "nowhere")

    def check(self, key: tuple[str, int], source: MessageReader, unsettled: range = range(0)) -> None:
        """Compare the receipts of a partition with what is stored. At `unsettled` offsets it proves nothing that the
        source lacks a message, or has another one."""
        page = MessagePage([], -1, 0, 0)
        stored: dict[int, StoredContent] = {}
        failed = ""
        for offset, checksum in self._sorted(key):
            while not failed and page.next_offset <= offset and (page.next_offset < 0 or page.next_offset < page.end):
                before = page.next_offset
                try:
                    page = source.page(offset)
                except PortalMQError as error:
                    failed = error.detail
                    self.found.reasons.append(f"{source.name}: {failed}")
                stored = {each.offset: each for each in page.messages}
                if page.next_offset <= before:
                    break
            outcome: Outcome = "unknown" if failed else _outcome(offset, checksum, stored.get(offset), page, source)
            if outcome in ("missing", "different") and offset in unsettled:
                outcome = "unknown"
            self._note(key, offset, outcome, source.name)

    def _note(self, key: tuple[str, int], offset: int, outcome: Outcome, where: str) -> None:
        found = self.found
        found.outcomes[outcome] = found.outcomes.get(outcome, 0) + 1
        if outcome == "present":
            return
        if len(found.problems) < NAMED_MAX:
            found.problems.append(ReceiptProblem(*key, offset, outcome, where))
        else:
            found.not_named += 1


def _outcome(
    offset: int, checksum: bytes, stored: StoredContent | None, page: MessagePage, source: MessageReader
) -> Outcome:
    if stored is not None:
        return "present" if bytes.fromhex(checksum_of(*stored[1:])) == checksum else "different"
    if offset < page.log_start:
        return "purged"  # or never there: nobody can say
    if source.is_compacted and offset < page.end:
        return "superseded"  # by a later message of its key, or lost
    return "missing"
