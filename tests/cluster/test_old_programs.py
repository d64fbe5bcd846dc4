"""Programs written only from the older queues' texts, against three brokers whose leader is killed.

Each shows what its text promises: no acknowledged message is lost; and the order and the one offset of Portal MQ, the
confirmation of MiniQ, the locks of WonderQ. PORTALMQ_OLD_MESSAGES=10000 makes the tests long.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from support.cluster import Cluster, wait_until

from portalmq import TopicNotFound

MESSAGES = int(os.environ.get("PORTALMQ_OLD_MESSAGES", "300"))
PROGRAMS = Path(__file__).parents[1] / "support" / "old_programs"
LEASE_S = 3.0
# Taken by the consumers that survive, before the leader is killed.
TAKEN = 20
# Long enough for a machine that does 20 messages a second.
WITHIN_S = 60.0 + MESSAGES / 20

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180 + MESSAGES // 5)]


class Program:
    """A program as a process. Its output goes to a file, so that it never blocks on a pipe."""

    def __init__(self, directory: Path, name: str, urls: list[str], script: str, *arguments: str) -> None:
        self._said, self._complained = directory / f"{name}.out", directory / f"{name}.err"
        with self._said.open("wb") as out, self._complained.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAMS / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=os.environ | {"PORTALMQ_URL": ",".join(urls)},
            )

    def lines(self) -> list[str]:
        """The complete lines of the output: the last one may be incomplete."""
        return self._said.read_text().rpartition("\n")[0].splitlines()

    def words(self, first: str) -> list[list[str]]:
        return [words[1:] for line in self.lines() if (words := line.split(" "))[0] == first]

    def go_on(self) -> None:
        """Let a sender that pauses half way continue up to the last message."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Let a sender send the last message too."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def died(self) -> None:
        assert self.process.wait(WITHIN_S) == 9, self._complained.read_text()

    def ended(self) -> None:
        assert self.process.wait(WITHIN_S) == 0, self._complained.read_text()

    def check_runs(self) -> None:
        assert self.process.poll() is None, self._complained.read_text()


@contextmanager
def killed_at_the_end(*programs: Program) -> Iterator[None]:
    try:
        yield
    finally:
        for program in programs:
            program.finish()
            program.process.kill()
            program.process.wait()


def fresh(cluster: Cluster, topic: str, partitions: int) -> int:
    """Create a topic of that name; return its leader."""
    with cluster.admin() as admin:
        with suppress(TopicNotFound):
            admin.delete_topic(topic)
        admin.create_topic(topic, partitions=partitions)
        admin.create_group("default", visibility_timeout_ms=round(LEASE_S * 1000), max_deliveries=100)
    cluster.wait_in_sync(topic)

    def has_the_lease(broker_id: int) -> bool:
        told = cluster.ask("/v1/groups/default", broker_id)
        return told is not None and told["config"]["visibility_timeout_ms"] == round(LEASE_S * 1000)

    wait_until(lambda: all(map(has_the_lease, cluster.running)), "all brokers know of the lease")
    return cluster.wait_for_leader(topic)


