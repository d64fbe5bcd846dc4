"""Append keyed messages, seal and compact until killed, and print the acknowledged end after each append. Run by
test_compaction_kills. The key of a message is its offset modulo KEYS, and its value begins with its offset."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.log_files import Writer, open_log

from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.compaction import Compaction, CompactionOrder

KEYS = 50
NEVER_MS = 1 << 50


def main(directory: Path, seed: int) -> None:
    chance = random.Random(seed)
    log = open_log(directory, segment_bytes=60_000)
    work: Compaction | None = None
    os.write(1, b"%d %d\n" % (log.end_offset, log.end_offset))
    while True:
        writer = Writer(log)
        batches = []
        for _ in range(chance.randint(1, 4)):
            first, count = writer.offset, chance.choice([1, 3, 40])
            batches.append(
                writer.messages_batch(
                    Record(b"%d/" % offset + b"x" * chance.randint(0, 300), "text/plain", b"%d" % (offset % KEYS))
                    for offset in range(first, first + count)
                )
            )
        log.append(batches)
        os.write(1, b"%d %d\n" % (log.end_offset, log.end_offset))
        if work is None:
            log.roll()
            log.seal(log.end_offset)
            work = Compaction(log, CompactionOrder(log.sealed_upto, 0, NEVER_MS))
        for _ in range(chance.randint(1, 4)):
            if work is not None and not work.step():
                work = None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
