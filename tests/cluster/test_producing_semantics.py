"""The guarantees for producers, on real brokers: through a leader's death, and by way of any broker."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException

import msgspec
import pytest
from support.cluster import Cluster, wait_until

from portalmq import wire
from portalmq.network.http_answer import HttpAnswer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FAR_MS = 3_600_000
# The interval between two scheduled messages: longer than the time between their sends.
STEP_MS = 60_000
ATTEMPTS_WITHIN_S = 60
# The batch sizes into which two attempts cut the same rows.
CUTS = (50, 77)
# How often a leader is killed or paused while instances take over a producer's name.
FENCE_FAULTS = int(os.environ.get("PORTALMQ_FENCE_FAULTS", "2"))


def post(cluster: Cluster, broker_id: int, path: str, body: bytes, headers: dict[str, str] | None = None) -> HttpAnswer:
    headers = {"Content-Type": "text/plain", **(headers or {})}
    return cluster.brokers[broker_id].request("POST", path, body, headers, timeout_s=60)


def patiently(ask, accepted: tuple[int, ...] = (200,)) -> HttpAnswer:
    """Repeat while the answer is retryable, as a client does."""
    deadline = time.monotonic() + ATTEMPTS_WITHIN_S
    while True:
        try:
            answer = ask()
        except (OSError, HTTPException):
            answer = None
        if answer is not None and answer.status in accepted:
            return answer
        told = answer.json() if answer is not None else {"retryable": True}
        assert told["retryable"], told
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def values(cluster: Cluster, topic: str) -> list[str]:
    answer = patiently(lambda: cluster.brokers[cluster.running[0]].request("GET", f"/v1/topics/{topic}/messages"))
    return [message["value"] for message in answer.json()["messages"]]


def stamped(
    cluster: Cluster, broker_id: int, topic: str, partition: int, identity, sequence: int, value: str
) -> HttpAnswer:
    batch = {"messages": [{"value": value.encode()}], "producer": {**identity, "sequence": sequence}}
    path = f"/v1/topics/{topic}/messages?partition={partition}"
    return post(cluster, broker_id, path, msgspec.msgpack.encode(batch), {"Content-Type": wire.BATCH_MSGPACK})


def named(cluster: Cluster, broker_id: int, name: str) -> dict[str, int]:
    body = msgspec.json.encode({"name": name})
    return patiently(lambda: post(cluster, broker_id, "/v1/producers", body, {"Content-Type": wire.JSON})).json()


# --- Idempotency-Key -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", ["all", "none"])
def test_a_key_gets_its_first_answer_from_another_broker_and_after_the_leader_has_died(
    cluster: Cluster, topic: str, acks: str
):
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    path = f"/v1/topics/{topic}/messages"
    headers = {"Idempotency-Key": f"order-{topic}", "PortalMQ-Delay-Ms": "1"}
    post(cluster, 1, f"{path}?acks={acks}", b"mine", headers)
    first = patiently(lambda: post(cluster, 2, path, b"mine", headers)).json()
    assert patiently(lambda: post(cluster, 3, path, b"mine", headers)).json() == first
    other = patiently(lambda: post(cluster, 2, path, b"another", headers), (422,))
    assert other.json()["code"] == "idempotency_key_reused"
    leader = cluster.wait_for_leader(topic, first["partition"])
    cluster.kill(leader)
    survivor, bystander = cluster.running
    assert patiently(lambda: post(cluster, survivor, path, b"mine", headers)).json() == first
    for elsewhere in ({"PortalMQ-Key": "k"}, {"PortalMQ-Delay-Ms": "2"}):
        reused = patiently(
            lambda extra=elsewhere: post(cluster, bystander, path, b"mine", {**headers, **extra}), (422,)
        )
        assert reused.json()["outcome"] == "not_applied"
    assert values(cluster, topic) == ["mine"]


def test_a_key_that_many_send_at_once_to_all_brokers_while_the_leader_dies_is_one_message(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    path = f"/v1/topics/{topic}/messages"
    keys = [f"{topic}-{number}" for number in range(60)]

    def send(number: int) -> tuple[str, str]:
        key = keys[number % len(keys)]
        tries = iter(range(number, number + 10_000))

        def one_of_them() -> HttpAnswer:
            running = cluster.running
            return post(cluster, running[next(tries) % len(running)], path, key.encode(), {"Idempotency-Key": key})

        return key, patiently(one_of_them).json()["id"]

    with ThreadPoolExecutor(8) as pool:
        sending = [pool.submit(send, number) for number in range(4 * len(keys))]
        wait_until(lambda: sum(each.done() for each in sending) > 40, "the first answers")
        cluster.kill(cluster.wait_for_leader(topic, 0))
        answers = {each.result(120) for each in sending}
    assert len(answers) == len(keys), "each key has one answer"
    assert sorted(values(cluster, topic)) == sorted(keys)


# --- named producers -------------------------------------------------------------------------------------------------


def test_a_zombie_is_fenced_on_every_partition_and_by_every_later_leader(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    zombie = named(cluster, 1, topic)
    patiently(lambda: stamped(cluster, 1, topic, 0, zombie, 0, "before"))
    heir = named(cluster, 2, topic)
    assert (heir["id"], heir["epoch"]) == (zombie["id"], zombie["epoch"] + 1)
    for partition in range(3):
        for broker_id in cluster.running:
            late = partial(stamped, cluster, broker_id, topic, partition, zombie, 1 - min(partition, 1), "late")
            assert patiently(late, (409,)).json()["code"] == "fenced"
    killed = cluster.wait_for_leader(topic, 1)
    cluster.kill(killed)
    cluster.wait_for_leader(topic, 1, other_than=killed)
    refused = patiently(lambda: stamped(cluster, cluster.running[0], topic, 1, zombie, 0, "late"), (409,))
    assert refused.json()["code"] == "fenced"
    patiently(lambda: stamped(cluster, cluster.running[0], topic, 1, heir, 0, "after"))
    assert sorted(values(cluster, topic)) == ["after", "before"]


def test_a_returning_broker_knows_the_fencings_of_its_absence(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    zombie = named(cluster, 1, topic)
    leader = cluster.wait_for_leader(topic)
    cluster.kill(leader)
    cluster.wait_for_leader(topic, other_than=leader)
    named(cluster, cluster.running[0], topic)
    cluster.start(leader)
    cluster.wait_in_sync(topic)
    others = [broker_id for broker_id in cluster.running if broker_id != leader]
    for other in others:
        cluster.kill(other)
        if len(cluster.running) > 1:
            cluster.wait_for_leader(topic, other_than=other)
            cluster.start(other)
            cluster.wait_in_sync(topic)
        if cluster.leader(topic) == leader:
            break
    refused = patiently(lambda: stamped(cluster, leader, topic, 0, zombie, 0, "late"), (409,))
    assert refused.json()["code"] == "fenced"
    assert values(cluster, topic) == []


def test_a_fencing_waits_for_a_paused_broker_which_accepts_no_fenced_batch(cluster: Cluster, topic: str):
    """The paused broker still considers itself the leader when it continues; the zombie's batch is in its socket."""
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    zombie = named(cluster, 1, topic)
    leader = cluster.wait_for_leader(topic)
    cluster.pause(leader)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(stamped, cluster, leader, topic, 0, zombie, 0, "late")
        heir = named(cluster, cluster.running[0], topic)
        cluster.resume(leader)
        answer = late.result(90)
    assert answer.status in {409, 421, 503}, answer.body
    refused = patiently(lambda: stamped(cluster, leader, topic, 0, zombie, 0, "late"), (409,))
    assert refused.json()["code"] == "fenced"
    patiently(lambda: stamped(cluster, leader, topic, 0, heir, 0, "after"))
    assert values(cluster, topic) == ["after"]


