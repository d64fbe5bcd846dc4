"""Calls that are sent now, and whose answers are read later."""

from __future__ import annotations

import threading

import pytest
from support.scripted_broker import ScriptedBroker, hang_up, hold, refuse

from portalmq import Backpressure, Unavailable
from portalmq.transport.request import Request
from portalmq.transport.transport import Transport

METADATA = Request("GET", "/v1/metadata", repeatable=True)


def test_the_answer_is_read_after_other_calls() -> None:
    answer = threading.Event()
    with ScriptedBroker() as broker:
        broker.script("GET", "/v1/metadata", [hold(answer)])
        transport = Transport(broker.url)
        call = transport.begin(METADATA)
        assert call is not None
        broker.wait_for(lambda: len(broker.calls) == 1)
        assert transport.call(METADATA).status == 200
        answer.set()
        assert call.answer().status == 200
        again = transport.begin(METADATA)
        assert again is not None
        assert again.answer().status == 200
        assert len({call.connection for call in broker.calls}) == 2, "its connection is used again"


def test_a_call_that_cannot_be_sent_is_left_to_the_next_one() -> None:
    with ScriptedBroker() as broker:
        url = broker.url
        closed = Transport(url)
        closed.hang_up()
        assert closed.begin(METADATA) is None
    assert Transport(url).begin(METADATA) is None


def test_a_lost_answer_may_be_asked_for_again() -> None:
    with ScriptedBroker() as broker:
        broker.script("GET", "/v1/metadata", [ScriptedBroker.work, hang_up, refuse(429, "backpressure")])
        transport = Transport(broker.url)
        transport.call(METADATA)
        for error, outcome in ((Unavailable, "unknown"), (Backpressure, "not_applied")):
            call = transport.begin(METADATA)
            assert call is not None
            with pytest.raises(error) as failed:
                call.answer()
            assert (failed.value.retryable, failed.value.outcome) == (True, outcome)
        assert transport.call(METADATA).status == 200


def test_an_answer_that_does_not_come_in_time_is_given_up() -> None:
    answer = threading.Event()
    with ScriptedBroker() as broker:
        broker.script("GET", "/v1/metadata", [hold(answer)])
        transport = Transport(broker.url)
        call = transport.begin(METADATA)
        assert call is not None
        with pytest.raises(Unavailable, match="no answer within"):
            call.answer(0.01)
        answer.set()
        assert transport.call(METADATA).status == 200, "on another connection"
