"""Every broker answers every call, over three real brokers: the broker that receives a call forwards it to the
leaders."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.broker_process import Answer, BrokerProcess
from support.cluster import Cluster, wait_until

from portalmq import Admin, Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PARTITIONS = 3
BATCH = {"Content-Type": "application/vnd.portalmq.batch+json"}
TEXT = {"Content-Type": "text/plain"}
WAIT_MS = 20_000
# Well before a wait ends by its time limit.
WOKEN_WITHIN_S = WAIT_MS / 2_000


@pytest.fixture
def spread(cluster: Cluster, topic: str) -> str:
    """A topic whose partitions are led by three different brokers."""
    cluster.admin().create_topic(topic, partitions=PARTITIONS)
    cluster.wait_in_sync(topic)
    wait_until(lambda: len(leaders(cluster, topic)) == PARTITIONS, "a leader of each partition that all agree on")
    if len(set(leaders(cluster, topic).values())) < PARTITIONS:
        pytest.skip("an earlier fail-over left two of the partitions with one leader")
    return topic


def leaders(cluster: Cluster, topic: str) -> dict[int, int]:
    return {number: leader for number in range(PARTITIONS) if (leader := cluster.leader(topic, number)) is not None}


def call(broker: BrokerProcess, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    return broker.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def send(broker: BrokerProcess, topic: str, value: str, partition: int | None = None, **headers: str) -> dict[str, Any]:
    query = "" if partition is None else f"?partition={partition}"
    answer = call(broker, "POST", f"/v1/topics/{topic}/messages{query}", value.encode(), **{**TEXT_H, **headers})
    assert answer.status == 200, answer.body
    return answer.json()


TEXT_H = {"Content_Type": "text/plain"}


def receive(broker: BrokerProcess, topic: str, group: str, **options: Any) -> list[dict[str, Any]]:
    answer = call(broker, "POST", f"/v1/groups/{group}/receive", {"topics": [topic], "max_messages": 100, **options})
    assert answer.status == 200, answer.body
    return answer.json()["messages"]


def settle(broker: BrokerProcess, verb: str, group: str, receipts: list[str], **options: Any) -> Answer:
    return call(broker, "POST", f"/v1/groups/{group}/{verb}", {"receipts": receipts, **options})


def values(messages: list[dict[str, Any]]) -> list[str]:
    return sorted(message["value"] for message in messages)


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def parked(cluster: Cluster, broker_id: int) -> int:
    told = wait_until(lambda: cluster.ask("/healthz", broker_id), f"broker {broker_id} answers")
    return told["parked_receives"]


def wait_for_parked(cluster: Cluster, broker_id: int, count: int) -> None:
    wait_until(lambda: parked(cluster, broker_id) == count, f"{count} receives are parked at broker {broker_id}")


# --- producing and browsing ------------------------------------------------------------------------------------------


def test_every_broker_takes_messages_for_every_partition(cluster: Cluster, spread: str):
    for broker_id, broker in cluster.brokers.items():
        for partition in range(PARTITIONS):
            sent = send(broker, spread, f"{broker_id}-{partition}", partition)
            assert sent["partition"] == partition
    for broker in cluster.brokers.values():
        for partition in range(PARTITIONS):
            page = call(broker, "GET", f"/v1/topics/{spread}/partitions/{partition}/messages").json()
            assert values(page["messages"]) == [f"{broker_id}-{partition}" for broker_id in cluster.brokers]
        whole = call(broker, "GET", f"/v1/topics/{spread}/messages").json()
        assert len(whole["messages"]) == 9


def test_a_batch_over_several_leaders_is_answered_in_its_order(cluster: Cluster, spread: str):
    messages = [{"value": number, "partition": number % PARTITIONS} for number in range(30)]
    for broker in cluster.brokers.values():
        answer = call(
            broker, "POST", f"/v1/topics/{spread}/messages", {"messages": messages}, Content_Type=BATCH["Content-Type"]
        )
        results = answer.json()["results"]
        assert [result["partition"] for result in results] == [number % PARTITIONS for number in range(30)]
        for partition in range(PARTITIONS):
            offsets = [result["offset"] for result in results if result["partition"] == partition]
            assert offsets == list(range(offsets[0], offsets[0] + 10))


def test_a_stamped_batch_is_appended_once_whichever_brokers_it_is_sent_to(cluster: Cluster, spread: str):
    first, *others = cluster.brokers.values()
    identity = call(first, "POST", "/v1/producers", {}).json()
    batch = {"messages": [{"value": 1}, {"value": 2}], "producer": {**identity, "sequence": 0}}
    path = f"/v1/topics/{spread}/messages?partition=1"
    answers = [
        call(broker, "POST", path, batch, Content_Type=BATCH["Content-Type"], Prefer=prefer).json()
        for prefer in ("return=minimal", "")
        for broker in (first, *others)
    ]
    assert {answer["base_offset"] for answer in answers[:3]} == {answers[0]["base_offset"]}
    assert all(answer == answers[3] for answer in answers[3:])
    assert len(call(first, "GET", f"/v1/topics/{spread}/messages").json()["messages"]) == 2


def test_an_idempotency_key_counts_at_every_broker(cluster: Cluster, spread: str):
    sent = [send(broker, spread, "once", Idempotency_Key="k") for broker in cluster.brokers.values()]
    assert sent[0] == sent[1] == sent[2]
    for broker in cluster.brokers.values():
        answer = call(broker, "POST", f"/v1/topics/{spread}/messages", b"other", Idempotency_Key="k", **TEXT_H)
        assert (answer.status, answer.json()["outcome"]) == (422, "not_applied")


def test_a_call_without_forwarding_is_answered_with_the_leader(cluster: Cluster, spread: str):
    leads = leaders(cluster, spread)
    for broker_id, broker in cluster.brokers.items():
        for partition, leader in leads.items():
            for method, path, body in (
                ("POST", f"/v1/topics/{spread}/messages?partition={partition}", b"x"),
                ("GET", f"/v1/topics/{spread}/partitions/{partition}/messages", None),
                ("DELETE", f"/v1/topics/{spread}/messages?partition={partition}", None),
            ):
                answer = call(broker, method, path, body, PortalMQ_No_Forward="1", **TEXT_H)
                if leader == broker_id:
                    assert answer.status in {200, 204}, answer.body
                    continue
                problem = answer.json()
                assert (answer.status, problem["code"], problem["outcome"]) == (421, "not_leader", "not_applied")
                assert problem["leader"] == leader
                assert problem["leader_url"] == cluster.brokers[leader].url


def test_a_waiting_browse_returns_a_message_sent_to_another_broker(cluster: Cluster, spread: str):
    leads = leaders(cluster, spread)
    asked = next(broker_id for broker_id in cluster.brokers if broker_id != leads[0])
    path = f"/v1/topics/{spread}/partitions/0/messages?offset=latest&wait_ms={WAIT_MS}"
    started = time.monotonic()
    thread, found = in_background(lambda: call(cluster.brokers[asked], "GET", path).json())
    while thread.is_alive() and time.monotonic() - started < WOKEN_WITHIN_S:
        send(cluster.brokers[leads[0]], spread, "news", 0)  # a message from before the wait does not wake it
        thread.join(0.2)
    assert found, "the waiting call returns the message"
    assert set(values(found[0]["messages"])) == {"news"}


def test_every_broker_shows_the_leaders_offsets_and_sizes(cluster: Cluster, spread: str):
    for partition in range(PARTITIONS):
        for _ in range(partition + 1):
            send(cluster.brokers[1], spread, "x", partition)
    shown = [call(broker, "GET", f"/v1/topics/{spread}").json()["partitions"] for broker in cluster.brokers.values()]
    assert shown[0] == shown[1] == shown[2]
    watermarks = [partition["high_watermark"] for partition in shown[0]]
    assert [mark - watermarks[0] for mark in watermarks] == [0, 1, 2]


def test_a_purge_reaches_every_leader(cluster: Cluster, spread: str):
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, "x", partition)
    assert call(cluster.brokers[2], "DELETE", f"/v1/topics/{spread}/messages").status == 204
    for broker in cluster.brokers.values():
        assert call(broker, "GET", f"/v1/topics/{spread}/messages").json()["messages"] == []


def test_a_topic_made_at_one_broker_is_there_at_every_other_at_once(cluster: Cluster, topic: str):
    makers, users = list(cluster.brokers.values()), [*list(cluster.brokers.values())[1:], cluster.brokers[1]]
    for number, (maker, user) in enumerate(zip(makers, users, strict=True)):
        name = f"{topic}-{number}"
        assert call(maker, "PUT", f"/v1/topics/{name}", {"partitions": 2}).status == 201
        assert len(call(user, "GET", f"/v1/topics/{name}").json()["partitions"]) == 2
        assert len(call(user, "GET", f"/v1/metadata?topics={name}").json()["topics"][0]["partitions"]) == 2
        send(user, name, "x", 1)


# --- groups ----------------------------------------------------------------------------------------------------------


def begin(cluster: Cluster, topic: str) -> None:
    """Wait until each leader has the topic's group: a leader that does not have it yet is skipped while others have
    messages. An empty answer means that all of them answered."""
    path, asked = f"/v1/groups/{topic}/receive", {"topics": [topic]}
    wait_until(lambda: call(cluster.brokers[1], "POST", path, asked).status == 200, "all leaders know the group")


def gathered(broker: BrokerProcess, topic: str, count: int) -> list[dict[str, Any]]:
    """Receive `count` messages for the topic's group, which may not have reached every leader yet."""
    found: list[dict[str, Any]] = []
    wait_until(lambda: found.extend(receive(broker, topic, topic)) or len(found) >= count, f"{count} messages")
    return found


