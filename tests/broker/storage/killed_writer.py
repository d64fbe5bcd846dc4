"""Append, roll, seal, truncate and drop until killed, and print the safe offsets after each. Run by test_recovery."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.log_files import Writer, open_log

from portalmq.broker.storage.batch import BatchKind, Record


def main(directory: Path, seed: int) -> None:
    chance = random.Random(seed)
    log = open_log(directory, segment_bytes=60_000)

    def say(floor: int) -> None:
        os.write(1, b"%d %d %d\n" % (log.log_start_offset, floor, log.end_offset))

    say(log.end_offset)
    while True:
        writer = Writer(log)
        action = chance.random()
        if action < 0.8:
            batches = []
            for _ in range(chance.randint(1, 4)):
                first = writer.offset
                batches.append(
                    writer.messages_batch(
                        Record(b"%d/" % (first + n) + b"x" * chance.randint(0, 300), "text/plain", b"k", {"a": "b"})
                        for n in range(chance.choice([1, 3, 40]))
                    )
                )
                batches.append(writer.control_batch(BatchKind.ACK, b"body", "g"))
            log.append(batches)
        elif action < 0.85:
            log.roll()
        elif action < 0.9:
            log.seal(log.end_offset - chance.randint(0, 200))
        elif action < 0.94:
            borders = [batch.base_offset for batch in log.read(max(log.log_start_offset, log.end_offset - 300))]
            if borders:
                to_offset = max(log.log_start_offset, chance.choice(borders))
                if any(border == to_offset for border in borders):
                    say(to_offset)
                    log.truncate(to_offset)
        elif action < 0.97:
            log.drop_segments_below(max(0, log.end_offset - 500))
        elif action < 0.985:
            log.checkpoint()
        else:
            log.park()
        say(log.end_offset)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
