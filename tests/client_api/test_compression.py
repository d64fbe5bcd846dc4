"""A producer that compresses: what it sends, when it sends plain values, and brokers that do not know the format."""

from __future__ import annotations

import logging
from random import Random

import msgspec
import pytest
from support.compressed import readings
from support.scripted_broker import Call, ScriptedBroker

from portalmq import Producer, compression, wire
from portalmq.compression import BadValues, compressed, content_size, values_of, zstd
from portalmq.errors import InvalidRequest
from portalmq.producers import batch_queue
from portalmq.stream_wire import FrameHead, records_of_compressed

LONG = 60_000


def produced(broker: ScriptedBroker) -> list[Call]:
    return broker.calls_of("POST", "/v1/topics/t/messages")


def send_all(broker: ScriptedBroker, values: list[object], **options: object) -> list[int]:
    with Producer(broker.url, linger_ms=LONG, compression="zstd") as sender:
        futures = [sender.send("t", value, **options) for value in values]  # type: ignore[arg-type]
        sender.flush()
        return [future.result(10).offset for future in futures]


def test_the_values_of_a_batch_are_one_frame() -> None:
    with ScriptedBroker() as broker:
        assert send_all(broker, list(readings(100))) == list(range(100))
        (call,) = produced(broker)
        batch = call.batch()
        assert batch.values is not None
        assert (batch.values.codec, batch.values.content_type) == ("zstd", wire.BYTES)
        assert values_of(batch.values.data, 100) == readings(100)
        assert batch.messages == [wire.PackMessage()] * 100
        assert len(call.body) < sum(map(len, readings(100))) / 3


def test_the_common_content_type_is_named_once_and_other_fields_stay_with_their_message() -> None:
    with ScriptedBroker() as broker:
        send_all(broker, [{"number": number} for number in range(100)] + [b"bytes", "text"], key="k", priority=3)
        batch = produced(broker)[0].batch()
        assert batch.values is not None
        assert batch.values.content_type == wire.JSON
        kinds = [message.content_type for message in batch.messages]
        assert kinds == [None] * 100 + [wire.BYTES, wire.TEXT]
        assert {(message.key, message.priority) for message in batch.messages} == {("k", 3)}


def test_bytes_beside_a_common_type_are_named() -> None:
    with ScriptedBroker() as broker:
        send_all(broker, ["text" * 50, *readings(50)])
        batch = produced(broker)[0].batch()
        assert batch.values is not None
        assert batch.values.content_type == wire.TEXT
        assert [message.content_type for message in batch.messages] == [None] + [wire.BYTES] * 50


@pytest.mark.parametrize("values", [[b"small"] * 10, [Random(1).randbytes(4_000)]])
def test_batches_that_hardly_shrink_are_sent_plain(values: list[object]) -> None:
    with ScriptedBroker() as broker:
        send_all(broker, values)
        batch = produced(broker)[0].batch()
        assert batch.values is None
        assert [message.value for message in batch.messages] == values


def test_a_broker_that_does_not_know_compressed_values_gets_plain_ones(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ScriptedBroker._produce

    def earlier(broker: ScriptedBroker, topic: str, call: Call):
        if call.batch().values is not None:
            raise InvalidRequest("Object contains unknown field `values`")
        return answer(broker, topic, call)

    monkeypatch.setattr(ScriptedBroker, "_produce", earlier)
    with ScriptedBroker() as broker, caplog.at_level(logging.WARNING):
        assert send_all(broker, list(readings(100))) == list(range(100))
        assert [call.batch().values is None for call in produced(broker)] == [False, True]
        assert broker.values("t") == readings(100)
    assert "unknown field `values`" in caplog.text


def test_a_batch_with_one_refused_message_is_split_after_it_was_sent_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ScriptedBroker._produce

    def picky(broker: ScriptedBroker, topic: str, call: Call):
        batch = call.batch()
        values = (
            values_of(batch.values.data, len(batch.messages)) if batch.values else [m.value for m in batch.messages]
        )
        if readings(8)[7] in values:
            raise InvalidRequest("seven")
        return answer(broker, topic, call)

    monkeypatch.setattr(ScriptedBroker, "_produce", picky)
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG, compression="zstd") as sender:
        futures = [sender.send("t", value) for value in readings(100)]
        sender.flush()
        assert [at for at, future in enumerate(futures) if future.exception(10)] == [7]
        assert len(broker.values("t")) == 99


@pytest.mark.parametrize("name", ["gzip", "ZSTD", "", True])
def test_other_compressions_are_refused_with_a_sentence(name: object) -> None:
    with pytest.raises(ValueError, match="use 'zstd' or None"):
        Producer(compression=name)  # type: ignore[arg-type]


def test_without_zstd_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "HAS_ZSTD", False)
    with pytest.raises(RuntimeError, match=r"pip install 'portalmq\[zstd\]'"):
        Producer(compression="zstd")


# --- the format -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 3, 19])
def test_any_level_is_read(level: int) -> None:
    data = zstd.compress(msgspec.msgpack.encode(readings(100)), level)
    assert values_of(data, 100) == readings(100)
    assert content_size(data) == len(msgspec.msgpack.encode(readings(100)))


def test_what_is_too_large_is_refused_before_it_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = compressed(readings(100))
    assert data is not None
    monkeypatch.setattr(zstd, "ZstdDecompressor", None)
    with pytest.raises(BadValues, match="the limit is 100"):
        values_of(data, 100, 100)


def test_a_frame_of_a_later_codec_is_refused_by_its_name() -> None:
    head = FrameHead(0, 1, 0, 0, 1, -1, -1, -1, 0, "", "lz9")
    with pytest.raises(ValueError, match="'lz9'"):
        records_of_compressed(head, b"")


def test_the_limit_of_values_is_that_of_messages() -> None:
    with pytest.raises(BadValues, match="10000"):
        values_of(zstd.compress(msgspec.msgpack.encode([b""] * 10_001)), 10_001)
    assert compression.SIZE_MIN > 0