def test_a_receive_gathers_from_all_leaders_and_acks_go_back_to_them(cluster: Cluster, spread: str):
    begin(cluster, spread)
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, f"m{partition}", partition)
    messages = receive(cluster.brokers[1], spread, spread)
    assert values(messages) == ["m0", "m1", "m2"]
    for broker in cluster.brokers.values():
        assert receive(broker, spread, spread) == []
    receipts = [message["receipt"] for message in messages]
    answer = settle(cluster.brokers[2], "ack", spread, receipts)
    assert [result["status"] for result in answer.json()["results"]] == ["ok"] * 3
    for broker in cluster.brokers.values():
        described = call(broker, "GET", f"/v1/groups/{spread}").json()
        assert (described["lag"], described["in_flight"]) == (0, 0)
        assert settle(broker, "ack", spread, receipts).status == 200, "acking twice is ok, anywhere"


def test_each_message_goes_to_one_consumer_whichever_brokers_they_ask(cluster: Cluster, spread: str):
    sent = {f"{number}" for number in range(300)}
    batch = {"messages": [{"value": value, "partition": int(value) % PARTITIONS} for value in sent]}
    call(cluster.brokers[1], "POST", f"/v1/topics/{spread}/messages", batch, Content_Type=BATCH["Content-Type"])
    got: list[str] = []

    def consume(broker: BrokerProcess) -> None:
        while messages := receive(broker, spread, spread, max_messages=7):
            got.extend(message["value"] for message in messages)

    threads = [threading.Thread(target=consume, args=(broker,)) for broker in cluster.brokers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == sorted(sent)


def test_acks_that_ride_with_a_receive_reach_all_leaders(cluster: Cluster, spread: str):
    begin(cluster, spread)
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, f"m{partition}", partition)
    receipts = [message["receipt"] for message in receive(cluster.brokers[1], spread, spread)]
    assert receive(cluster.brokers[3], spread, spread, ack=receipts) == []
    assert call(cluster.brokers[2], "GET", f"/v1/groups/{spread}").json()["lag"] == 0


