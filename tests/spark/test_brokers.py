"""The brokers as an origin: scripted leaders first, then real ones, which give the same rows as their files."""

from __future__ import annotations

import pickle
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from support.broker_process import BrokerProcess
from support.cluster import Cluster, wait_until

from portalmq import Admin, Producer, errors, wire
from portalmq import stream_wire as contract
from portalmq.network.http_answer import HttpAnswer
from portalmq.spark.columns import COLUMNS
from portalmq.spark.errors import BadOption, DataLoss, NoTopic, SourceError, Unreachable
from portalmq.spark.files.directories import Directories
from portalmq.spark.http_api import brokers as brokers_module
from portalmq.spark.http_api.brokers import BrokerAccess, Brokers, BrokerSpan
from portalmq.spark.origin import Origin, PartitionLog, Span, rows_of
from portalmq.transport.retries import DeadlinePassed

LOG = PartitionLog("t", "id-1", 0, 0, 6)
PLACE = ("t", 0)

Step = Callable[[int], "contract.FetchedPartition | Exception"]


# --- scripted leaders -------------------------------------------------------------------------------------------------


def frame(base: int, *values: bytes) -> contract.Frame:
    header = msgspec.msgpack.encode(contract.FrameHead(base, len(values), 0, 0, 1, -1, -1, -1, 5, ""))
    body = msgspec.msgpack.encode([contract.FrameRecord(value, "text/plain") for value in values])
    return contract.Frame(header, zlib.crc32(body, zlib.crc32(header)), body)


def given(base: int, *values: bytes, high_watermark: int = 6) -> Step:
    """Return a leader's frames, whatever offset is requested."""
    end = base + len(values)
    return lambda _: contract.FetchedPartition(*PLACE, end, high_watermark, 0, [frame(base, *values)], None, "id-1")


def refused(error: errors.PortalMQError, topic_id: str = "id-1") -> Step:
    return lambda _: contract.FetchedPartition(*PLACE, error=error.problem(), topic_id=topic_id)


def fails(error: errors.PortalMQError) -> Step:
    return lambda _: error


OUT_OF_TIME = fails(DeadlinePassed("the time for this call is over"))


