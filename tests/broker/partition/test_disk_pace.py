"""Which commits the event loop may wait for."""

from portalmq.broker.partition.disk_pace import FAST_S, PAUSE, SLOW_S, SMALL_BYTES, SMALL_MESSAGES, DiskPace


def paced(*seconds: float, on_loop: bool = False) -> DiskPace:
    pace = DiskPace()
    for each in seconds:
        pace.committed(each, 0.0, on_loop=on_loop)
    return pace


def test_only_small_transactions_are_for_the_event_loop():
    pace = DiskPace()
    assert pace.is_small(SMALL_BYTES, SMALL_MESSAGES)
    assert not pace.is_small(SMALL_BYTES + 1, 1)
    assert not pace.is_small(0, SMALL_MESSAGES + 1)


def test_a_disk_counts_as_slow_until_commits_were_measured():
    assert not DiskPace().is_fast(0.0)
    assert not paced(FAST_S / 4).is_fast(0.0)
    assert paced(*[FAST_S / 4] * 20).is_fast(0.0)


def test_a_slow_disk_is_never_tried_on_the_event_loop_however_long_ago():
    pace = paced(*[2 * FAST_S] * 100)
    assert not pace.is_fast(1_000_000.0)


def test_one_long_commit_does_not_hide_that_the_disk_is_fast():
    pace = paced(*[FAST_S / 4] * 20, 10.0, *[FAST_S / 4] * 8)
    assert pace.is_fast(0.0)


def test_after_a_long_commit_the_event_loop_waits_for_none_for_much_longer():
    pace = paced(*[FAST_S / 4] * 20)
    pace.committed(1.0, 100.0, on_loop=True)
    for _ in range(50):
        pace.committed(FAST_S / 4, 100.0, on_loop=False)
    assert not pace.is_fast(100.0 + PAUSE - 0.001)
    assert pace.is_fast(100.0 + PAUSE)


def test_a_disk_that_stalls_now_and_then_blocks_the_event_loop_for_little_of_the_time():
    pace, now_s, slow_s = DiskPace(), 0.0, 0.0
    for number in range(20_000):
        on_loop, seconds = pace.is_fast(now_s), 4 * SLOW_S if number % 20 == 0 else FAST_S / 4
        now_s += seconds
        pace.committed(seconds, now_s, on_loop=on_loop)
        slow_s += seconds if on_loop and seconds > SLOW_S else 0.0
    assert 0 < slow_s <= now_s / PAUSE
