"""Operators and dashboards of a run: they ask about everything at any moment, pause the group, and add a partition."""

from __future__ import annotations

import contextlib
from base64 import urlsafe_b64encode
from collections.abc import Callable
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.shell.checker import TOPIC
from simulation.shell.limits import Limits
from simulation.shell.members import STREAM_GROUP
from simulation.shell.network import NeverGone, Unknown

from portalmq import wire
from portalmq.broker.messages.scheduled import ScheduleChange
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.sql_query import SqlOrder, run
from portalmq.errors import GroupNotFound, InvalidRequest, KeyOrder, PortalMQError, TopicExists

if TYPE_CHECKING:
    from simulation.shell.clients import Clients

BRIEF = "brief"
CONDITIONS: tuple[dict[str, dict[str, object]], ...] = (
    {"value": {"contains": "p1-"}, "delivery_count": {"gte": 2, "lt": 100}},
    {"key": {"eq": "a"}, "reason": {"ne": "x"}},
    {"value.a.b": {"exists": False}, "headers.h": {"exists": False}},
    {"value.number": {"gt": 1}},
    {"key": {"lte": "b"}, "value": {"exists": True}},
)
PAGE = 20
PAST_MS = 5_000


class Inquiries:
    """What is read is compared with what was sent. Of the rest a call must answer, or refuse by the contract."""

    def __init__(self, clients: Clients, group: str) -> None:
        self._clients = clients
        self._group = group
        self._world = clients.world
        self._loop = clients.loop

    def start(self) -> None:
        options, seed = self._world.options, self._world.seed
        if options.asks:
            self._clients.spawn(self._ask, Random(f"inquiries {seed}"))
            self._clients.spawn(self._pause, Random(f"pauses {seed}"))
        if (limits := self._world.checker.history.limits) is not None:
            random = Random(f"changes of limits {seed}")
            if random.random() < 0.5:  # the rule compares with the widest ones
                self._clients.spawn(self._limit, limits, random)
        if options.grows:
            self._clients.spawn(self._grow, Random(f"growth {seed}"))
        if options.briefs:
            self._clients.spawn(self._create_and_delete, Random(f"brief topics {seed}"))

    def _ask(self, random: Random) -> None:
        while not self._clients.stopping:
            self._loop.wait(random.random() * 0.2)
            what, ask, where = self._question(random)
            try:
                answer = self._clients.call(random, ask)
            except (Unknown, PortalMQError):
                continue
            self._world.reached[f"asked: {what}"] += 1
            if what.startswith("browse"):
                found = [(each.offset, each.record.value) for each in answer.messages]
                self._world.checker.history.read(where, found)

    def _question(self, random: Random) -> tuple[str, Callable[[Any], Any], tuple[str, int]]:
        world, group = self._world, self._group
        number = random.randrange(world.options.partitions)
        known = sorted(world.checker.history.place((TOPIC, number)).values)
        offset = random.choice(known) if known else 0
        at_ms = self._loop.now_ns // 1_000_000 - random.randint(0, PAST_MS)
        other = random.choice(list(world.machines))
        lists = random.random() < 0.5
        where = random.choice(CONDITIONS)
        matched, rate_per_s = random.choice((where, None)), random.choice((None, 5.0, 1_000.0))
        questions: dict[str, Callable[[Any], Any]] = {
            "life": lambda broker: broker.message_traces.trace(TOPIC, number, offset),
            "past": lambda broker: broker.group_past.describe(group, at_ms),
            "past messages": lambda broker: list(islice(broker.group_past.messages(group, TOPIC, at_ms), PAGE)),
            "scheduled": lambda broker: broker.scheduled_messages.page(TOPIC, limit=PAGE),
            "cancel": lambda broker: broker.scheduled_messages.cancel(TOPIC, number, offset),
            "dead letters": lambda broker: broker.dead_letters.page(group, TOPIC, limit=PAGE, after=None),
            "dead letters that match": lambda broker: broker.dead_letters.redrive(
                group, TOPIC, ids=None, where=where, rate_per_s=None, dry_run=True
            ),
            "redrive": lambda broker: broker.dead_letters.redrive(
                group, TOPIC, ids=None, where=matched, rate_per_s=rate_per_s, dry_run=False
            ),
            "drop": lambda broker: broker.dead_letters.drop(group, TOPIC, ids=None),
            "scheduled that match": lambda broker: broker.scheduled_messages.change(
                TOPIC, ScheduleChange(where=where, limit=PAGE, dry_run=True)
            ),
            "unfinished": lambda broker: list(islice(broker.unfinished.messages(group, TOPIC), PAGE)),
            "sizes": lambda broker: broker.queue_sizes.look(group, TOPIC),
            "digest": lambda broker: broker.digests.of_replica(
                TOPIC, number, other, offset=0, below=offset, lists=lists, files=not lists
            ),
            "browse a time": lambda broker: broker.browser.browse(TOPIC, number, at_ms=at_ms, limit=PAGE),
            "browse and wait": lambda broker: broker.browser.browse(
                TOPIC, number, offset=offset, limit=PAGE, wait_ms=300, peer=NeverGone()
            ),
            "groups": lambda broker: broker.list_groups(),
            "topic": lambda broker: broker.describe_topic(TOPIC),
            "cluster": lambda broker: (broker.overview.cluster(), broker.overview.metadata(None), broker.health()),
            "SQL": lambda broker: select(broker, random, offset),
            "offsets": lambda broker: broker.offsets.of(STREAM_GROUP),
            "no receipt": lambda broker: _settle_nothing(broker, random, group, world.checker.history.receipts()),
        }
        what = random.choice(sorted(questions))
        return what, questions[what], (TOPIC, number)

    def _pause(self, random: Random) -> None:
        """Pause the group and resume it. Between the two nothing new is delivered, unless a broker carries out a copy
        of an earlier resume: one without an answer, or one that the network made."""
        history, group = self._world.checker.history, self._group
        resumes = [0, 0]  # that have begun, and ended

        def resume(broker: Any) -> None:
            resumes[0] += 1
            history.paused_ns = None
            try:
                broker.group_admin.pause(group, paused=False)
            finally:
                resumes[1] += 1

        while not self._clients.stopping:
            self._loop.wait(random.random() * 3)
            try:
                before = resumes[1]
                self._clients.patiently(random, lambda broker: broker.group_admin.pause(group, paused=True))
                history.paused_ns = self._loop.now_ns if resumes == [before, before] else None
                self._world.reached["paused"] += 1
                self._loop.wait(random.random())
                self._clients.patiently(random, resume)
            except GroupNotFound:
                continue  # it was only in the control plane, which was lost

    def _limit(self, limits: Limits, random: Random) -> None:
        while not self._clients.stopping:
            self._loop.wait(random.random() * 3)
            if self._world.reached["adopted"]:
                return  # this could make the group anew, with other settings
            settings = limits.later(random)
            with contextlib.suppress(Unknown, PortalMQError):
                self._clients.call(random, lambda broker, settings=settings: broker.put_group(self._group, settings))
                self._world.reached["limits changed"] += 1

    def _grow(self, random: Random) -> None:
        """Add a partition, and send to it."""
        self._loop.wait(random.random() * 3)
        number = self._world.options.partitions
        wanted = wire.AlterTopic(partitions=number + 1)
        try:
            self._clients.patiently(random, lambda broker: broker.alter_topic(TOPIC, wanted))
        except KeyOrder:
            return  # the group reads the topic in the order of keys
        self._world.reached["grown"] += 1
        self._clients.produce_to(number, self._world.options.producers, random)

    def _create_and_delete(self, random: Random) -> None:
        clients = self._clients
        wanted = wire.CreateTopic(partitions=1, replication_factor=self._world.options.replication)
        while not clients.stopping:
            self._loop.wait(random.random())
            try:
                clients.patiently(random, lambda broker: broker.create_topic(BRIEF, wanted))
            except InvalidRequest:  # too few brokers are up
                continue
            except TopicExists:  # adopted without its settings
                pass
            self._loop.wait(random.random())
            clients.patiently(random, _delete)
            self._world.reached["deleted"] += 1


