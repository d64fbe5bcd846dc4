"""Celery beat on schedules of the cluster: `beat_scheduler = "portalmq.kombu:Scheduler"`.

    beat_schedule entry --PUT--> schedule of the cluster --tick--> topic celery-beat --receive--> a beat
    task of the entry  <--------------- one commit: the tick acked, the task published --------------'

The cluster publishes each tick once (docs/SCHEDULES.md), and a beat turns it into a task by one commit: both or
neither. So any number of beats may run, and each tick becomes one task, with an id of its own. A beat that dies leaves
its tick to another one after LEASE_S. Ticks that no beat took within TICK_TTL_S are dropped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from celery import beat
from celery.exceptions import ImproperlyConfigured
from celery.schedules import crontab, schedule

from portalmq.consumer import Consumer
from portalmq.contract.schedules import EVERY_MS_MIN
from portalmq.errors import PortalMQError, ScheduleNotFound, StaleReceipt
from portalmq.kombu.session import ClusterSession

QUEUE = "celery-beat"
LEASE_S = 10.0
TICK_TTL_S = 600
POLL_S = 5.0
RETRY_S = 1.0


def times_of(name: str, wanted: Any, timezone: str) -> dict[str, Any]:
    """Return the times of an entry as arguments of Admin.create_schedule. Raises ImproperlyConfigured for those that a
    schedule of the cluster cannot have."""
    if isinstance(wanted, crontab):
        minute, hour, day, month, weekday = (
            str(getattr(wanted, f"_orig_{field}")).replace(" ", "")
            for field in ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        )
        if not day.startswith("*") and not weekday.startswith("*"):
            raise ImproperlyConfigured(
                f"beat entry {name!r} limits day_of_month and day_of_week: for cron either is enough, for Celery both"
                " are needed. Limit one of them, and check the other in the task"
            )
        return {"cron": f"{minute} {hour} {day} {month} {weekday}", "timezone": timezone}
    if type(wanted) is schedule:
        every = wanted.run_every
        if every < timedelta(milliseconds=EVERY_MS_MIN):
            raise ImproperlyConfigured(f"beat entry {name!r} runs each {every}: a second is the least")
        return {"every": every}
    raise ImproperlyConfigured(
        f"beat entry {name!r} has a {type(wanted).__name__}: only crontab and intervals are schedules of the cluster"
    )


class Recorder:
    """Takes what a channel publishes, for a commit, in place of a Producer."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def send(self, topic: str, value: bytes, **options: Any) -> Future[None]:
        output: dict[str, Any] = {"topic": topic, "value": value, "content_type": options["content_type"]}
        output["priority"] = options.get("priority") or 0
        if options.get("deliver_at") is not None:
            output["deliver_at_ms"] = round(options["deliver_at"] * 1_000)
        if options.get("ttl_s") is not None:
            output["ttl_ms"] = max(1, round(options["ttl_s"] * 1_000))
        self.outputs.append(output)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Scheduler(beat.Scheduler):
    """A beat that sends the tasks of ticks that the cluster published. It keeps no state of its own."""

    _consumer: Consumer | None = None
    _is_put = False

    def setup_schedule(self) -> None:
        super().setup_schedule()
        for name, entry in self.schedule.items():
            times_of(name, entry.schedule, self._timezone)  # a wrong entry is refused at the start

    @property
    def _timezone(self) -> str:
        return str(getattr(self.app.timezone, "key", None) or self.app.conf.timezone or "UTC")

    @property
    def _session(self) -> ClusterSession:
        found: ClusterSession = self.producer.channel._session
        return found

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send the task of one tick. Return the seconds until the next call: 0, since this call waits for a tick."""
        try:
            if not self._is_put:
                self._put_schedules()
            consumer = self._consumer or self._new_consumer()
            for message in consumer.poll(POLL_S, 1):
                self._send(consumer, message)
        except PortalMQError as error:
            beat.error("beat: %s", error)
            time.sleep(RETRY_S)
        return 0

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        super().close()

    # --- schedules of the cluster ------------------------------------------------------------------------------------

    def _put_schedules(self) -> None:
        """Have the cluster's schedules be those of the entries. The ones of removed entries are deleted."""
        session = self._session
        admin, topic = session.admin, session.names.topic(QUEUE)
        admin.create_topic(topic, config={"default_ttl_ms": TICK_TTL_S * 1_000})
        session.prepare_group(topic)
        wanted: set[str] = set()
        for name, entry in self.schedule.items():
            schedule_name = session.names.topic(f"{QUEUE}.{name}")
            wanted.add(schedule_name)
            times = times_of(name, entry.schedule, self._timezone)
            admin.create_schedule(schedule_name, topic, {"entry": name}, catch_up=False, **times)
        for known in admin.schedules():
            if known.topic == topic and known.name not in wanted:
                try:
                    admin.delete_schedule(known.name)
                except ScheduleNotFound:
                    continue  # another beat did
        self._is_put = True

    def _new_consumer(self) -> Consumer:
        session = self._session
        topic = session.names.topic(QUEUE)
        self._consumer = Consumer(
            topic,
            group=topic,
            manual_ack=True,
            prefetch=False,
            max_messages=1,
            visibility_timeout_s=LEASE_S,
            transport=session.new_transport(),
        )
        return self._consumer

    # --- ticks -------------------------------------------------------------------------------------------------------

    def _send(self, consumer: Consumer, message: Any) -> None:
        entry = self._entry_of(message.value)
        if entry is None:  # of a beat with other entries
            message.ack()
            return
        recorder, session = Recorder(), self._session
        real, session.producer = session.producer, recorder  # type: ignore[assignment]
        try:
            self.apply_async(entry, producer=self.producer, advance=False)
        except beat.SchedulingError as fault:
            beat.error("beat: the task of %r cannot be made: %s", entry.name, fault)
            message.nack(delay_s=RETRY_S)
            return
        finally:
            session.producer = real
        try:
            consumer.commit_with(message, recorder.outputs)
        except StaleReceipt:
            beat.info("beat: another beat has the tick of %r", entry.name)
            return
        beat.info("Scheduler: sent due task %s (%s)", entry.name, entry.task)

    def _entry_of(self, value: bytes) -> Any:
        try:
            told = json.loads(value)
        except ValueError:
            return None
        return self.schedule.get(told.get("entry")) if isinstance(told, Mapping) else None