class Succession:
    """One name that new instances take over repeatedly, while old instances continue to write: an instance that begins
    a request after its successor was answered must not be answered 200."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster = cluster
        self.topic = topic
        self.ends = threading.Event()
        self.answered: list[tuple[dict[str, int], float]] = []
        self.outcomes: Counter[int] = Counter()
        self.late: list[tuple[dict[str, int], float]] = []

    def take_over(self) -> None:
        chance = random.Random(0)
        body = msgspec.json.encode({"name": self.topic})
        while not self.ends.wait(0.05):
            broker_id = chance.choice(list(self.cluster.brokers))
            with suppress(OSError, HTTPException):
                answer = post(self.cluster, broker_id, "/v1/producers", body, {"Content-Type": wire.JSON})
                if answer.status == 200:
                    self.answered.append((answer.json(), time.monotonic()))

    def write(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.ends.is_set():
            if not self.answered:
                time.sleep(0.01)
                continue
            identity, _ = chance.choice(self.answered[-4:])
            broker_id = chance.choice(list(self.cluster.brokers))
            began = time.monotonic()
            with suppress(OSError, HTTPException):
                value = f"{identity['epoch']}"
                answer = stamped(self.cluster, broker_id, self.topic, chance.randrange(3), identity, 0, value)
                self.outcomes[answer.status] += 1
                succeeded = [at for other, at in list(self.answered) if other["epoch"] > identity["epoch"]]
                if answer.status == 200 and min(succeeded, default=began) < began:
                    self.late.append((identity, began))


def test_no_instance_is_answered_after_its_successor_through_kills_and_pauses(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    succession = Succession(cluster, topic)
    threads = [threading.Thread(target=succession.take_over)]
    threads += [threading.Thread(target=succession.write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(FENCE_FAULTS):
            before = len(succession.answered)
            wait_until(lambda seen=before: len(succession.answered) > seen + 5, "an instance takes over the name", 60)
            leader = cluster.wait_for_leader(topic, number % 3)
            if number % 2:
                cluster.pause(leader)
                cluster.wait_for_leader(topic, number % 3, other_than=leader)
                cluster.resume(leader)
            else:
                cluster.kill(leader)
                cluster.wait_for_leader(topic, number % 3, other_than=leader)
                cluster.start(leader)
            cluster.wait_in_sync(topic)
    finally:
        succession.ends.set()
        for thread in threads:
            thread.join(30)
    print(f"{len(succession.answered)} take-overs, answers {dict(succession.outcomes)}")
    assert succession.late == []
    assert succession.outcomes[200] > 0
    assert succession.outcomes[409] > 0


# --- scheduled messages ----------------------------------------------------------------------------------------------


def scheduled(cluster: Cluster, broker_id: int, topic: str) -> list[str]:
    shown: list[str] = []
    after = ""
    while True:
        path = f"/v1/topics/{topic}/scheduled?limit=4{after}"
        page = patiently(lambda path=path: cluster.brokers[broker_id].request("GET", path)).json()
        shown += [message["value"] for message in page["messages"]]
        if "next" not in page:
            return shown
        after = f"&after={page['next']}"


def test_what_is_scheduled_is_listed_and_taken_back_by_any_broker_and_after_the_leader_has_died(
    cluster: Cluster, topic: str
):
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    ids = {}
    for number in range(9):
        path = f"/v1/topics/{topic}/messages?partition={number % 3}"
        headers = {"PortalMQ-Delay-Ms": str(FAR_MS + STEP_MS * (9 - number))}
        ids[str(number)] = patiently(
            lambda p=path, h=headers, n=number: post(cluster, 1, p, str(n).encode(), h)
        ).json()["id"]
    expected = [str(number) for number in reversed(range(9))]
    for broker_id in cluster.running:
        assert scheduled(cluster, broker_id, topic) == expected

    def take_back(broker_id: int, number: str) -> int:
        path = f"/v1/topics/{topic}/scheduled/{ids[number]}"
        return patiently(lambda: cluster.brokers[broker_id].request("DELETE", path), (204, 404)).status

    assert [take_back(broker_id, str(broker_id)) for broker_id in cluster.running] == [204, 204, 204]
    killed = cluster.wait_for_leader(topic, 0)
    cluster.kill(killed)
    expected = [number for number in expected if number not in {"1", "2", "3"}]
    for broker_id in cluster.running:
        assert scheduled(cluster, broker_id, topic) == expected
    assert take_back(cluster.running[0], "1") == 404
    assert take_back(cluster.running[0], "0") == 204
    assert scheduled(cluster, cluster.running[1], topic) == [number for number in expected if number != "0"]


# --- a topic that is full --------------------------------------------------------------------------------------------


def test_a_full_topic_answers_429_by_way_of_every_broker(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic, config={"max_backlog_messages": 3})
    cluster.wait_in_sync(topic)
    path = f"/v1/topics/{topic}/messages"
    patiently(lambda: post(cluster, 1, path, b"0"))
    received = msgspec.json.encode({"topics": [topic], "wait_ms": 0})
    patiently(lambda: post(cluster, 1, f"/v1/groups/{topic}/receive", received, {"Content-Type": wire.JSON}))
    for broker_id in (2, 3):
        patiently(lambda to=broker_id: post(cluster, to, path, b"more"))
    for broker_id in cluster.running:
        full = patiently(lambda to=broker_id: post(cluster, to, path, b"too many"), (429,))
        assert (full.json()["code"], full.json()["outcome"]) == ("backpressure", "not_applied")
        assert int(full.headers["Retry-After"]) >= 1
    assert len(values(cluster, topic)) == 3


# --- keys in a batch -------------------------------------------------------------------------------------------------


def test_batches_with_keys_are_there_once_by_way_of_any_broker_through_the_leaders_death(cluster, topic):
    """Two producers send the same rows at the same time, cut differently, as two attempts of one task do."""
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    rows = [f"row-{number}" for number in range(900)]
    leader = cluster.wait_for_leader(topic)

    path, headers = f"/v1/topics/{topic}/messages", {"Content-Type": wire.BATCH_JSON}

    def bring(cut: int) -> dict[str, tuple[int, int]]:
        places = {}
        for start in range(0, len(rows), cut):
            part = rows[start : start + cut]
            while part:
                body = msgspec.json.encode({"messages": [{"value": row, "idempotency_key": row} for row in part]})
                answer = patiently(lambda body=body: post(cluster, random.choice(cluster.running), path, body, headers))
                left = []
                for row, result in zip(part, answer.json()["results"], strict=True):
                    if "error" in result:
                        assert result["error"]["retryable"], result
                        left.append(row)
                    else:
                        places[row] = (result["partition"], result["offset"])
                part = left
            if cut == CUTS[0] and start == len(rows) // 3 // cut * cut:
                cluster.kill(leader)
        return places

    with ThreadPoolExecutor(len(CUTS)) as threads:
        found = list(threads.map(bring, CUTS))
    cluster.heal()
    assert all(places == found[0] for places in found)
    assert Counter(values(cluster, topic)) == Counter(rows)
