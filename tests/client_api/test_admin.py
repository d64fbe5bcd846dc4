"""The administrator's calls: their requests, and pages read as one listing."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, refuse

from portalmq import Admin, InvalidRequest, TopicExists, wire

TOPIC = wire.TopicDescription(
    "t", [wire.PartitionDescription(partition, 1, 1, [1], [1], 0, 3, 100) for partition in range(2)], wire.TopicConfig()
)
GROUP = wire.GroupDescription("g", "queue", [], 2, 1, 0, 0, 3, 1500, wire.GroupConfig())


def reply(body: object, status: int = 200):  # type: ignore[no-untyped-def]
    return lambda broker, call: Reply(status, msgspec.json.encode(body))


def pages(end: int, size_max: int = 2):  # type: ignore[no-untyped-def]
    """Return a partition whose readable offsets are 0 to end - 1, in small pages."""

    def step(broker: ScriptedBroker, call: Call) -> Reply:
        partition = int(call.path.split("/")[5])
        given = call.query.get("offset", "0")
        start = 0 if given == "earliest" else end if given == "latest" else int(given)
        stop = min(end, start + min(size_max, int(call.query["limit"])))
        messages = [wire.PackMessageOut(partition, offset, b"%d" % offset, 0) for offset in range(start, stop)]
        page = wire.PackBrowsePage(messages, stop, 0, end)
        return Reply(200, msgspec.msgpack.encode(page), wire.BATCH_MSGPACK)

    return step


def test_a_topic_is_created_with_only_the_given_settings() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("PUT", "/v1/topics/t", [reply(TOPIC, 201), refuse(409, "topic_exists")])
        assert admin.create_topic("t", partitions=2, config={"retention_ms": 1000}).name == "t"
        assert broker.calls[0].json() == {"partitions": 2, "config": {"retention_ms": 1000}}
        with pytest.raises(TopicExists):
            admin.create_topic("t", partitions=3)


def test_a_seek_whose_answer_is_lost_is_repeated_under_the_key_of_the_first_try() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        sought = reply({"topic": "t", "offsets": [{"partition": 0, "from": 3, "to": 3}], "dry_run": False})
        broker.script("POST", "/v1/groups/g/seek", [hang_up, sought, sought])
        assert admin.seek("g", "t", "earliest").offsets[0].to == 3
        admin.seek("g", "t", "earliest")
        first, again, another = (call.headers["idempotency-key"] for call in broker.calls)
        assert first == again != another


def test_topics_are_listed_described_changed_purged_and_deleted() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("GET", "/v1/topics/t", [reply(TOPIC)])
        broker.script("GET", "/v1/topics", [reply({"topics": [wire.TopicSummary("t", 2, 1)]})])
        broker.script("PATCH", "/v1/topics/t", [reply(TOPIC)])
        broker.script("DELETE", "/v1/topics/t", [reply(None, 204), reply(None, 204)])
        assert len(admin.describe("t").partitions) == 2
        assert [topic.name for topic in admin.topics()] == ["t"]
        admin.alter_topic("t", config={"retention_bytes": None})
        admin.purge("t", partition=1, before_offset=7)
        admin.delete_topic("t")
        changed, purged, deleted = broker.calls[-3:]
        assert changed.json() == {"config": {"retention_bytes": None}}
        assert (purged.path, purged.query) == ("/v1/topics/t/messages", {"partition": "1", "before_offset": "7"})
        assert (deleted.method, deleted.path) == ("DELETE", "/v1/topics/t")


def test_groups_are_created_and_described_with_their_lag() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("GET", "/v1/groups/g", [reply(GROUP), reply(GROUP)])
        broker.script("GET", "/v1/groups", [reply({"groups": [GROUP]})])
        broker.script("PUT", "/v1/groups/g", [reply(GROUP)])
        broker.script("DELETE", "/v1/groups/g", [reply(None, 204)])
        assert admin.create_group("g", max_deliveries=2).group == "g"
        assert broker.calls[0].json() == {"max_deliveries": 2}
        assert admin.groups() == [admin.group("g")]
        assert admin.lag("g") == 3
        admin.delete_group("g")


def test_an_invalid_name_never_leaves_the_client() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        for call in (admin.describe, admin.delete_topic, admin.purge, admin.group, lambda name: list(admin.peek(name))):
            with pytest.raises(InvalidRequest):
                call("../t")
        assert broker.calls == []


def test_peek_reads_page_after_page_and_partition_after_partition() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("GET", "/v1/topics/t/partitions", [pages(3)] * 100)
        broker.script("GET", "/v1/topics/t", [reply(TOPIC)] * 100)
        assert [message.id for message in admin.read_all("t")] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
        assert [message.id for message in admin.peek("t", limit=4)] == ["0-0", "0-1", "0-2", "1-0"]
        assert [message.id for message in admin.peek("t", partition=1, offset=2)] == ["1-2"]
        assert [message.topic for message in admin.peek("t", limit=1)] == ["t"]


def test_peek_ends_where_the_topic_ended_when_it_began() -> None:
    end = [3]

    def growing(broker: ScriptedBroker, call: Call) -> Reply:
        end[0] += 1
        return pages(end[0])(broker, call)

    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("GET", "/v1/topics/t/partitions", [growing] * 100)
        assert len(list(admin.peek("t", partition=0, limit=None))) == 4


def test_a_start_time_is_sent_in_utc() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("GET", "/v1/topics/t/partitions", [pages(0)])
        admin.browse("t", 0, at=datetime(2026, 5, 1, 12, tzinfo=UTC), wait_s=2)
        assert broker.calls[0].query == {"limit": "100", "at": "2026-05-01T12:00:00Z", "wait_ms": "2000"}


def test_a_group_is_paused_and_resumed_again_after_a_lost_answer() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        none = reply(None, 204)
        broker.script("POST", "/v1/groups/g/pause", [hang_up, none])
        broker.script("POST", "/v1/groups/g/resume", [none])
        admin.pause_group("g", "why", by="eva")
        admin.resume_group("g")
        assert [call.json() for call in broker.calls] == [{"reason": "why", "by": "eva"}] * 2 + [{}]


def test_a_copy_whose_answer_is_lost_is_repeated_under_the_key_of_the_first_try() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        made = reply({"id": "1-4", "topic": "u", "partition": 1, "offset": 4, "timestamp_ms": 9})
        broker.script("POST", "/v1/topics/t/messages/0-3/copy", [hang_up, made])
        copy = admin.copy_message("t", "0-3", to_topic="u", value={"a": 1}, headers={"gone": None})
        assert (copy.topic, copy.partition, copy.offset) == ("u", 1, 4)
        first, again = broker.calls
        assert first.json() == again.json() == {"to_topic": "u", "value": {"a": 1}, "headers": {"gone": None}}
        assert first.headers["idempotency-key"] == again.headers["idempotency-key"]


def test_a_scheduled_message_is_run_and_moved() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        broker.script("POST", "/v1/topics/t/scheduled/0-3/run", [reply(None, 204)])
        broker.script("PATCH", "/v1/topics/t/scheduled/0-3", [reply({"copy_of": "t/0-3", "deliver_at_ms": 5})])
        admin.run_scheduled("t", "0-3")
        admin.move_scheduled("t", "0-3", datetime(2030, 1, 1, tzinfo=UTC))
        assert broker.calls[-1].json() == {"deliver_at_ms": 1_893_456_000_000}
