"""Requests that no thread waits for: what is read of them, where their connections go, and messages sent by them."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
from support.scripted_broker import ScriptedBroker, lose_answer, refuse

from portalmq import MessageTooLarge, Producer
from portalmq.begun import REQUEST_BYTES_MAX, Begun, begin
from portalmq.connection import Address, Answer, ConnectionPool, NoAnswer
from portalmq.transport import Transport

WITHIN_S = 10.0
HEAD = b"GET / HTTP/1.1\r\n\r\n"
FIRST = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """A broker's end of connections, by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WITHIN_S)
        self.address = Address("http", "127.0.0.1", self._listener.getsockname()[1])
        self.pool = ConnectionPool()
        self.connections: list[socket.socket] = []

    def keep_one(self) -> socket.socket:
        """Have an idle connection in the pool."""

        def serve() -> None:
            connection, _ = self._listener.accept()
            connection.settimeout(WITHIN_S)
            connection.recv(1_000)
            connection.sendall(FIRST)
            self.connections.append(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        assert self.pool.exchange(self.address, "GET", HEAD, b"", WITHIN_S).body == b"ok"
        thread.join(WITHIN_S)
        return self.connections[-1]

    def begin(self, body: bytes = b"") -> Begun | None:
        return begin(self.pool, self.address, HEAD, body, WITHIN_S)

    def close(self) -> None:
        self.pool.close()
        for each in [self._listener, *self.connections]:
            each.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    try:
        yield made
    finally:
        made.close()


def wait_readable(begun: Begun) -> None:
    assert select.select([begun.fileno()], [], [], WITHIN_S)[0]


def read_whole(begun: Begun) -> Answer:
    while True:
        wait_readable(begun)
        answer = begun.read()
        if answer is not None:
            return answer


def test_an_answer_is_read_as_it_comes_and_the_connection_is_used_again(peer: Peer) -> None:
    connection = peer.keep_one()
    for _ in range(2):
        begun = peer.begin(b"body")
        assert begun is not None
        assert begun.read() is None, "nothing is there yet, and nobody waits"
        assert connection.recv(1_000) == HEAD + b"body"
        for piece in (b"HTTP/1.1 201 Created\r\nContent-", b"Length: 5\r\nX-Y:  z \r\n\r\nhe", b"llo"):
            assert begun.read() is None
            connection.sendall(piece)
            wait_readable(begun)
        answer = begun.read()
        assert answer is not None
        assert (answer.status, answer.headers["x-y"], answer.body) == (201, "z", b"hello")


def test_only_a_kept_connection_is_used_and_only_for_what_goes_out_at_once(peer: Peer) -> None:
    assert peer.begin() is None, "there is none yet"
    peer.keep_one()
    assert peer.begin(b"x" * REQUEST_BYTES_MAX) is None
    assert begin(peer.pool, Address("https", "127.0.0.1", peer.address.port), HEAD, b"", WITHIN_S) is None
    first = peer.begin()
    assert first is not None
    assert peer.begin() is None, "it has one request at a time"
    first.end()
    assert peer.begin() is None, "one that was given up is closed"


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"x" * 70_000,
        b"",
    ],
)
def test_what_is_no_whole_answer_is_none(peer: Peer, said: bytes) -> None:
    connection = peer.keep_one()
    begun = peer.begin()
    assert begun is not None
    connection.sendall(said)
    connection.shutdown(socket.SHUT_WR)
    with pytest.raises(NoAnswer):
        read_whole(begun)
    assert peer.begin() is None, "nothing that was cut off is used again"


def test_a_connection_that_the_broker_closes_after_its_answer_is_not_kept(peer: Peer) -> None:
    connection = peer.keep_one()
    begun = peer.begin()
    assert begun is not None
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
    assert read_whole(begun).body == b"ok"
    assert peer.begin() is None


def test_a_pool_that_is_closed_ends_what_was_begun(peer: Peer) -> None:
    peer.keep_one()
    begun = peer.begin()
    assert begun is not None
    peer.pool.close()
    with pytest.raises(NoAnswer):
        read_whole(begun)


# --- messages --------------------------------------------------------------------------------------------------------


