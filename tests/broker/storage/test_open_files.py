"""Logs and state files that share a bounded number of descriptors."""

import os
import resource
import threading
from contextlib import contextmanager

import pytest
from support.log_files import IDENTITY, Writer, everything, open_log

from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.storage.errors import TooManyOpenFiles
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.open_files import OpenFiles
from portalmq.broker.storage.state import StateFile


def held_under(directory):
    """Return the number of descriptors of this process for files in `directory`."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sum(name.startswith(str(directory)) for name in names)


def logs_of(directory, count, open_files):
    return [Log.open(directory / str(n), identity=IDENTITY, open_files=open_files) for n in range(count)]


def test_a_bounded_number_of_many_logs_is_open_and_all_can_be_used(tmp_path):
    open_files = OpenFiles(20)
    logs = logs_of(tmp_path, 12, open_files)
    states = [StateFile(tmp_path / str(n), identity=IDENTITY, open_files=open_files) for n in range(12)]
    for turn in range(3):
        for log, state in zip(logs, states, strict=True):
            Writer(log).put(b"%d" % turn)
            assert len(everything(log)) == turn + 1
            state.save_highest_epoch(turn)
            assert held_under(tmp_path) <= 20 + 5
    assert [state.highest_epoch() for state in states] == [2] * 12
    for holder in (*logs, *states):
        holder.close()
    assert held_under(tmp_path) == 0


def test_the_log_used_last_stays_open(tmp_path):
    first, second, third = logs_of(tmp_path, 3, OpenFiles(10))
    Writer(second).put(b"1")
    Writer(first).put(b"1")
    Writer(third).put(b"1")
    assert held_under(tmp_path / "0") > 0
    assert held_under(tmp_path / "1") == 0
    assert held_under(tmp_path / "2") > 0


def test_readers_of_sealed_segments_count_when_they_open(tmp_path):
    open_files = OpenFiles(16)
    reads, *_ = logs = logs_of(tmp_path, 3, open_files)
    for n in range(4):
        Writer(reads).put(b"%d" % n)
        reads.roll()
    assert reads.seal(reads.end_offset) == 4
    for log in logs:
        Writer(log).put(b"last")
        assert log.read(log.end_offset - 1)
    assert 16 - 4 < held_under(tmp_path) <= 16
    assert len(everything(reads)) == 5
    assert held_under(tmp_path) <= 16
    assert held_under(tmp_path / "1") == 0, "it was used least recently"
    assert held_under(tmp_path / "2") > 0


def test_a_log_in_use_is_not_closed(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(b"1")
    with log._read():
        assert not log.try_park()
    with log._change():
        assert not log.try_park()
    assert log.try_park()
    assert len(everything(log)) == 1


def test_logs_that_close_for_each_other_do_not_wait_for_each_other(tmp_path):
    logs = logs_of(tmp_path, 2, OpenFiles(1))

    def write(log):
        for n in range(40):
            Writer(log).put(b"%d" % n)

    threads = [threading.Thread(target=write, args=(log,), daemon=True) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [log.end_offset for log in logs] == [40, 40]


def test_a_missing_descriptor_is_a_shortage_at_every_step(tmp_path):
    sent = []
    log = Log.open(tmp_path / "log", identity=IDENTITY)
    state = StateFile(tmp_path / "log", identity=IDENTITY)
    refused = 0
    with few_descriptors() as spare_upto:
        for spare in range(12):
            log.park()
            state.park()
            spare_upto(spare)
            try:
                sent.append(Writer(log).put(b"%d" % spare))
                log.roll()
                state.save(PartitionFold(applied=log.end_offset), log.end_offset)
            except TooManyOpenFiles:
                refused += 1
            spare_upto(40)
            assert everything(log) == sent
    assert 0 < refused < 12
    log.close()
    assert everything(open_log(tmp_path / "log")) == sent


@contextmanager
def few_descriptors():
    """Yield a function that leaves this process a given number of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    limit = highest + 60
    if hard != resource.RLIM_INFINITY and limit > hard:
        pytest.skip("this process may not have so many files open")
    taken = []

    def leave(spare):
        while taken:
            os.close(taken.pop())
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(min(spare, len(taken))):
                os.close(taken.pop())

    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield leave
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
