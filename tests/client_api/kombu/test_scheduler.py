"""Beat entries as schedules of the cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("celery", reason="the extra `celery` is not installed")

from celery.exceptions import ImproperlyConfigured
from celery.schedules import crontab, schedule

from portalmq.broker.schedules.timetable import cron_line
from portalmq.kombu.scheduler import Recorder, times_of


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (crontab(), "* * * * *"),
        (crontab(minute="*/15"), "*/15 * * * *"),
        (crontab(minute=0, hour=4), "0 4 * * *"),
        (crontab(minute="0", hour="*/3,8-17"), "0 */3,8-17 * * *"),
        (crontab(minute=0, hour=0, day_of_week="mon-fri"), "0 0 * * mon-fri"),
        (crontab(minute=0, hour=0, day_of_week="sun"), "0 0 * * sun"),
        (crontab(minute=0, hour=0, day_of_month="1,15"), "0 0 1,15 * *"),
        (crontab(minute=0, hour=0, day_of_month="1-7", month_of_year="*/3"), "0 0 1-7 */3 *"),
        (crontab(minute="0, 30", hour=6), "0,30 6 * * *"),
    ],
)
def test_a_crontab_is_a_cron_line_in_celerys_zone(wanted: crontab, line: str) -> None:
    assert times_of("e", wanted, "Europe/Berlin") == {"cron": line, "timezone": "Europe/Berlin"}
    cron_line(line, "Europe/Berlin")


@pytest.mark.parametrize("seconds", [1, 1.5, 30, 86_400])
def test_an_interval_is_one(seconds: float) -> None:
    every = timedelta(seconds=seconds)
    assert times_of("e", schedule(every), "UTC") == {"every": every}


@pytest.mark.parametrize(
    "wanted",
    [
        schedule(timedelta(milliseconds=999)),
        schedule(timedelta(0)),
        crontab(day_of_month="1", day_of_week="mon"),
        type("own", (schedule,), {})(timedelta(seconds=5)),
        object(),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_by_its_entry(wanted: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="'nightly'"):
        times_of("nightly", wanted, "UTC")


def test_what_a_channel_publishes_is_recorded_for_the_commit() -> None:
    recorder = Recorder()
    sent = recorder.send("t", b"v", content_type="application/json", deliver_at=1.5, ttl_s=2, priority=3)
    assert sent.done()
    recorder.send("u", b"w", content_type="text/plain", deliver_at=None, ttl_s=None, priority=0)
    assert recorder.outputs == [
        {"topic": "t", "value": b"v", "content_type": "application/json", "priority": 3}
        | {"deliver_at_ms": 1_500, "ttl_ms": 2_000},
        {"topic": "u", "value": b"w", "content_type": "text/plain", "priority": 0},
    ]
