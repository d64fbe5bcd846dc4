"""The calls between brokers: the table in cluster/rpc lists each of them, and a broker answers each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
from support.domain import running

from portalmq.broker.cluster import rpc
from portalmq.broker.cluster.rpc import (
    BrokerCall,
    OnePartitionCall,
    OneResultCall,
    PartitionCall,
    TopicPartition,
    brokers,
    messages,
    queues,
    schedules,
    streams,
)
from portalmq.errors import Unavailable

FILES = (messages, queues, streams, brokers, schedules)
ROW = re.compile(r"^    (\w+) +(\w+) +([\w\[\]]+)(?: {2,}(.*))?$", re.MULTILINE)


def calls() -> Iterator[tuple[str, BrokerCall]]:
    for module in FILES:
        for call in vars(module).values():
            if isinstance(call, BrokerCall):
                yield f"{module.__name__.rpartition('.')[2]}.py", call


def table() -> list[tuple[str, ...]]:
    """(name, request, answer, note) of each row."""
    assert rpc.__doc__ is not None
    return [(name, request, answer, note or "") for name, request, answer, note in ROW.findall(rpc.__doc__)]


def test_the_table_has_each_call_with_its_structs_and_its_form() -> None:
    shown: dict[str, tuple[str, str, bool, bool, str]] = {}
    file = ""
    for name, request, answer, note in table():
        file = next((word.strip(",;") for word in note.split() if word.strip(",;").endswith(".py")), file)
        shown[name] = (request, answer, note.endswith("one"), note.endswith("one Result"), file)
    defined: dict[str, tuple[str, str, bool, bool, str]] = {}
    for own_file, call in calls():
        answer = str(call.answer) if call.answer in (list[int], list[bool]) else call.answer.__name__
        row = (call.request.__name__, answer, isinstance(call, OnePartitionCall), isinstance(call, OneResultCall))
        defined.setdefault(call.name, (*row, own_file))
    assert shown == defined


def test_each_call_is_answered_and_no_other(tmp_path) -> None:
    with running(tmp_path) as fixture:
        assert fixture.broker.calls.keys() == {call.name for _, call in calls()} | {"fetch"}


PLACES = [TopicPartition("t", "id", 0), TopicPartition("t", "id", 2)]


@pytest.mark.parametrize(
    "request_",
    [
        messages.PurgeCall("t", "id", [0, 1, 2], None),
        messages.Produce("t", "id", "all", None, [messages.Share(number, []) for number in range(3)]),
        queues.Finish("g", "1", [queues.FinishShare("t", "id", number, [number]) for number in range(3)]),
        streams.SeekCall("g", "1", "latest", 0, [TopicPartition("t", "id", number) for number in range(3)]),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_request_is_narrowed_to_the_partitions_of_a_leader(request_) -> None:
    assert [place.number for place in request_.places] == [0, 1, 2]
    narrowed = request_.only(PLACES)
    assert narrowed.places == PLACES
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(narrowed), type=type(request_)) == narrowed


class Wire:
    """Carries a call's answer from one side to the other."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def call(self, broker_id, name, request, kind, *, timeout_s):
        return msgspec.msgpack.decode(self.answer, type=kind)


REQUEST = messages.CancelScheduled("t", "id", 0, 7)


@pytest.mark.parametrize("form", [PartitionCall, OnePartitionCall, OneResultCall])
def test_a_value_comes_back_in_each_form_of_answer(form) -> None:
    call = form("cancel", messages.CancelScheduled, bool, timeout_s=1.0)
    answer = call.encode({PLACES[0]: True}, PLACES[:1])
    assert call.outcomes(Wire(answer), 2, REQUEST, PLACES[:1]) == {PLACES[0]: True}


@pytest.mark.parametrize("form", [PartitionCall, OneResultCall])
def test_an_error_comes_back_as_the_outcome_of_its_partition(form) -> None:
    call = form("cancel", messages.CancelScheduled, bool, timeout_s=1.0)
    answer = call.encode({PLACES[0]: Unavailable("moving", retry_after_s=0.1)}, PLACES[:1])
    (error,) = call.outcomes(Wire(answer), 2, REQUEST, PLACES[:1]).values()
    assert (type(error), error.detail, error.retry_after_s) == (Unavailable, "moving", 0.1)


def test_a_single_answer_raises_its_error() -> None:
    with pytest.raises(Unavailable, match="moving"):
        messages.BROWSE.encode({PLACES[0]: Unavailable("moving")}, PLACES[:1])
