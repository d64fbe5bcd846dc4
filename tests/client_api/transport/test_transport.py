"""The destination of calls, their retries, and their outcomes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.cluster import wait_until
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold, lose_answer, refuse

from portalmq import Consumer, Producer, errors, wire
from portalmq.network.connection import Address, Connection, ConnectionPool, NoAnswer, NotSent, Watch, parse_address
from portalmq.network.http_answer import Fields, HttpAnswer
from portalmq.transport.cluster_metadata import ClusterMetadata
from portalmq.transport.request import Request
from portalmq.transport.retries import Backoff
from portalmq.transport.transport import Transport, bootstrap_addresses

GET = Request("GET", "/v1/metadata", repeatable=True)
ONCE = Request("POST", "/v1/producers", b"{}")


class Network:
    """Answers from a list instead of a network; time passes only when the transport pauses."""

    def __init__(self, *outcomes: HttpAnswer | Exception) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[tuple[str, bytes]] = []
        self.now = 0.0
        self.pauses: list[float] = []

    def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, watch: Watch | None = None
    ) -> HttpAnswer:
        self.asked.append((address.url, head))
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def rest(self) -> None:
        pass

    def hang_up(self) -> None:
        pass

    def close(self, answers_within_s: float = 0.0) -> None:
        pass

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def transport(self, bootstrap: str = "http://one:1", **options: float) -> Transport:
        return Transport(bootstrap, pool=self, clock=lambda: self.now, pause=self.pause, chance=lambda: 1.0, **options)


def answer(status: int = 200, body: bytes = b"{}", **headers: str) -> HttpAnswer:
    return HttpAnswer(status, Fields({name.replace("_", "-").lower(): value for name, value in headers.items()}), body)


def failure(code: str, **members: object) -> HttpAnswer:
    error = errors.ERRORS_BY_CODE[code]("scripted", **members)  # type: ignore[arg-type]
    headers = {"Content_Type": wire.PROBLEM}
    if error.retry_after_s is not None:
        headers["Retry_After"] = str(error.retry_after_s)
    import msgspec

    return answer(error.status, msgspec.json.encode(error.problem()), **headers)


# --- destinations ----------------------------------------------------------------------------------------------------


def test_the_default_broker_is_port_5000_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PORTALMQ_URL", raising=False)
    assert [address.url for address in bootstrap_addresses(None)] == ["http://localhost:5000"]


def test_the_environment_names_several_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTALMQ_URL", "http://a:1, b:2,https://c")
    assert [address.url for address in bootstrap_addresses(None)] == ["http://a:1", "http://b:2", "https://c:443"]


@pytest.mark.parametrize("url", ["ftp://localhost:21", "http://user:secret@host", "http://", "http://host?x=1", " "])
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        bootstrap_addresses([url])


def test_a_path_before_the_api_is_kept() -> None:
    assert parse_address("http://host/queue/").url == "http://host:5000/queue"


# --- retries ---------------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_tried_again_until_the_broker_listens() -> None:
    network = Network(NotSent("refused"), NotSent("refused"), answer())
    assert network.transport().call(ONCE).status == 200
    assert len(network.asked) == 3


def test_pauses_grow_and_are_bounded() -> None:
    network = Network(NotSent("refused"))
    with pytest.raises(errors.Unavailable) as caught:
        network.transport(timeout_s=10).call(GET)
    assert network.pauses[:5] == [0.02, 0.04, 0.08, 0.1, 0.1], "a new leader is elected soon"
    assert max(network.pauses) == Backoff.MAX_S
    assert network.now < 10
    assert caught.value.outcome == "not_applied"
    assert caught.value.extra["looked_at"] == ["http://one:1"]


def test_retry_after_is_honoured() -> None:
    network = Network(failure("backpressure", retry_after_s=3.0), answer())
    network.transport().call(ONCE)
    assert network.pauses == [3.0]


def test_a_retry_after_beyond_the_deadline_ends_the_call_at_once() -> None:
    network = Network(failure("backpressure", retry_after_s=20.0))
    with pytest.raises(errors.Backpressure):
        network.transport(timeout_s=5).call(ONCE)
    assert network.pauses == []


def test_a_lost_answer_is_not_repeated_unless_the_request_is_repeatable() -> None:
    network = Network(NoAnswer("gone"), answer())
    with pytest.raises(errors.Unavailable) as caught:
        network.transport().call(ONCE)
    assert caught.value.outcome == "unknown"
    assert len(network.asked) == 1


def test_a_lost_answer_is_repeated_when_the_request_is_repeatable() -> None:
    network = Network(NoAnswer("gone"), answer())
    assert network.transport().call(GET).status == 200


def test_an_unknown_outcome_stays_unknown_whatever_later_tries_say() -> None:
    network = Network(NoAnswer("gone"), NotSent("refused"))
    put = Request("PUT", "/v1/topics/t", b"{}", repeatable=True)
    with pytest.raises(errors.Unavailable) as caught:
        network.transport(timeout_s=5).call(put)
    assert caught.value.outcome == "unknown"


def test_the_receipts_that_a_repeat_finds_stale_may_be_those_that_the_unknown_try_settled() -> None:
    network = Network(NoAnswer("gone"), failure("stale_receipt", outcome="partial"))
    nack = Request("POST", "/v1/groups/g/nack", b"{}", repeatable=True)
    with pytest.raises(errors.StaleReceipt) as caught:
        network.transport(timeout_s=5).call(nack)
    assert caught.value.outcome == "unknown"


def test_a_partial_outcome_of_the_only_try_is_kept() -> None:
    network = Network(failure("stale_receipt", outcome="partial"))
    with pytest.raises(errors.StaleReceipt) as caught:
        network.transport().call(Request("POST", "/v1/groups/g/nack", b"{}", repeatable=True))
    assert caught.value.outcome == "partial"


def test_an_error_without_a_retry_is_raised_unchanged() -> None:
    network = Network(failure("topic_not_found"))
    with pytest.raises(errors.TopicNotFound):
        network.transport().call(GET)
    assert len(network.asked) == 1


def test_a_closed_transport_stops_repeating() -> None:
    network = Network(NotSent("refused"))
    transport = network.transport()
    transport.close()
    with pytest.raises(errors.Unavailable, match="closed") as refused:
        transport.call(GET)
    assert network.asked == []
    assert not refused.value.retryable  # otherwise a caller's own retries would have no pause


# --- answers of other servers ----------------------------------------------------------------------------------------


def test_a_redirect_is_not_followed() -> None:
    network = Network(answer(302, Location="http://elsewhere:1/"))
    with pytest.raises(errors.Unavailable, match="redirects to http://elsewhere:1/"):
        network.transport().call(GET)
    assert [url for url, _ in network.asked] == ["http://one:1"]


@pytest.mark.parametrize(
    ("status", "kind", "outcome"),
    [
        (401, errors.Unauthorized, "not_applied"),
        (404, errors.NotFound, "not_applied"),
        (413, errors.MessageTooLarge, "not_applied"),
        (500, errors.Unavailable, "unknown"),
        (418, errors.PortalMQError, "not_applied"),
    ],
)
def test_a_status_without_a_problem_document_is_judged_by_the_status(
    status: int, kind: type[errors.PortalMQError], outcome: str
) -> None:
    with pytest.raises(kind) as caught:
        Network(answer(status, b"<html>")).transport().call(GET)
    assert caught.value.outcome == outcome


def test_an_answer_that_is_not_json_raises() -> None:
    with pytest.raises(errors.Unavailable, match="not PortalMQ's"):
        Network(answer(200, b"<html>")).transport().get("/v1/cluster", wire.ClusterDescription)


def test_the_token_goes_as_a_bearer_and_must_be_one_line() -> None:
    network = Network(answer())
    Transport("http://one:1", token="secret", pool=network).call(GET)
    assert b"\r\nAuthorization: Bearer secret\r\n" in network.asked[0][1]
    with pytest.raises(ValueError, match="one line"):
        Transport("http://one:1", token="a\r\nX: y")


# --- leaders ---------------------------------------------------------------------------------------------------------


def metadata(leader: str, epoch: int = 1) -> HttpAnswer:
    document = wire.Metadata(
        [wire.BrokerDescription(1, "http://one:1", True), wire.BrokerDescription(2, "http://two:2", True)],
        [wire.TopicMetadata("t", [wire.PartitionLeader(0, 1, epoch, leader)])],
    )
    import msgspec

    return answer(body=msgspec.json.encode(document))


TO_LEADER = Request("POST", "/v1/topics/t/messages", b"{}", leader_of=("t", 0))


def test_a_call_goes_to_the_leader_and_asks_not_to_be_forwarded() -> None:
    network = Network(metadata("http://two:2"), answer())
    transport = network.transport()
    transport.metadata(["t"])
    transport.call(TO_LEADER)
    url, head = network.asked[-1]
    assert url == "http://two:2"
    assert b"PortalMQ-No-Forward: 1" in head


def test_a_call_follows_the_leader_after_421() -> None:
    network = Network(metadata("http://one:1"), failure("not_leader"), metadata("http://two:2"), answer())
    transport = network.transport()
    transport.metadata(["t"])
    transport.call(TO_LEADER)
    assert [url for url, _ in network.asked][1:] == ["http://one:1", "http://one:1", "http://two:2"]


def test_a_leader_that_refuses_is_excluded_and_another_broker_is_tried() -> None:
    network = Network(metadata("http://two:2"), NotSent("refused"), metadata("http://two:2"), answer())
    transport = network.transport()
    transport.metadata(["t"])
    transport.call(TO_LEADER)
    url, head = network.asked[-1]
    assert url == "http://one:1"
    assert b"PortalMQ-No-Forward" not in head, "another broker may forward it"


def test_421_names_the_leader_and_the_next_try_goes_there_at_once() -> None:
    network = Network(metadata("http://one:1"), failure("not_leader", leader_url="http://two:2"), answer())
    transport = network.transport()
    transport.metadata(["t"])
    transport.call(TO_LEADER)
    assert [url for url, _ in network.asked][1:] == ["http://one:1", "http://two:2"]


def test_a_busy_broker_is_left_for_another_without_its_retry_pause() -> None:
    network = Network(failure("unavailable", retry_after_s=5.0), answer())
    transport = network.transport("http://one:1,http://two:2")
    transport.call(ONCE)
    assert [url for url, _ in network.asked] == ["http://one:1", "http://two:2"]
    assert network.pauses == [0.02]


def test_the_only_broker_gets_its_requested_pause() -> None:
    network = Network(failure("unavailable", retry_after_s=5.0), answer())
    network.transport().call(ONCE)
    assert network.pauses == [5.0]


def test_too_few_replicas_are_not_tried_at_another_broker() -> None:
    network = Network(failure("not_enough_replicas", retry_after_s=2.0), answer())
    network.transport("http://one:1,http://two:2").call(ONCE)
    assert network.pauses == [2.0]


def test_an_unreachable_broker_is_excluded_longer_each_time() -> None:
    gone = NotSent("refused")
    network = Network(gone, answer())
    transport = network.transport("http://one:1,http://two:2")
    transport.call(GET)
    for left_out_s in (1.0, 2.0, 4.0):
        asked = len(network.asked)
        network.now += left_out_s - 0.05
        transport.call(GET)
        assert network.asked[asked][0] == "http://two:2"
        network.now += 0.1
        network.outcomes = [gone, answer()]
        transport.call(GET)
        assert [url for url, _ in network.asked[asked + 1 :]] == ["http://one:1", "http://two:2"]


def test_a_read_near_its_partition_goes_to_the_leader_and_may_be_forwarded() -> None:
    network = Network(metadata("http://two:2"), answer())
    transport = network.transport()
    transport.metadata(["t"])
    transport.call(Request("POST", "/v1/groups/g/receive", b"{}", repeatable=True, near=("t", 0)))
    url, head = network.asked[-1]
    assert url == "http://two:2"
    assert b"PortalMQ-No-Forward" not in head


def test_only_the_first_try_is_marked_as_the_first() -> None:
    network = Network(NoAnswer("gone"), failure("unavailable"), answer())
    network.transport().call(Request("POST", "/v1/groups/g/receive", b"{}", repeatable=True, marks_first_try=True))
    assert [b"PortalMQ-First-Try: 1" in head for _, head in network.asked] == [True, False, False]


def test_a_connection_that_broke_during_the_first_try_makes_the_next_one_a_repeat() -> None:
    network = Network(NoAnswer("gone", stale=True), answer())
    network.transport().call(Request("POST", "/v1/groups/g/receive", b"{}", repeatable=True, marks_first_try=True))
    assert [b"PortalMQ-First-Try: 1" in head for _, head in network.asked] == [True, False]


def test_a_silent_leader_holds_a_batch_no_longer_than_a_few_seconds() -> None:
    batch = Request("POST", "/v1/topics/t/messages", b"{}", repeatable=True, leader_of=("t", 0))
    assert batch.try_timeout_s == 5.0
    assert Request("GET", "/v1/topics").try_timeout_s < Request("PUT", "/v1/topics/t").try_timeout_s
    assert Request("POST", "/receive", wait_s=20).try_timeout_s == 25.0


def test_a_pause_of_less_than_a_second_is_sent_too() -> None:
    network = Network(failure("backpressure", retry_after_s=0.25), answer())
    network.outcomes[0].headers["retry-after"] = "1"
    network.transport().call(ONCE)
    assert network.pauses == [0.25]


def test_a_leader_under_another_scheme_is_ignored() -> None:
    network = Network(metadata("http://two:2"), answer())
    transport = network.transport("https://one:1")
    transport.metadata(["t"])
    transport.call(TO_LEADER)
    assert network.asked[-1][0] == "https://one:1", "the token would be sent unencrypted"


def idle(transport: Transport) -> list[Connection]:
    assert isinstance(transport._pool, ConnectionPool)
    return [connection for host in transport._pool._hosts.values() for connection in host.idle]


# --- over real sockets -----------------------------------------------------------------------------------------------


def test_connections_are_kept_alive() -> None:
    with ScriptedBroker() as broker:
        transport = Transport(broker.url)
        transport.call(GET)
        transport.call(GET)
        transport.close()
        assert len({call.connection for call in broker.calls}) == 1


def test_a_connection_that_the_broker_closed_while_idle_is_replaced_without_a_pause() -> None:
    with ScriptedBroker() as broker:
        pauses: list[float] = []
        transport = Transport(broker.url, pause=pauses.append)
        transport.call(ONCE)
        [connection] = idle(transport)
        broker.drop_connections()
        wait_until(lambda: not connection.looks_alive(0.0), "it is closed")
        transport.call(ONCE)
        transport.close()
        assert len(broker.calls) == 2
        assert pauses == []


def test_a_connection_that_breaks_under_a_repeatable_request_is_replaced_without_a_pause() -> None:
    with ScriptedBroker() as broker:
        pauses: list[float] = []
        transport = Transport(broker.url, pause=pauses.append)
        transport.call(GET)
        broker.script("GET", "/v1/metadata", [hang_up])
        transport.call(GET)
        transport.close()
        assert pauses == []


def test_a_connection_that_breaks_under_a_request_that_is_not_repeatable_ends_unknown() -> None:
    with ScriptedBroker() as broker:
        transport = Transport(broker.url)
        transport.call(ONCE)
        broker.script("POST", "/v1/producers", [lose_answer])
        with pytest.raises(errors.Unavailable) as caught:
            transport.call(ONCE)
        transport.close()
        assert caught.value.outcome == "unknown"
        assert len(broker.calls) == 2


def test_a_broker_that_does_not_answer_in_time_leaves_the_outcome_unknown() -> None:
    answered = threading.Event()
    with ScriptedBroker() as broker:
        broker.script("POST", "/v1/producers", [hold(answered)])
        transport = Transport(broker.url, timeout_s=0.2)
        with pytest.raises(errors.Unavailable, match="no answer within") as caught:
            transport.call(ONCE)
        answered.set()
        transport.close()
        assert caught.value.outcome == "unknown"


def test_each_request_of_a_connection_has_its_own_time() -> None:
    answered = threading.Event()
    with ScriptedBroker() as broker:
        broker.script("GET", "/v1/metadata", [hold(answered)])
        connection = Connection(parse_address(broker.url), 60.0, None)
        head = b"GET /v1/metadata HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.exchange("GET", head, b"", 60.0, Watch(0.001, 0.001, lambda: bool(answered.set())))
        assert 0 < connection._recv_timeout_s < 60.0, "a pause before the answer counts towards the limit"
        for timeout_s in (60.0, 60.0, 50.0):
            connection.exchange("GET", head, b"", timeout_s)
            assert connection._socket.gettimeout() == timeout_s
        connection.close()


def test_closing_ends_a_call_that_waits_for_its_answer() -> None:
    answered = threading.Event()
    with ScriptedBroker() as broker:
        broker.script("GET", "/v1/metadata", [hold(answered)])
        transport = Transport(broker.url)
        failures: list[BaseException] = []

        def ask() -> None:
            with pytest.raises(errors.Unavailable) as caught:
                transport.call(GET)
            failures.append(caught.value)

        thread = threading.Thread(target=ask)
        thread.start()
        broker.wait_for(lambda: len(broker.calls) == 1)
        transport.close()
        thread.join(10)
        answered.set()
        assert failures


def test_a_large_body_arrives_whole() -> None:
    with ScriptedBroker() as broker:
        body = bytes(range(256)) * 16_384
        transport = Transport(broker.url)
        broker.script("PUT", "/v1/topics/t", [refuse(409, "topic_exists")])
        with pytest.raises(errors.TopicExists):
            transport.call(Request("PUT", "/v1/topics/t", body, repeatable=True))
        transport.close()
        assert broker.calls[0].body == body


def test_importing_the_package_loads_neither_http_nor_other_packages() -> None:
    code = "import sys, portalmq; print([m for m in sys.modules if m in ('http.client', 'click', 'portalmq.broker')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    import portalmq

    assert all(getattr(portalmq, name) for name in portalmq.__all__)
    assert set(portalmq.__all__) >= {cls.__name__ for cls in errors.ERRORS_BY_CODE.values() if cls.__name__ != "Error"}
    assert portalmq.__version__
    with pytest.raises(AttributeError):
        _ = portalmq.Nothing


# --- a paused leader -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_brokers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedBroker, ScriptedBroker]]:
    """Two brokers; metadata names the first as leader. A request that hangs would hang for an hour."""
    for name in ("TO_LEADER_TIMEOUT_S", "LONG_POLL_GRACE_S", "REQUEST_TIMEOUT_S"):
        monkeypatch.setattr(f"portalmq.transport.request.{name}", 3_600.0)
    monkeypatch.setattr("portalmq.transport.calls.METADATA_TIMEOUT_S", 3_600.0)
    monkeypatch.setattr(
        "portalmq.consumers.receiver.LOOK_UP_WITHIN_S", 3_600.0
    )  # a pause of the machine must not change the leader
    monkeypatch.setattr("portalmq.transport.calls.ANYWHERE_TIMEOUT_S", 3_600.0)
    for name in ("FLOW_S", "ASK_OTHERS_WITHOUT_FLOW_S", "ASK_OTHERS_AFTER_S"):
        monkeypatch.setattr(f"portalmq.transport.calls.{name}", 0.05)
    with ScriptedBroker() as old, ScriptedBroker() as new:
        yield old, new


def test_a_send_to_a_paused_leader_goes_to_the_current_one(
    two_brokers: tuple[ScriptedBroker, ScriptedBroker],
) -> None:
    old, new = two_brokers
    still = threading.Event()
    with Producer([old.url, new.url]) as producer:
        producer.send("t", b"1").result(30)
        old.script("POST", "/v1/topics/t/messages", [hold(still)])
        future = producer.send("t", b"2")
        new.fill("t", [b"1"])
        (stamp,) = old.stamps
        new.stamps[stamp] = (0, 1)
        new.wait_for(lambda: len(new.calls_of("GET", "/v1/metadata")) >= 2)
        assert not new.calls_of("POST", "/v1/topics/t/messages"), "the client waits for a leader that has not changed"
        new.leader_epoch = 2
        assert future.result(60).offset == 1
        (sent,) = (call.batch().producer for call in new.calls_of("POST", "/v1/topics/t/messages"))
        assert sent is not None
        assert (sent.id, sent.sequence) == (stamp[2], 1), "the same identity at either broker"
        still.set()


def test_a_receive_at_a_paused_leader_continues_at_the_next_one(
    two_brokers: tuple[ScriptedBroker, ScriptedBroker],
) -> None:
    old, new = two_brokers
    still = threading.Event()

    def stand_still(broker: ScriptedBroker, call: Call) -> Reply:
        new.leader_epoch = 2  # after the receive has arrived: an earlier one would go to the next leader at once
        return hold(still)(broker, call)

    old.fill("t", [])
    old.script("POST", "/v1/groups/g/receive", [stand_still])
    new.fill("t", [b"1"])
    with Consumer("t", group="g", bootstrap=[old.url, new.url]) as consumer:
        assert consumer.poll(60)[0].value == b"1"
        (first,) = old.calls_of("POST", "/v1/groups/g/receive")
        (second,) = new.calls_of("POST", "/v1/groups/g/receive")
        assert first.json()["attempt_id"] == second.json()["attempt_id"]
        still.set()


class Watched(Network):
    """The first broker is silent until the watch ends the wait; during it the client learns of leaders."""

    def __init__(self, *learned: HttpAnswer) -> None:
        super().__init__(answer())
        self.learned = list(learned)
        self.watches = 0
        self.client: Transport

    def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, watch: Watch | None = None
    ) -> HttpAnswer:
        if method == "POST" and watch is not None and address.url == "http://one:1":
            for told in self.learned:
                self.outcomes = [told]
                self.client.metadata(["t"])
                self.watches += 1
                if watch.gives_up():
                    self.outcomes = [answer()]
                    raise NoAnswer("it is silent, and another broker leads by now")
            raise AssertionError("it waits on")
        return super().exchange(address, method, head, body, timeout_s)


def test_a_wait_at_an_old_leader_ends_when_another_call_learns_the_new_one() -> None:
    network = Watched(metadata("http://one:1", 1), metadata("http://one:1", 2), metadata("http://two:2", 3))
    network.client = transport = network.transport("http://one:1,http://two:2")
    network.outcomes = [metadata("http://one:1", 1)]
    transport.metadata(["t"])
    transport.call(Request("POST", "/v1/topics/t/messages", b"{}", repeatable=True, leader_of=("t", 0)))
    assert network.watches == 3, "the client waits for a broker that still leads"
    assert network.asked[-1][0] == "http://two:2"


# --- excluded brokers ------------------------------------------------------------------------------------------------


def test_exclusions_are_short_while_another_broker_is_starting() -> None:
    now = [0.0]
    book = ClusterMetadata(["http://starting:1", "http://back:1"], lambda: now[0])
    starting, back = book.known
    for _ in range(9):
        book.mark_unreachable(back)
    book.mark_busy(starting, 1.0)
    now[0] = 2.5
    assert book.other_than(starting) == back
    book.answered(starting)
    book.mark_unreachable(back)
    now[0] = 20.0
    assert book.other_than(starting) is None, "one answering broker is enough"


def test_exclusions_are_short_while_no_broker_answers() -> None:
    now = [0.0]
    book = ClusterMetadata(["http://ending:1", "http://back:1"], lambda: now[0])
    ending, back = book.known
    for _ in range(9):
        book.mark_unreachable(back)
    assert book.any() == ending
    book.mark_unreachable(ending)
    now[0] = 2.5
    book.mark_unreachable(ending)
    assert book.any() == back