class Leaders:
    """A substitute for a Transport that answers fetches from a script; the last step repeats. Time passes only in
    pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.script: list[Step] = []
        self.asked: list[int] = []
        self.heard: list[object] = []
        self.urls = ["http://scripted:1"]

    def attempt(self, request: Any, deadline: float) -> HttpAnswer:
        asked = msgspec.json.decode(request.body, type=contract.FetchRequest)
        offset = asked.partitions[0].offset
        self.asked.append(offset)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        told = step(offset)
        if isinstance(told, Exception):
            raise told
        return HttpAnswer(200, {}, msgspec.msgpack.encode(contract.FetchAnswer([told])))  # type: ignore[arg-type]

    def leader_reported(self, place: object, url: object) -> bool:
        self.heard.append((place, url))
        return True

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        pass


def instead_of_transports(monkeypatch: pytest.MonkeyPatch, made: Leaders) -> None:
    monkeypatch.setattr(brokers_module, "Transport", lambda *_, **__: made)
    monkeypatch.setattr(brokers_module, "time", SimpleNamespace(monotonic=lambda: made.now))


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch) -> Leaders:
    made = Leaders()
    instead_of_transports(monkeypatch, made)
    return made


def span(start: int = 0, end: int = 6, patience_s: float = 5.0) -> BrokerSpan:
    return BrokerSpan(LOG, start, end, BrokerAccess("http://scripted:1", None, patience_s))


def values(of: Span) -> list[bytes]:
    return [value for batch in of.batches(("value",)) for value in batch.column("value").to_pylist()]


def test_a_span_is_fetched_from_the_end_of_the_last_answer(leaders: Leaders) -> None:
    leaders.script = [given(0, b"0", b"1"), given(2, b"2", b"3", b"4"), given(5, b"5", b"6")]
    assert values(span()) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert leaders.asked == [0, 2, 5]


def test_a_frame_that_begins_below_the_span_gives_the_part_that_is_in_it(leaders: Leaders) -> None:
    leaders.script = [given(0, b"0", b"1", b"2", b"3")]
    assert values(span(1, 3)) == [b"1", b"2"]


def test_reading_continues_at_another_leader_and_repeats_no_row(leaders: Leaders) -> None:
    moved = errors.NotLeader("broker 2 leads it", leader_url="http://two:1")
    leaders.script = [given(0, b"0", b"1"), refused(moved), given(2, b"2", b"3", b"4", b"5")]
    assert values(span()) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert leaders.heard == [(PLACE, "http://two:1")]
    assert leaders.asked == [0, 2, 2]


def test_reading_waits_for_messages_that_a_new_leader_does_not_show_yet(leaders: Leaders) -> None:
    nothing: Step = lambda offset: contract.FetchedPartition(*PLACE, offset, offset, topic_id="id-1")  # noqa: E731
    not_yet = refused(errors.Unavailable("offset 2 is not committed yet"))
    leaders.script = [given(0, b"0", b"1"), not_yet, nothing, given(2, b"2", b"3", b"4", b"5")]
    assert values(span()) == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_a_lost_connection_is_tried_again(leaders: Leaders) -> None:
    leaders.script = [fails(errors.Unavailable("gone", outcome="unknown")), given(0, *b"a b c d e f".split())]
    assert values(span()) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_a_wrong_checksum_is_fetched_again_and_a_lasting_one_is_an_error(leaders: Leaders) -> None:
    def broken(offset: int) -> contract.FetchedPartition:
        torn = frame(0, b"0", b"1")
        return contract.FetchedPartition(*PLACE, 2, 6, 0, [contract.Frame(torn.header, 1, torn.body)], None, "id-1")

    leaders.script = [broken, given(0, *b"a b c d e f".split())]
    assert len(values(span())) == 6
    leaders.script = [broken]
    with pytest.raises(Unreachable, match="wrong checksum"):
        values(span(patience_s=5))


def test_removed_messages_are_a_loss_and_reading_skips_them_if_allowed(leaders: Leaders) -> None:
    removed = refused(errors.OffsetOutOfRange("gone", log_start_offset=4, high_watermark=6))
    leaders.script = [given(0, b"0", b"1"), removed]
    with pytest.raises(DataLoss, match="offsets 2 to 3 of t@id-1/0 were removed before they were read"):
        values(span())
    leaders.script = [given(0, b"0", b"1"), removed, given(4, b"4", b"5")]
    found = [batch.to_pylist() for batch in rows_of(span(), ("offset",), fails_on_data_loss=False)]
    assert [row["offset"] for rows in found for row in rows] == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (refused(errors.TopicNotFound("there is no topic 't'")), "offsets 0 to 5 .* are gone: there is no topic 't'"),
        (refused(errors.NotLeader("who?"), topic_id="id-2"), "was deleted and made again .*id-1, and is id-2"),
        (
            refused(errors.OffsetOutOfRange("past the end", log_start_offset=0, high_watermark=0)),
            "the log ends at 0 .a leader was elected that did not have them",
        ),
    ],
)
def test_a_permanent_loss_is_reported_at_once(leaders: Leaders, step: Step, sentence: str) -> None:
    leaders.script = [step]
    with pytest.raises(DataLoss, match=sentence):
        values(span(patience_s=60))
    assert list(rows_of(span(), ("value",), fails_on_data_loss=False)) == []


def test_a_partition_without_a_leader_is_reported_after_a_wait(leaders: Leaders) -> None:
    leaders.script = [refused(errors.Unavailable("a leader is being elected"))]
    with pytest.raises(Unreachable, match=r"offset 0 of 't', partition 0, could not be read for 20 s: a leader is"):
        values(span(patience_s=20))
    assert 10 < leaders.now <= 20
    assert set(leaders.asked) == {0}


def test_a_reader_paused_beyond_its_patience_reports_the_earlier_fault(leaders: Leaders) -> None:
    leaders.script = [refused(errors.Unavailable("a leader is being elected")), OUT_OF_TIME]
    with pytest.raises(Unreachable, match=r"could not be read for 20 s: a leader is being elected\. Looked at"):
        values(span(patience_s=20))


def test_a_permanent_refusal_is_reported_at_once(leaders: Leaders) -> None:
    leaders.script = [fails(errors.Unauthorized("send a token"))]
    with pytest.raises(SourceError, match=r"http://scripted:1 refuses to be read .*: give the option token"):
        values(span(patience_s=60))


def test_an_abandoned_reader_leaves_no_thread(leaders: Leaders) -> None:
    leaders.script = [given(0, b"0"), given(1, b"1"), given(2, b"2")]
    before = set(threading.enumerate())
    batches = span().batches(("value",))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before, "a thread of the reader still runs"


class Planned(Leaders):
    """Describes topics of one partition each, and answers for each from its own script; the last step repeats."""

    def __init__(self, topics: dict[str, list[Step]]) -> None:
        super().__init__()
        self.topics = topics
        self.looks = 0

    def metadata(self, topics: object, *, deadline: float) -> wire.Metadata:
        self.looks += 1
        of = [wire.TopicMetadata(name, [wire.PartitionLeader(0, 1, 1, None)]) for name in self.topics]
        return wire.Metadata([], of)

    def leader_of(self, place: object) -> None:
        return None

    def attempt(self, request: Any, deadline: float) -> HttpAnswer:
        told: list[contract.FetchedPartition] = []
        for asked in msgspec.json.decode(request.body, type=contract.FetchRequest).partitions:
            steps = self.topics[asked.topic]
            step = steps.pop(0) if len(steps) > 1 else steps[0]
            answer = step(asked.offset)
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, contract.FetchedPartition)
            answer.topic = asked.topic
            told.append(answer)
        return HttpAnswer(200, {}, msgspec.msgpack.encode(contract.FetchAnswer(told)))  # type: ignore[arg-type]


def ends_at(start: int, end: int, topic_id: str = "id-1") -> Step:
    return refused(errors.OffsetOutOfRange("past the end", log_start_offset=start, high_watermark=end), topic_id)


def planned(monkeypatch: pytest.MonkeyPatch, topics: dict[str, list[Step]]) -> Planned:
    made = Planned(topics)
    instead_of_transports(monkeypatch, made)
    return made


def test_planning_asks_again_until_every_leader_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    electing = refused(errors.Unavailable("a leader is being elected"))
    made = planned(monkeypatch, {"a": [ends_at(0, 5)], "b": [electing, electing, ends_at(3, 9, "id-2")]})
    logs = Brokers(["http://scripted:1"]).logs()
    assert logs == [PartitionLog("a", "id-1", 0, 0, 5), PartitionLog("b", "id-2", 0, 3, 9)]
    assert made.looks == 3


def test_a_partition_that_has_no_leader_is_named_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(monkeypatch, {"a": [ends_at(0, 5)], "b": [refused(errors.Unavailable("a leader is being elected"))]})
    with pytest.raises(
        Unreachable,
        match=r"partition 0 of 'b' has no leader that answers, for 20 s: a leader is being elected. Looked at http",
    ):
        Brokers(["http://scripted:1"], patience_s=20).logs()
    assert 10 < made.now <= 20


def test_planning_reports_the_fault_before_a_pause_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, {"b": [refused(errors.Unavailable("a leader is being elected")), OUT_OF_TIME]})
    with pytest.raises(Unreachable, match=r"for 20 s: a leader is being elected\. Looked at http"):
        Brokers(["http://scripted:1"], patience_s=20).logs()
    made = planned(monkeypatch, {"b": [ends_at(0, 5)]})
    tries = chain([errors.Unavailable("no broker could be reached")], repeat(DeadlinePassed("the time is over")))
    monkeypatch.setattr(made, "metadata", lambda *_, **__: _raise(next(tries)))
    with pytest.raises(Unreachable, match=r"within 10 s; looked at \S+ \(no broker could be reached\)"):
        Brokers(["http://scripted:1"]).logs()


def _raise(error: Exception) -> None:
    raise error


def test_a_topic_deleted_during_planning_is_left_out_or_reported_if_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = {"a": [ends_at(0, 5)], "b": [refused(errors.TopicNotFound("there is no topic 'b'"), "")]}
    planned(monkeypatch, topics)
    assert [log.topic for log in Brokers(["http://scripted:1"]).logs()] == ["a"]
    with pytest.raises(NoTopic, match="there is no topic 'b'"):
        Brokers(["http://scripted:1"], ["a", "b"]).logs()


def test_spans_cover_a_range_once() -> None:
    origin = Brokers(["http://localhost:1"], None, 1_000)
    spans = origin.spans(LOG, 10, 2_500)
    assert [(each.start, each.end) for each in spans] == [(10, 1_010), (1_010, 2_010), (2_010, 2_500)]
    assert origin.spans(LOG, 5, 5) == []


def test_readers_can_be_pickled_and_show_no_token() -> None:
    origin = pickle.loads(pickle.dumps(Brokers(["http://localhost:1"], ["t"], token="secret")))
    (sent,) = pickle.loads(pickle.dumps(origin.spans(LOG, 0, 6)))
    assert (sent.log, sent.start, sent.end, sent.access.token) == (LOG, 0, 6, "secret")
    assert "secret" not in repr(sent.access)


@pytest.mark.parametrize("bootstrap", ["ftp://localhost", "http://user:secret@localhost", "http://"])
def test_an_invalid_address_is_reported_as_a_bad_option(bootstrap: str) -> None:
    with pytest.raises(BadOption, match="bootstrap"):
        Brokers([bootstrap])


def test_unreachable_brokers_are_reported_with_their_addresses() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"no broker answered within 0.2 s; looked at {url}"):
            Brokers([url], patience_s=0.2).logs()


def test_a_server_that_is_no_broker_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65_536)
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(SourceError, match="not PortalMQ's"):
            Brokers([f"http://127.0.0.1:{server.getsockname()[1]}"], patience_s=60).logs()


# --- real leaders -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker"), command=("dev",)) as started:
        yield started


def table(origin: Origin, columns: tuple[str, ...] = tuple(COLUMNS)) -> pa.Table:
    batches = [
        batch
        for log in origin.logs()
        for each in origin.spans(log, log.start_offset, log.end_offset)
        for batch in each.batches(columns)
    ]
    return pa.Table.from_batches(batches)


def produced(broker: BrokerProcess, topic: str, partitions: int = 3) -> None:
    """Messages of all kinds, by idempotent producers and without."""
    Admin(broker.url).create_topic(topic, partitions=partitions)
    with Producer(broker.url, batch_messages=50) as producer:
        for number in range(500):
            producer.send(topic, {"n": number}, key=f"key-{number % 7}" if number % 3 else None)
        producer.send(topic, b"", headers={"a": "1", "b": "\N{SNOWMAN}"}, partition=0)
        producer.send(topic, "text", ttl_s=3_600, partition=partitions - 1)
        producer.send(topic, "later", delay_s=3_600, priority=7, partition=partitions - 1)
    path = f"/v1/topics/{topic}/messages"
    assert broker.request("POST", path, b"one", {"Content-Type": "text/plain"}).status == 200
    batch = {"messages": [{"value": None, "key_base64": "/wA="}, {"value_base64": "AAE="}]}
    assert broker.request("POST", path, batch, {"Content-Type": "application/vnd.portalmq.batch+json"}).status == 200


def until_the_files_tell(files: Directories, http: Brokers) -> list[PartitionLog]:
    """Wait until the files show the committed messages, up to a second later."""
    return wait_until(lambda: (logs := http.logs()) == files.logs() and logs, "both origins show the same logs")


@pytest.mark.cluster
def test_files_and_http_give_the_same_rows_and_columns(broker: BrokerProcess) -> None:
    produced(broker, "same")
    files, http = Directories([str(broker.data_dir)], ["same"]), Brokers([broker.url], ["same"])
    logs = until_the_files_tell(files, http)
    assert [log.partition for log in logs] == [0, 1, 2]
    by_files, by_http = table(files), table(http)
    assert by_http.schema == by_files.schema
    assert by_http.to_pylist() == by_files.to_pylist()
    assert by_http.num_rows == 506
    for name in ("key", "headers", "deliver_at", "expires_at", "producer_id", "sequence"):
        assert 0 < by_http.column(name).null_count < 506, name


@pytest.mark.cluster
def test_a_time_finds_the_same_message_by_files_and_http(broker: BrokerProcess) -> None:
    produced(broker, "times", partitions=1)
    files, http = Directories([str(broker.data_dir)], ["times"]), Brokers([broker.url], ["times"])
    (log,) = until_the_files_tell(files, http)
    rows = table(http, ("offset", "timestamp")).to_pylist()
    moments = sorted({round(row["timestamp"].timestamp() * 1000) for row in rows})
    asked = sorted({moment + shift for moment in moments for shift in (-1, 0, 1)} | {0, 1 << 60})
    for moment in asked:
        later = [row["offset"] for row in rows if round(row["timestamp"].timestamp() * 1000) >= moment]
        for origin in (files, http):
            found = origin.offset_at(log, moment)
            assert [row["offset"] for row in rows if row["offset"] >= found] == later, (origin, moment)


@pytest.mark.cluster
def test_internal_topics_are_left_out_and_a_missing_topic_is_named(broker: BrokerProcess) -> None:
    Admin(broker.url).create_topic("shown")
    Admin(broker.url).create_topic("__hidden")
    assert {"shown"} <= {log.topic for log in Brokers([broker.url]).logs()}
    assert "__hidden" not in {log.topic for log in Brokers([broker.url]).logs()}
    assert [log.topic for log in Brokers([broker.url], ["__hidden"]).logs()] == ["__hidden"]
    with pytest.raises(NoTopic, match=f"there is no topic 'nope' at {broker.url}"):
        Brokers([broker.url], ["shown", "nope"]).logs()


@pytest.mark.cluster
def test_a_pattern_selects_the_topics_that_match_it_by_files_and_http(broker: BrokerProcess) -> None:
    for name in ("like_1", "like_2", "liked", "__like_3"):
        Admin(broker.url).create_topic(name)
    for asked, found in (
        (["like_*"], ["like_1", "like_2"]),
        (["like?"], ["liked"]),
        (["liked", "*_2"], ["like_2", "liked"]),
        (["__*"], ["__like_3"]),
    ):
        for origin in (Brokers([broker.url], asked), Directories([str(broker.data_dir)], asked)):
            topics = [log.topic for log in origin.logs()]
            assert [topic for topic in topics if "like" in topic] == found
    for origin in (Brokers([broker.url], ["nope*"]), Directories([str(broker.data_dir)], ["nope*"])):
        with pytest.raises(NoTopic, match=r"there is no topic 'nope\*' (at|in) "):
            origin.logs()


@pytest.mark.cluster
def test_a_purge_moves_the_beginning_and_a_recreated_topic_is_another_topic(broker: BrokerProcess) -> None:
    produced(broker, "purged", partitions=1)
    origin = Brokers([broker.url], ["purged"])
    (log,) = origin.logs()
    (planned,) = origin.spans(log, log.start_offset, log.end_offset)
    assert broker.request("DELETE", "/v1/topics/purged/messages?partition=0&before_offset=100").status in {200, 204}
    assert origin.logs()[0].start_offset == 100
    with pytest.raises(DataLoss, match=r"offsets 0 to 99 of purged@.* were removed"):
        values(planned)
    assert sum(batch.num_rows for batch in rows_of(planned, ("value",), fails_on_data_loss=False)) < 506
    Admin(broker.url).delete_topic("purged")
    with pytest.raises(DataLoss, match="are gone"):
        values(planned)
    produced(broker, "purged", partitions=1)
    with pytest.raises(DataLoss, match="was deleted and made again"):
        values(planned)
    assert origin.logs()[0].name != log.name


@pytest.mark.cluster
def test_a_broker_without_topics_and_a_broker_with_a_token(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--secret", "open sesame", command=("dev",)) as guarded:
        with pytest.raises(NoTopic, match="there are no topics at"):
            Brokers([guarded.url], token="open sesame").logs()
        for token in (None, "wrong"):
            with pytest.raises(SourceError, match=r"refuses to be read .*: give the option token"):
                Brokers([guarded.url], token=token).logs()
        with Producer(guarded.url, token="open sesame") as producer:
            producer.send("t", "x").result(10)
        assert table(Brokers([guarded.url], token="open sesame"), ("value",)).to_pylist() == [{"value": b"x"}]


def value_of(batch: int, number: int) -> bytes:
    return b"%03d-%03d" % (batch, number)


@pytest.mark.cluster
def test_leaders_killed_before_and_during_reading_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers_module, "FETCH_BYTES", 20_000)
    with Cluster(tmp_path) as cluster:
        cluster.admin().create_topic("t", partitions=2)
        cluster.wait_in_sync("t")
        with Producer(cluster.urls, batch_messages=20) as producer:
            offsets: list[list[int]] = [[], []]
            for batch in range(40):  # waits for each, or the broker would join them to one batch
                sent = [[producer.send("t", value_of(batch, n), partition=part) for n in range(100)] for part in (0, 1)]
                for part, futures in enumerate(sent):
                    offsets[part] += [future.result(30).offset for future in futures]
        origin = Brokers([f"zk://{cluster.zookeeper.hosts}"], ["t"], patience_s=60)
        planned = [each for log in origin.logs() for each in origin.spans(log, log.start_offset, log.end_offset)]
        cluster.kill(cluster.wait_for_leader("t", 0))  # between planning and reading
        reading = [each.batches(("offset", "value")) for each in planned]
        rows = [next(batches).to_pylist() for batches in reading]
        assert all(0 < len(some) < 4_000 for some in rows)
        cluster.heal()
        cluster.wait_in_sync("t")
        cluster.kill(cluster.wait_for_leader("t", 1))  # during the read
        for some, batches in zip(rows, reading, strict=True):
            some += [row for batch in batches for row in batch.to_pylist()]
        for found, wanted in zip(rows, offsets, strict=True):
            assert [row["offset"] for row in found] == wanted
            assert [row["value"] for row in found] == [value_of(batch, n) for batch in range(40) for n in range(100)]
        # Plans again while one broker is down.
        assert sum(log.end_offset > log.start_offset for log in origin.logs()) == 2


# --- through Spark ----------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(300)  # the first test starts Spark
def test_a_query_gives_the_same_by_files_and_http_and_a_refusal_reaches_its_user(spark: Any, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, command=("dev",)) as broker:
        produced(broker, "asked")
        until_the_files_tell(Directories([str(broker.data_dir)], ["asked"]), Brokers([broker.url], ["asked"]))
        found = []
        for door, where in (("path", str(broker.data_dir)), ("bootstrap", broker.url)):
            messages = spark.read.format("portalmq").option(door, where).option("topic", "ask*").load()
            asked = messages.where("partition <> 1 AND offset >= 20 AND timestamp > '2020-01-01'")
            found.append(asked.orderBy("partition", "offset").toArrow())
        assert found[0].num_rows > 100
        assert found[1].to_pylist() == found[0].to_pylist()
        nowhere = spark.read.format("portalmq").option("bootstrap", broker.url).option("topic", "nope").load()
        with pytest.raises(Exception, match=f"there is no topic 'nope' at {broker.url}"):
            nowhere.collect()