def test_a_waiting_receive_returns_a_message_of_any_leader(cluster: Cluster, spread: str):
    for partition, leader in leaders(cluster, spread).items():
        for broker_id, broker in cluster.brokers.items():
            wait_for_parked(cluster, broker_id, 0)
            thread, found = in_background(
                lambda broker=broker: receive(broker, spread, spread, wait_ms=WAIT_MS, max_messages=1)
            )
            wait_for_parked(cluster, broker_id, 1)
            send(cluster.brokers[leader], spread, f"{partition}-{broker_id}", partition)
            thread.join(WOKEN_WITHIN_S)
            assert found, "the waiting call returns the message"
            assert values(found[0]) == [f"{partition}-{broker_id}"]
            settle(broker, "ack", spread, [found[0][0]["receipt"]])


def test_one_message_wakes_one_of_many_waiting_receives_on_three_brokers(cluster: Cluster, spread: str):
    got: list[list[str]] = []

    def sleep(broker: BrokerProcess) -> None:
        got.append(values(receive(broker, spread, spread, wait_ms=WAIT_MS, max_messages=1)))

    for broker_id in cluster.brokers:
        wait_for_parked(cluster, broker_id, 0)
    threads = [threading.Thread(target=sleep, args=(broker,)) for broker in cluster.brokers.values() for _ in range(4)]
    for thread in threads:
        thread.start()
    for broker_id in cluster.brokers:
        wait_for_parked(cluster, broker_id, 4)
    for awake in range(PARTITIONS, len(threads) + 1, PARTITIONS):
        for partition in range(PARTITIONS):
            send(cluster.brokers[1], spread, f"m{awake + partition:02}", partition)
        wait_until(lambda: len(got) >= awake, f"{awake} are awake")  # noqa: B023 - used at once
        wait_until(
            lambda: sum(parked(cluster, each) for each in cluster.brokers) >= len(threads) - awake,  # noqa: B023
            "the others sleep on",
        )
        assert len(got) == awake
    for thread in threads:
        thread.join(30)
    assert sorted(got) == [[f"m{number:02}"] for number in range(PARTITIONS, PARTITIONS + len(threads))]