def kill_in_the_middle(
    cluster: Cluster, leader: int, producers: list[Program], taken: Callable[[], int]
) -> tuple[list[str], tuple[float, float]]:
    """Kill the leader while messages are sent and taken: the senders pause until some are `taken`, and keep their last
    messages until the leader is dead. Return the messages acknowledged in the end, which are all, and the interval in
    which the leader died."""

    def acked() -> list[str]:
        return [line for producer in producers for line in producer.lines()]

    wait_until(lambda: len(acked()) >= MESSAGES // 3, "a third is acknowledged", WITHIN_S)
    wait_until(lambda: taken() >= TAKEN, "messages are taken", WITHIN_S)
    for producer in producers:
        producer.go_on()
    wait_until(lambda: len(acked()) > MESSAGES // 2, "a half is acknowledged", WITHIN_S)
    alive_at = time.monotonic()
    cluster.kill(leader)
    dead_at = time.monotonic()
    for producer in producers:
        producer.finish()
    for producer in producers:
        producer.ended()
    assert len(acked()) == len(producers) * (MESSAGES // len(producers))
    return [line.split(" ")[1] if line.startswith("sent ") else line for line in acked()], (alive_at, dead_at)


def count(consumers: list[Program]) -> int:
    """The number of messages that the consumers received."""
    return sum(len(each.words("got")) for each in consumers)


def test_portal_mq(cluster: Cluster, tmp_path: Path) -> None:
    topic = "temp_1"
    leader = fresh(cluster, topic, 1)
    urls = cluster.urls
    joined = ",".join(urls)
    producers = [
        Program(tmp_path, name, urls, "portal_mq.py", joined, "produce", topic, name, str(MESSAGES // 2))
        for name in ("sensor-a", "sensor-b")
    ]
    consumers = [
        Program(tmp_path, name, urls, "portal_mq.py", joined, "consume", topic, name)
        for name in ("controller-a", "controller-b")
    ]
    with killed_at_the_end(*producers, *consumers):
        acked, _ = kill_in_the_middle(cluster, leader, producers, lambda: count(consumers))

        def received() -> dict[int, str]:
            return {int(offset): message for each in consumers for offset, message in each.words("got")}

        wait_until(lambda: set(acked) <= set(received().values()), "all that was acknowledged is received", WITHIN_S)
        for consumer in consumers:
            consumer.check_runs()

        def settled() -> bool:
            return all(len(each.words("consumed")) == len(each.words("got")) for each in consumers)

        wait_until(settled, "every consume is answered", WITHIN_S)
    won = Counter(consumed(consumers))
    for consumer in consumers:
        shown = [(int(offset), message) for offset, message in consumer.words("got")]
        assert shown == sorted(shown), "the one offset never goes back"
        assert all(received()[offset] == message for offset, message in shown), "one message at an offset"
    assert set(won.values()) == {1}, "one consumer consumes a message"
    # A consume whose answer was lost with the leader is repeated, and may find the message consumed.
    assert len(received()) - len(won) <= 2 * len(consumers)
    in_order = [message for _, message in sorted(received().items())]
    for name in ("sensor-a", "sensor-b"):
        firsts = list(dict.fromkeys(message for message in in_order if message.startswith(name)))
        assert firsts == [f"{name}-{number}" for number in range(MESSAGES // 2)], "in the order of their sending"


def consumed(consumers: list[Program]) -> list[int]:
    """The offsets that the broker confirmed to a consumer as consumed."""
    return [int(offset) for each in consumers for offset, status in each.words("consumed") if status == "200"]


def test_miniq_over_http(cluster: Cluster, tmp_path: Path) -> None:
    leader = fresh(cluster, "default", 1)
    urls = cluster.urls

    def program(name: str, *arguments: str) -> Program:
        return Program(tmp_path, name, urls, "miniq_http.py", ",".join(urls), "strong-secret", *arguments)

    posters = [program(name, "post", name, str(MESSAGES // 2)) for name in ("a", "b")]
    dying = program("dying", "get", "10")
    readers: list[Program] = []
    with killed_at_the_end(*posters, dying), ExitStack() as stack:
        dying.died()  # it dies first: the others could leave it too few messages
        readers += [program(f"reader-{number}", "get") for number in range(2)]
        stack.enter_context(killed_at_the_end(*readers))
        acked, killed = kill_in_the_middle(cluster, leader, posters, lambda: count(readers))

        def confirmed() -> set[str]:
            return {message for each in (*readers, dying) for _, message, _ in each.words("confirmed")}

        wait_until(lambda: set(acked) <= confirmed(), "all that was taken is confirmed", WITHIN_S)
        for reader in readers:
            reader.check_runs()
    confirmed_at = {key: float(at) for each in (*readers, dying) for key, _, at in each.words("confirmed")}
    lost_by_the_dead = dying.words("got")[-1]
    assert lost_by_the_dead[1] in confirmed(), "a message held by a dead reader is offered again"
    for each in (*readers, dying):
        for key, message, asked_at, _ in each.words("got"):
            assert float(asked_at) <= confirmed_at.get(key, float("inf")), f"{message} is offered though confirmed"
    partition_of = {key: 0 for each in (*readers, dying) for key, *_ in each.words("got")}
    check_holders_in_turn([*readers, dying], partition_of, posters, killed)


def test_wonderq(cluster: Cluster, tmp_path: Path) -> None:
    leader = fresh(cluster, "default", 3)
    urls = cluster.urls

    def program(name: str, *arguments: str) -> Program:
        return Program(tmp_path, name, urls, "wonderq.py", ",".join(urls), *arguments)

    publishers = [program(name, "publish", name, str(MESSAGES // 2)) for name in ("a", "b")]
    dying = program("dying", "consume", "3", "5", "12")
    consumers: list[Program] = []
    with killed_at_the_end(*publishers, dying), ExitStack() as stack:
        dying.died()  # it dies first: the others could leave it too few messages
        consumers += [program(f"consumer-{cid}", "consume", str(cid), "5") for cid in (1, 2)]
        stack.enter_context(killed_at_the_end(*consumers))
        acked, killed = kill_in_the_middle(cluster, leader, publishers, lambda: count(consumers))

        def deleted() -> set[str]:
            everyone = (*consumers, dying)
            message_of = {number: message for each in everyone for number, message, _, _ in each.words("got")}
            return {
                message_of[number] for each in everyone for number, truth, _ in each.words("deleted") if truth == "true"
            }

        wait_until(lambda: set(acked) <= deleted(), "all that got an id is deleted", WITHIN_S)
        for consumer in consumers:
            consumer.check_runs()
    deleted_at: dict[str, float] = {}
    for each in (*consumers, dying):
        for number, truth, at in each.words("deleted"):
            if truth == "true":
                assert number not in deleted_at, "a message is deleted by its holder"
                deleted_at[number] = float(at)
    for each in (*consumers, dying):
        for number, _, asked_at, _ in each.words("got"):
            assert float(asked_at) <= deleted_at.get(number, float("inf")), "a deleted message is not delivered again"
    partition_of = {number: int(number) >> 40 for each in (*consumers, dying) for number, *_ in each.words("got")}
    check_holders_in_turn([*consumers, dying], partition_of, publishers, killed)
    assert set(partition_of.values()) == {0, 1, 2}, "ids of all partitions"


def check_holders_in_turn(
    consumers: list[Program], partition_of: dict[str, int], senders: list[Program], killed: tuple[float, float]
) -> None:
    """Assert that a consumer holds a message alone until its lease ends, also through the death of a leader.

    A lease granted in the leader's last moment is exempt: an answer does not wait for the replication of its lease, so
    the lease may be lost with the leader. It is certainly replicated when a later message in the log, sent after the
    lease was shown, is acknowledged.

    A lease begins after its request and before its answer. So two leases certainly overlap when the second was shown
    less than a lease after the request of the first.
    """
    alive_at, dead_at = killed
    kept_before: dict[int, float] = defaultdict(float)  # by partition: leases shown before then are replicated
    for sender in senders:
        for _, partition, began_at, answered_at in sender.words("sent"):
            if float(answered_at) < alive_at:
                kept_before[int(partition)] = max(kept_before[int(partition)], float(began_at))
    shown: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for holder, consumer in enumerate(consumers):
        for number, _, asked_at, shown_at in consumer.words("got"):
            shown[number].append((float(asked_at), float(shown_at), holder))
    for number, turns in shown.items():
        turns.sort()
        for (asked_at, shown_at, one), (_, again_at, other) in pairwise(turns):
            if asked_at < dead_at and again_at > alive_at and shown_at >= kept_before[partition_of[number]]:
                continue
            assert again_at - asked_at >= LEASE_S, f"{number} was shown to {one} and {other} at once: {turns}"


def test_the_design_notes(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    leader = fresh(cluster, topic, 3)
    urls = cluster.urls

    def program(name: str, *arguments: str) -> Program:
        return Program(tmp_path, name, urls, "design_notes.py", *arguments)

    publishers = [program(name, "publish", topic, name, str(MESSAGES // 2)) for name in ("a", "b")]
    dying = program("dying", "subscribe", topic, "group-1", "10")
    other_group = program("other", "subscribe", topic, "group-2")
    subscribers: list[Program] = []
    with killed_at_the_end(*publishers, dying, other_group), ExitStack() as stack:
        dying.died()  # it dies first: the others could leave it too few messages
        subscribers += [program(f"subscriber-{number}", "subscribe", topic, "group-1") for number in range(2)]
        stack.enter_context(killed_at_the_end(*subscribers))
        acked, _ = kill_in_the_middle(cluster, leader, publishers, lambda: sum(len(one.lines()) for one in subscribers))

        def processed() -> list[str]:
            return [line for each in (*subscribers, dying) for line in each.lines()]

        wait_until(lambda: set(acked) <= set(processed()), "group-1 has processed everything", WITHIN_S)
        wait_until(lambda: set(acked) <= set(other_group.lines()), "and so has group-2", WITHIN_S)
        for subscriber in (*subscribers, other_group):
            subscriber.check_runs()
    assert set(processed()) == set(acked), "publishMessage sends a message once, repeats included"
    assert all(re.fullmatch(r"[ab]-\d+", line) for line in processed())