def select(broker: Any, random: Random, offset: int) -> None:
    """Query the files of a broker by SQL, as the process does that it starts for that."""
    columns = ("offset, value, content_type", "count(*), max(timestamp_ms)", "*", "topic, partition, key, headers")
    order = random.choice(("", " ORDER BY offset", " ORDER BY offset DESC"))
    where = random.choice(("", f"offset >= {offset}", f"topic = 't' AND partition = 0 AND offset <= {offset}",
                           f"offset = {offset} OR partition = 1", "timestamp_ms > 0", "key = 'a'"))  # fmt: skip
    query = random.choice(
        (
            f"SELECT {random.choice(columns)} FROM messages {where and 'WHERE ' + where}{order}",
            f"SELECT kind, count(*) FROM batches WHERE base_offset < {offset} GROUP BY kind",
            "SELECT name, body FROM group_records ORDER BY offset DESC",
            "DELETE FROM messages",
            "",
        )
    )
    asked = SqlOrder(query, random.choice((1, PAGE)), 1_000, broker.sql_queries._partitions())
    answer = run(asked)
    if answer.refused == "unreadable":
        return  # the disk is full, and a log at rest has no room for what SQLite shares between its readers
    if answer.refused != ("invalid" if query in ("", "DELETE FROM messages") else ""):
        raise AssertionError(f"{query!r}: {answer.refused} {answer.detail}")


def _settle_nothing(broker: Any, random: Random, group: str, receipts: list[str]) -> None:
    """Ack what is no receipt, but may have the beginning of one: it is refused."""
    text = random.choice(("", "x" * 63, "\xe9" * 64, "=" * 64, urlsafe_b64encode(random.randbytes(48)).decode()))
    if receipts and random.random() < 0.5:
        text = random.choice(receipts)[:60] + "____"
    verdicts = broker.settlement.settle(group, [text], SettleRequest("ack", None))
    if verdicts == [True]:
        raise AssertionError(f"{text!r} is taken for a receipt")


def _delete(broker: Any) -> None:
    try:
        broker.delete_topic(BRIEF)
    except PortalMQError as error:
        if error.code != "topic_not_found":  # an earlier try deleted it
            raise