def test_a_consumer_that_has_disconnected_receives_nothing(cluster: Cluster, spread: str):
    leads = leaders(cluster, spread)
    for broker_id, broker in cluster.brokers.items():
        wait_for_parked(cluster, broker_id, 0)
        body = json.dumps({"topics": [spread], "wait_ms": WAIT_MS}).encode()
        with socket.create_connection(("127.0.0.1", broker.port)) as client:
            client.sendall(
                b"POST /v1/groups/%s/receive HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                % (spread.encode(), len(body), body)
            )
            wait_for_parked(cluster, broker_id, 1)
        for partition in leads:
            send(broker, spread, f"{broker_id}-{partition}", partition)
        messages = [message for each in cluster.brokers.values() for message in receive(each, spread, spread)]
        assert values(messages) == [f"{broker_id}-{partition}" for partition in leads]
        assert {message["delivery_count"] for message in messages} == {1}
        settle(broker, "ack", spread, [message["receipt"] for message in messages])


def test_a_repeated_attempt_gets_the_same_messages_at_another_broker(cluster: Cluster, spread: str):
    begin(cluster, spread)
    for partition in range(PARTITIONS):
        for number in range(4):
            send(cluster.brokers[1], spread, f"{partition}-{number}", partition)
    first = receive(cluster.brokers[1], spread, spread, max_messages=6, attempt_id="a")
    assert len(first) == 6
    for broker in cluster.brokers.values():
        again = receive(broker, spread, spread, max_messages=6, attempt_id="a")
        assert sorted(message["receipt"] for message in again) == sorted(message["receipt"] for message in first)


def test_scheduled_and_ready_messages_of_all_leaders_are_moved_at_any_broker(cluster: Cluster, spread: str):
    begin(cluster, spread)
    first, second, third = cluster.brokers.values()
    for partition in range(PARTITIONS):
        send(first, spread, f"later {partition}", partition, PortalMQ_Delay_Ms="3600000")
    path = f"/v1/topics/{spread}/scheduled"
    assert call(second, "POST", f"{path}/run", {"where": {"key": {"exists": True}}}).json() == {"matched": 0, "run": 0}
    assert call(second, "POST", f"{path}/run", {"limit": 2}).json() == {"matched": PARTITIONS, "run": 2}
    (left,) = call(third, "GET", path).json()["messages"]
    assert call(first, "POST", f"{path}/{left['id']}/run").status == 204
    group = f"/v1/groups/{spread}"
    ready = [f"later {partition}" for partition in range(PARTITIONS)]
    wait_until(lambda: call(third, "GET", group).json().get("ready") == len(ready), "the copies are there")
    target = {"topic": spread, "to_topic": f"{spread}.moved"}
    assert call(second, "POST", f"{group}/move", target).json() == {"matched": len(ready), "moved": len(ready)}
    there = f"/v1/topics/{spread}.moved/messages"
    wait_until(lambda: len(call(third, "GET", there).json().get("messages", ())) == len(ready), "all are there")
    moved = call(third, "GET", there).json()["messages"]
    assert values(moved) == ready
    assert call(first, "GET", group).json()["lag"] == 0


def test_a_group_that_starts_at_the_latest_skips_what_was_there_on_every_leader(cluster: Cluster, spread: str):
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, "old", partition)
    call(cluster.brokers[1], "PUT", f"/v1/groups/{spread}", {"start": "latest"})
    assert receive(cluster.brokers[2], spread, spread) == []
    for partition in range(PARTITIONS):
        send(cluster.brokers[3], spread, f"new{partition}", partition)
    assert values(receive(cluster.brokers[1], spread, spread)) == ["new0", "new1", "new2"]


