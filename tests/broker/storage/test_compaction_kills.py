"""kill -9 of a process that compacts: the last message of every key survives, and messages keep their offsets."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.log_files import everything, open_log

from portalmq.broker.storage.batch import HOLE
from portalmq.broker.storage.compaction import Compaction, CompactionOrder

CHILD = Path(__file__).with_name("killed_compactor.py")
KILLS = 10
# As in killed_compactor.py.
KEYS = 50
NEVER_MS = 1 << 50


def acknowledged_in(said: bytes) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]


def run_until_killed(directory: Path, seed: int, messages: int, after_s: float) -> int:
    """Run the compactor, kill it `after_s` after so many more messages, and return its acknowledged end."""
    with subprocess.Popen(
        [sys.executable, str(CHILD), str(directory), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        said = b""
        while not (ends := acknowledged_in(said)) or ends[-1] - ends[0] < messages:
            chunk = child.stdout.read1()
            assert chunk, child.stderr.read() if child.stderr else ""
            said += chunk
        time.sleep(after_s)  # the kill hits any step
        child.send_signal(signal.SIGKILL)
        said += child.stdout.read()
        child.wait()
    return max(acknowledged_in(said))


def check(directory: Path, acknowledged: int) -> int:
    """Return the number of removed messages."""
    log = open_log(directory, segment_bytes=60_000)
    end = log.end_offset
    assert end >= acknowledged
    there = {}
    for batch in everything(log):
        for offset, record in enumerate(batch.records, batch.base_offset):
            if record is not HOLE:
                assert record.value.split(b"/")[0] == b"%d" % offset
                assert record.key == b"%d" % (offset % KEYS)
                there[offset] = record
    assert set(range(max(0, end - KEYS), end)) <= there.keys(), "the last message of each key"
    assert log.messages_before(end) == len(there)
    gone = end - len(there)
    log.close()
    return gone


def test_compacted_messages_survive_kill_9(tmp_path):
    directory, chance, gone = tmp_path / "log", random.Random(20_261_121), 0
    for kill in range(KILLS):
        acknowledged = run_until_killed(directory, kill, chance.randint(150, 1_500), chance.uniform(0.0, 0.02))
        now = check(directory, acknowledged)
        assert now >= gone, "removed messages do not return"
        gone = now
    log = open_log(directory, segment_bytes=60_000)
    log.roll()
    log.seal(log.end_offset)
    work = Compaction(log, CompactionOrder(log.sealed_upto, 0, NEVER_MS))
    while work.step():
        pass
    log.close()
    log = open_log(directory)
    assert check(directory, log.end_offset) == log.end_offset - KEYS > 1_000