class Hand:
    """A producer, and the means to bring its messages to the leader."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.pool = ConnectionPool()
        self.transport = Transport(broker.url, pool=self.pool)
        self.producer = Producer(transport=self.transport, linger_ms=0)

    def bring(self, value: str, topic: str = "t") -> int:
        """The offset of a message that goes by hand."""
        message = self.producer.take_in_hand(topic, value, None)
        assert message is not None
        assert message.request is not None
        way = self.transport.way(message.request)
        assert way is not None
        begun = begin(self.pool, *way, message.request.body, WITHIN_S)
        assert begun is not None
        try:
            message.end(read_whole(begun))
        except NoAnswer:
            message.end(None)
        return message.future.result(WITHIN_S).offset


@pytest.fixture
def hand() -> Iterator[Hand]:
    with ScriptedBroker() as broker:
        made = Hand(broker)
        with made.producer:
            yield made


def test_messages_in_hand_and_by_senders_are_stamped_in_one_row(hand: Hand) -> None:
    assert hand.producer.take_in_hand("t", "x", None) is None, "nobody has met the topic"
    assert hand.producer.send("t", "0").result(WITHIN_S).offset == 0
    assert [hand.bring("1"), hand.bring("2")] == [1, 2]
    assert hand.producer.send("t", "3").result(WITHIN_S).offset == 3
    assert hand.bring("4") == 4
    assert hand.broker.values("t") == [b"0", b"1", b"2", b"3", b"4"]
    stamps = [call.batch().producer for call in hand.broker.calls_of("POST", "/v1/topics/t/messages")]
    assert [stamp and stamp.sequence for stamp in stamps] == [0, 1, 2, 3, 4]
    assert len({stamp and stamp.id for stamp in stamps}) == 1


def test_a_message_whose_answer_is_lost_is_repeated_under_its_stamp(hand: Hand) -> None:
    hand.producer.send("t", "0").result(WITHIN_S)
    hand.broker.script("POST", "/v1/topics/t/messages", [lose_answer])
    assert hand.bring("1") == 1
    hand.producer.send("t", "2").result(WITHIN_S)
    assert hand.broker.values("t") == [b"0", b"1", b"2"]
    assert len(hand.broker.calls_of("POST", "/v1/topics/t/messages")) == 4


def test_a_message_that_is_refused_for_now_is_the_senders_affair(hand: Hand) -> None:
    hand.producer.send("t", "0").result(WITHIN_S)
    hand.broker.script("POST", "/v1/topics/t/messages", [refuse(503, "unavailable")] * 3)
    assert hand.bring("1") == 1
    assert hand.broker.values("t") == [b"0", b"1"]


def test_a_message_that_is_refused_for_good_is_told_so_and_the_next_one_goes(hand: Hand) -> None:
    hand.producer.send("t", "0").result(WITHIN_S)
    hand.broker.script("POST", "/v1/topics/t/messages", [refuse(413, "message_too_large")])
    with pytest.raises(MessageTooLarge) as refused:
        hand.bring("too large")
    assert refused.value.outcome == "not_applied"
    assert hand.bring("1") == 1
    assert hand.broker.values("t") == [b"0", b"1"]


def test_a_message_that_could_not_be_begun_is_sent_by_a_sender(hand: Hand) -> None:
    hand.producer.send("t", "0").result(WITHIN_S)
    message = hand.producer.take_in_hand("t", "1", None)
    assert message is not None
    assert hand.producer.take_in_hand("t", "2", None) is None, "its lane is in one hand at a time"
    later = hand.producer.send("t", "2")
    message.leave()
    assert (message.future.result(WITHIN_S).offset, later.result(WITHIN_S).offset) == (1, 2)


def test_where_messages_come_together_none_is_taken_in_hand_until_one_came_alone(hand: Hand) -> None:
    hand.producer.send("t", "0").result(WITHIN_S)
    first = hand.producer.take_in_hand("t", "1", None)
    assert first is not None
    together = [hand.producer.send("t", text) for text in ("2", "3")]
    first.leave()
    for future in together:
        future.result(WITHIN_S)
    hand.producer.flush(WITHIN_S)
    assert hand.producer.take_in_hand("t", "4", None) is None
    hand.producer.send("t", "4").result(WITHIN_S)
    hand.producer.flush(WITHIN_S)
    assert hand.bring("5") == 5