def test_partitions_that_are_added_are_read_from_their_beginning_by_a_group_that_began_at_the_latest(
    cluster: Cluster, spread: str
):
    call(cluster.brokers[1], "PUT", f"/v1/groups/{spread}", {"start": "latest"})
    assert receive(cluster.brokers[1], spread, spread) == []
    assert call(cluster.brokers[2], "PATCH", f"/v1/topics/{spread}", {"partitions": 6}).status == 200
    for partition in range(PARTITIONS, 6):
        send(cluster.brokers[3], spread, f"{partition}", partition)
    assert values(gathered(cluster.brokers[3], spread, PARTITIONS)) == ["3", "4", "5"]


def test_group_settings_from_one_broker_apply_at_every_leader(cluster: Cluster, spread: str):
    call(cluster.brokers[1], "PUT", f"/v1/groups/{spread}", {"retry_backoff_ms": [600_000]})
    for broker in cluster.brokers.values():
        wait_until(
            lambda: call(broker, "GET", f"/v1/groups/{spread}").json()["config"]["retry_backoff_ms"] == [600_000],  # noqa: B023
            "the settings are known",
        )
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, "x", partition)
    receipts = [message["receipt"] for message in receive(cluster.brokers[2], spread, spread)]
    assert settle(cluster.brokers[3], "nack", spread, receipts, reason="later").status == 200
    assert receive(cluster.brokers[1], spread, spread) == []
    assert call(cluster.brokers[1], "GET", f"/v1/groups/{spread}").json()["scheduled"] == 3


def test_stale_receipts_are_listed_in_the_order_of_the_request(cluster: Cluster, spread: str):
    begin(cluster, spread)
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, f"{partition}", partition)
    first = sorted(
        receive(cluster.brokers[1], spread, spread, visibility_timeout_ms=60_000), key=lambda each: each["partition"]
    )
    zero, one, two = [message["receipt"] for message in first]
    assert settle(cluster.brokers[2], "extend", spread, [zero, two], visibility_timeout_ms=1).status == 200
    assert settle(cluster.brokers[2], "extend", spread, [one], visibility_timeout_ms=60_000).status == 200
    again = wait_until(lambda: receive(cluster.brokers[2], spread, spread), "the short leases end")
    while len(again) < 2:
        again += receive(cluster.brokers[2], spread, spread, wait_ms=1_000)
    answer = settle(cluster.brokers[3], "ack", spread, [message["receipt"] for message in first])
    problem = answer.json()
    assert (answer.status, problem["code"], problem["outcome"]) == (409, "stale_receipt", "partial")
    assert [result["status"] for result in problem["results"]] == ["stale_receipt", "ok", "stale_receipt"]
    assert [result["receipt"] for result in problem["results"]] == [message["receipt"] for message in first]


def test_a_deleted_group_is_gone_everywhere_and_starts_over(cluster: Cluster, spread: str):
    begin(cluster, spread)
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, f"{partition}", partition)
    receipts = [message["receipt"] for message in receive(cluster.brokers[1], spread, spread)]
    settle(cluster.brokers[1], "ack", spread, receipts)
    assert call(cluster.brokers[2], "DELETE", f"/v1/groups/{spread}").status == 204
    for broker in cluster.brokers.values():
        wait_until(lambda: call(broker, "GET", f"/v1/groups/{spread}").status == 404, "the group is gone")  # noqa: B023
    assert values(gathered(cluster.brokers[3], spread, PARTITIONS)) == ["0", "1", "2"]
    assert settle(cluster.brokers[1], "ack", spread, receipts).status == 400, "receipts of the deleted group"


def test_a_receive_without_forwarding_returns_the_brokers_own_partitions(cluster: Cluster, spread: str):
    leads = leaders(cluster, spread)
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, f"{partition}", partition)
    for partition, leader in leads.items():
        answer = call(
            cluster.brokers[leader],
            "POST",
            f"/v1/groups/{spread}/receive",
            {"topics": [spread]},
            PortalMQ_No_Forward="1",
        )
        assert values(answer.json()["messages"]) == [f"{partition}"]


def test_a_client_library_finds_the_brokers_by_zookeeper(cluster: Cluster, spread: str):
    bootstrap = f"zk://{cluster.zookeeper.hosts}"
    with Producer(bootstrap) as producer:
        for partition in range(PARTITIONS):
            producer.send(spread, f"{partition}", partition=partition).result(30)
    with Consumer(spread, group=spread, bootstrap=bootstrap, idle_timeout_s=30) as consumer:
        assert sorted(next(consumer).text for _ in range(PARTITIONS)) == ["0", "1", "2"]
    assert {broker.id for broker in Admin(bootstrap).cluster().brokers} == set(cluster.brokers)


