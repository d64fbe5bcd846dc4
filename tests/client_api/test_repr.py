"""The repr of the client's objects: short, and without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from portalmq import Admin, AsyncConsumer, AsyncProducer, Consumer, Lock, Message, Producer

AT = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Producer(AT, token="s3cret"), f"<Producer at {AT}: 0 messages unsent>"),
        (lambda: Producer(AT, producer_name="billing"), f"<Producer 'billing' at {AT}: 0 messages unsent>"),
        (lambda: Consumer("a", "b", group="g", bootstrap=AT), f"<Consumer of a, b in queue group 'g' at {AT}>"),
        (lambda: Lock("l", AT, token="s3cret"), f"<Lock 'l' at {AT}: not held>"),
        (lambda: Admin(AT, token="s3cret"), f"<Admin at {AT}>"),
        (lambda: AsyncProducer(AT), f"<AsyncProducer at {AT}: 0 messages unsent>"),
        (lambda: AsyncConsumer("a", bootstrap=AT), f"<AsyncConsumer of a in queue group 'default' at {AT}>"),
    ],
)  # fmt: skip
def test_a_repr_shows_the_address_and_not_the_token(make: Any, shown: str) -> None:
    assert repr(make()) == shown


def test_the_repr_of_a_closed_client_says_so() -> None:
    producer, consumer = Producer(AT), Consumer("a", bootstrap=AT)
    producer.close()
    consumer.close()
    assert repr(producer) == f"<Producer at {AT}: closed>"
    assert repr(consumer).endswith(": closed>")


def test_a_message_shows_the_beginning_of_its_value() -> None:
    message = Message("t", 2, 7, b"k", b"x" * 1_000_000, {}, "text/plain", 0, 3, "the receipt")
    assert repr(message) == f"<Message t 2-7 key=b'k' delivery=3 value={b'x' * 40!r}... 1000000 bytes>"
    assert repr(Message("t", 0, 1, None, b"{}", {}, "text/plain", 0)) == "<Message t 0-1 value=b'{}'>"
