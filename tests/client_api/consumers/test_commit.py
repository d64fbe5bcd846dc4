"""commit_with: its requests, its retries, and the messages that it does not ack."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from support.scripted_broker import Reply, ScriptedBroker, hang_up, lose_answer, refuse

from portalmq import (
    Consumer,
    IllegalGeneration,
    InvalidRequest,
    Message,
    OffsetMoved,
    OffsetOutOfRange,
    StaleReceipt,
    Unavailable,
    wire,
)
from portalmq.consumers.commit import packed
from portalmq.consumers.subscription import Subscription
from portalmq.network.either import finish
from portalmq.stream_wire import AssignedPartition
from portalmq.streams.member import StreamMember
from portalmq.transport.transport import Transport

COMMIT = "/v1/groups/g/commit"
SUBSCRIPTION = Subscription(
    group="g",
    topics=("t",),
    settings={},
    delivery="exactly_once",
    manual_ack=True,
    max_messages=10,
    visibility_timeout_s=30.0,
    member_id="m",
    session_timeout_s=10,
)


def consumer(broker: ScriptedBroker, **options: object) -> Consumer:
    return Consumer("t", group="g", bootstrap=broker.url, **{"idle_timeout_s": 0, **options})  # type: ignore[arg-type]


def acked(broker: ScriptedBroker) -> list[str]:
    """Return all receipts that were acked, alone or with a receive."""
    calls = [call.json() for call in broker.calls if call.path.endswith(("/receive", "/ack"))]
    return [receipt for call in calls for receipt in (*call.get("ack", ()), *call.get("receipts", ()))]


def test_a_commit_finishes_its_input_and_publishes_its_output_and_acks_nothing_else() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with consumer(broker) as messages:
            for message in messages:
                done = messages.commit_with(message, [{"topic": "out", "value": message.value * 2, "key": message.key}])
                assert (done.acked, done.published) == (1, 1)
        assert broker.values("out") == [b"11", b"22", b"33"]
        assert acked(broker) == []


def test_several_messages_of_a_partition_are_one_commit() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker, manual_ack=True) as messages:
            messages.commit_with(messages.poll(), [])
        assert len(broker.done) == 2
        assert len(broker.calls_of("POST", COMMIT)) == 1


def test_an_output_that_json_cannot_encode_is_refused_before_anything_is_sent() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        refused = pytest.raises(TypeError, match="nan, which JSON cannot encode")
        with consumer(broker, manual_ack=True) as messages, refused:
            messages.commit_with(messages.poll(), [{"topic": "out", "value": {"x": float("nan")}}])
        assert broker.calls_of("POST", COMMIT) == []


def test_a_commit_whose_answer_is_lost_is_repeated_and_done_once() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        broker.script("POST", COMMIT, [lose_answer, hang_up, refuse(503, "unavailable", outcome="unknown")])
        with consumer(broker) as messages:
            first = messages.commit_with(next(messages), [{"topic": "out", "value": b"A"}])
        assert first.published == 1
        assert broker.values("out") == [b"A"]
        bodies = {call.body for call in broker.calls_of("POST", COMMIT)}
        assert len(bodies) == 1, "each try sends the same body"


def test_a_stale_receipt_is_raised_and_the_message_is_not_acked() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker) as messages:
            message = next(messages)
            broker.leased.pop(message.receipt)
            with pytest.raises(StaleReceipt):
                messages.commit_with(message, [{"topic": "out", "value": b"A"}])
            assert next(messages).value == b"2"
        assert message.receipt not in acked(broker)
        assert "out" not in broker.topics


def test_a_commit_that_fails_leaves_its_messages_unacked() -> None:
    """The next receive must not ack them: the input would be done without its output."""
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        broker.script("POST", COMMIT, [refuse(503, "unavailable", outcome="unknown", retryable=False)])
        with consumer(broker) as messages:
            message = next(messages)
            with pytest.raises(Unavailable):
                messages.commit_with(message, [{"topic": "out", "value": b"A"}])
            list(messages)
        assert message.receipt not in acked(broker)


def test_outputs_are_sent_unchanged() -> None:
    (message,) = packed([{"topic": "t", "value": {"a": 1}, "key": b"\xff", "headers": {"h": "x"}, "priority": 4}])
    assert (message.value, message.content_type, message.key) == (b'{"a":1}', wire.JSON, b"\xff")
    assert (message.headers, message.priority) == ({"h": "x"}, 4)
    text, raw, encoded = packed(
        [
            {"topic": "t", "value": "grüß", "partition": 2, "delay_ms": 5, "ttl_ms": 7},
            {"topic": "t", "value": b"\x00", "content_type": "image/png"},
            {"topic": "t", "value_base64": "AA==", "key_base64": "AQ=="},
        ]
    )
    assert (text.value, text.content_type) == ("grüß".encode(), wire.TEXT)
    assert (text.partition, text.delay_ms, text.ttl_ms) == (2, 5, 7)
    assert (raw.value, raw.content_type) == (b"\x00", "image/png")
    assert (encoded.value_base64, encoded.key_base64) == ("AA==", "AQ==")
    for each in (message, text, raw, encoded):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=wire.PackOutput) == each


@pytest.mark.parametrize(
    ("outputs", "error", "says"),
    [
        ({"topic": "t", "value": 1}, TypeError, "list of messages"),
        ([b"x"], TypeError, "use a dict"),
        ([{"value": 1}], Exception, "cannot name a topic"),
        ([{"topic": "t"}], ValueError, "either value or value_base64"),
        ([{"topic": "t", "value": 1, "value_base64": ""}], ValueError, "either value or value_base64"),
        ([{"topic": "t", "value": 1, "delay": 3}], ValueError, "delay"),
        ([{"topic": "t", "value": object()}], TypeError, "unsupported"),
        ([{"topic": "t", "value": 1, "key": 7}], TypeError, "a key is text or bytes"),
    ],
)
def test_invalid_outputs_are_refused_before_a_request(outputs, error, says) -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with consumer(broker, manual_ack=True) as messages:
            (message,) = messages.poll()
            with pytest.raises(error, match=says):
                messages.commit_with(message, outputs)
        assert broker.calls_of("POST", COMMIT) == []


def test_messages_of_two_partitions_none_or_browsed_ones_are_refused() -> None:
    def message(partition: int) -> Message:
        return Message("t", partition, 0, None, b"", {}, wire.BYTES, 0)

    with ScriptedBroker() as broker, consumer(broker) as messages:
        with pytest.raises(ValueError, match="2 partitions"):
            messages.commit_with([message(0), message(1)], [])
        with pytest.raises(ValueError, match="at least one"):
            messages.commit_with([], [])
        with pytest.raises(ValueError, match="browsed"):
            messages.commit_with(message(0), [])


def test_messages_of_a_partition_that_was_reassigned_are_not_committed() -> None:
    """Another member has published for the first of them."""

    def message(offset: int) -> Message:
        return Message("t", 0, offset, None, b"", {}, wire.BYTES, 0)

    with ScriptedBroker() as broker:
        transport = Transport(broker.url)
        member = StreamMember(transport, transport, SUBSCRIPTION)
        with pytest.raises(IllegalGeneration, match="comes again"):
            finish(member.commit_with([message(100)], []))
        member.buffers.add([AssignedPartition("t", 0, 150, 5)])
        feed = member.buffers.by_partition["t", 0]
        feed.handed = 250
        for own in ([message(100), message(199)], [message(250)]):
            with pytest.raises(IllegalGeneration, match="comes again"):
                finish(member.commit_with(own, []))
        assert broker.calls_of("POST", COMMIT) == []
        refused = refuse(416, "offset_out_of_range", committed=200)
        broker.script("POST", COMMIT, [refused])
        member.buffers.by_partition["t", 0].handed = 250
        with pytest.raises(OffsetOutOfRange):
            finish(member.commit_with([message(150)], []))
        feed = member.buffers.by_partition["t", 0]
        assert (feed.committed, feed.position) == (200, 200), "an earlier try had done it: it goes on behind that"
        transport.close()


@pytest.mark.parametrize(
    ("status", "delivery", "calls", "refused"),
    [
        (201, "exactly_once", 1, False),
        (200, "exactly_once", 1, False),
        (200, "at_least_once", 1, True),
        (201, "at_least_once", 2, False),  # an older broker ignores the parameter
    ],
)
def test_a_stream_group_is_created_with_its_delivery_by_one_call(status, delivery, calls, refused) -> None:
    def answer(broker, call):
        group = wire.GroupDescription("g", "stream", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig(delivery=delivery))
        return Reply(status, msgspec.json.encode(group))

    with ScriptedBroker() as broker:
        broker.script("PUT", "/v1/groups/g", [answer])
        transport = Transport(broker.url)
        member = StreamMember(transport, transport, SUBSCRIPTION)
        with pytest.raises(InvalidRequest) if refused else contextlib.nullcontext():
            finish(member._calls.create_group())
        made = broker.calls_of("PUT", "/v1/groups/g")
        assert len(made) == calls
        assert made[0].query == {"delivery": "exactly_once"}
        transport.close()


@pytest.mark.parametrize("known", [100, 300])
def test_a_member_with_an_outdated_offset_continues_from_the_leaders(known: int) -> None:
    with ScriptedBroker() as broker:
        transport = Transport(broker.url)
        member = StreamMember(transport, transport, SUBSCRIPTION)
        member._commits.generation = 5
        member.buffers.add([AssignedPartition("t", 0, known, 5)])
        member.buffers.by_partition["t", 0].handed = known + 10
        broker.script("POST", COMMIT, [refuse(409, "offset_moved", committed=200)])
        with pytest.raises(OffsetMoved):
            finish(member.commit_with([Message("t", 0, known, None, b"", {}, wire.BYTES, 0)], []))
        (call,) = broker.calls_of("POST", COMMIT)
        assert msgspec.msgpack.decode(call.body, type=wire.PackCommit).offsets[0].committed == known
        feed = member.buffers.by_partition["t", 0]
        assert (feed.committed, feed.position) == (200, 200)
        transport.close()


def test_a_stream_member_commits_the_offset_after_its_last_message() -> None:
    def answer(broker, call):
        return Reply(body=msgspec.msgpack.encode(wire.Committed(0, 1, "0-9")), content_type=wire.BATCH_MSGPACK)

    def message(offset: int) -> Message:
        return Message("t", 0, offset, None, b"", {}, wire.BYTES, 0)

    with ScriptedBroker() as broker:
        broker.script("POST", COMMIT, [answer])
        transport = Transport(broker.url)
        member = StreamMember(transport, transport, SUBSCRIPTION)
        member._commits.generation = 3
        member.buffers.add([AssignedPartition("t", 0, 2, 3)])
        member.buffers.by_partition["t", 0].handed = 10
        done = finish(member.commit_with([message(7), message(4)], [{"topic": "out", "value": b"A"}]))
        assert done.id == "0-9"
        (call,) = broker.calls_of("POST", COMMIT)
        sent = msgspec.msgpack.decode(call.body, type=wire.PackCommit)
        assert (sent.member_id, sent.generation, sent.offsets) == ("m", 3, [wire.InputOffset("t", 0, 8, 2)])
        assert sent.ack is None
        transport.close()