def test_the_brokers_internal_calls_are_closed_to_clients(cluster: Cluster):
    for name in ("produce", "fetch", "receive", "nonsense"):
        answer = call(cluster.brokers[1], "POST", f"/internal/v1/{name}", b"\x90")
        assert (answer.status, answer.json()["code"]) == (401, "unauthorized")
        answer = call(cluster.brokers[1], "POST", f"/internal/v1/{name}", b"\x90", Authorization="Bearer x")
        assert (answer.status, answer.json()["code"]) == (403, "forbidden")


# --- failure of a leader ---------------------------------------------------------------------------------------------


def unless_503(answer: Answer) -> Answer | None:
    return None if answer.status == 503 else answer


def test_what_was_received_before_a_leader_died_is_acked_after_and_a_pause_holds(cluster: Cluster, spread: str):
    begin(cluster, spread)
    for partition in range(PARTITIONS):
        send(cluster.brokers[1], spread, f"{partition}", partition)
    messages = receive(cluster.brokers[1], spread, spread, visibility_timeout_ms=120_000)
    assert len(messages) == 3
    paused = call(cluster.brokers[2], "POST", f"/v1/groups/{spread}/pause", {"reason": "a leader dies"})
    assert paused.status == 204, paused.body
    victim = cluster.wait_for_leader(spread, 0)
    cluster.kill(victim)
    other = next(broker for broker_id, broker in cluster.brokers.items() if broker_id != victim)
    receipts = [message["receipt"] for message in messages]
    # A request waits for the next leader for a limited time: during a long election it may be answered 503.
    answer = wait_until(lambda: unless_503(settle(other, "ack", spread, receipts)), "the ack is answered")
    assert answer.status == 200, answer.body
    assert call(other, "GET", f"/v1/groups/{spread}").json()["lag"] == 0
    send(other, spread, "held back", 0)
    assert receive(other, spread, spread) == []
    assert call(other, "GET", f"/v1/groups/{spread}").json()["paused"]["reason"] == "a leader dies"
    resumed = wait_until(lambda: unless_503(call(other, "POST", f"/v1/groups/{spread}/resume")), "it is resumed")
    assert resumed.status == 204, resumed.body
    assert values(receive(other, spread, spread)) == ["held back"]
    shown = {broker["id"]: broker["live"] for broker in call(other, "GET", "/v1/cluster").json()["brokers"]}
    wait_until(
        lambda: (
            {each["id"]: each["live"] for each in call(other, "GET", "/v1/cluster").json()["brokers"]}[victim] is False
        ),
        f"broker {victim} is shown as dead, was {shown}",
    )


def test_a_send_through_another_broker_survives_the_leaders_death_within_one_request(cluster: Cluster, spread: str):
    # If the controller dies too, the request may end before another controller is elected.
    controller = cluster.wait_for_controller()
    partition, victim = next(each for each in leaders(cluster, spread).items() if each[1] != controller)
    entry = next(broker for broker_id, broker in cluster.brokers.items() if broker_id != victim)
    first = send(entry, spread, "before", partition, Idempotency_Key="k1")
    cluster.kill(victim)
    send(entry, spread, "after", partition, Idempotency_Key="k2")
    again = send(entry, spread, "before", partition, Idempotency_Key="k1")
    assert again == first, "the dedup window survives the leader"
    page = call(entry, "GET", f"/v1/topics/{spread}/partitions/{partition}/messages").json()
    assert values(page["messages"]) == ["after", "before"]


def test_waiting_receives_survive_the_death_of_the_leader(cluster: Cluster, spread: str):
    victim = cluster.wait_for_leader(spread, 0)
    entry_id, entry = next(each for each in cluster.brokers.items() if each[0] != victim)
    wait_for_parked(cluster, entry_id, 0)
    thread, found = in_background(lambda: receive(entry, spread, spread, wait_ms=WAIT_MS, max_messages=1))
    wait_for_parked(cluster, entry_id, 1)
    cluster.kill(victim)
    path, key = f"/v1/topics/{spread}/messages?partition=0", {"Idempotency_Key": "k"}
    sent = wait_until(
        lambda: unless_503(call(entry, "POST", path, b"after", **TEXT_H, **key)), "the next leader has it"
    )
    assert sent.status == 200, sent.body
    thread.join(WOKEN_WITHIN_S)
    assert found, "the waiting call returns the message"
    assert values(found[0]) == ["after"]
