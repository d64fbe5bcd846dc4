"""A group's limit of messages in flight while the leader is killed, asked at any broker."""

from __future__ import annotations

from support.cluster import Cluster, wait_until

from portalmq import Consumer, Producer


def test_a_new_leader_keeps_the_limit_and_wakes_a_receive_at_another_broker(cluster: Cluster, topic: str) -> None:
    with cluster.admin() as admin, Producer(cluster.urls) as producer:
        admin.create_topic(topic, replication_factor=3)
        cluster.wait_in_sync(topic)
        admin.create_group(topic, max_in_flight=2)
        for number in range(6):
            producer.send(topic, number)
        producer.flush()
    options = {"group": topic, "bootstrap": cluster.urls, "manual_ack": True, "max_messages": 1}
    with Consumer(topic, visibility_timeout_s=600, **options) as consumer:  # type: ignore[arg-type]
        first = wait_until(lambda: consumer.poll(5, 1), "a message")
        second = wait_until(lambda: consumer.poll(5, 1), "another message")
        consumer.extend([*first, *second])
        consumer.ack(first)  # committed, and so is every grant before it
        third = wait_until(lambda: consumer.poll(5, 1), "the next one")
        consumer.nack(third, 0)
        third = wait_until(lambda: consumer.poll(5, 1), "it again")
        consumer.extend(second)
        with Producer(cluster.urls) as producer:  # commits what is in the log before it
            producer.send(topic, 6).result(60)
        leader = cluster.wait_for_leader(topic)
        cluster.kill(leader)
        cluster.wait_for_leader(topic, other_than=leader)
        with cluster.admin() as admin:
            wait_until(lambda: admin.group(topic).in_flight == 2, "both leases at the new leader")
        assert consumer.poll(0.5, 1) == []
        consumer.ack(second)
        fourth = wait_until(lambda: consumer.poll(30, 1), "one for the free place")
        assert [message.json() for message in (*first, *second, *third, *fourth)] == [0, 1, 2, 3]
        assert consumer.poll(0.2, 1) == []
        consumer.release([*third, *fourth])
