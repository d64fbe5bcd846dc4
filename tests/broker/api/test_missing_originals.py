"""A copy of a message that is not there: what is certain, and what an earlier try may have done."""

from __future__ import annotations

from types import SimpleNamespace

import gevent
import pytest
from support.domain import running
from support.held_writes import held_writes

from portalmq import wire
from portalmq.broker.api.copies import _find
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import MessageNotFound


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic())
        send(fixture)
        yield fixture


def send(fixture, acks: wire.Acks = "all") -> int:
    offset = fixture.broker.topics.get("t").local[0].replica.next_offset
    fixture.broker.produce("t", ProduceRequest([Record(b"a")], acks=acks))
    return offset


def find(fixture, offset: int, *, is_keyed: bool = False):
    return _find(SimpleNamespace(broker=fixture.broker), "t", 0, offset, is_keyed=is_keyed)


def test_a_message_that_is_not_committed_yet_is_not_denied(fixture, monkeypatch):
    with held_writes(monkeypatch, fixture.broker.topics.get("t").local[0]) as writes:
        offset = send(fixture, acks="none")
        finding = gevent.spawn(find, fixture, offset)
        gevent.idle()
        assert not finding.ready()
        writes.let_through()
        assert finding.get().offset == offset


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("where", ["purged", "at the end", "beyond the end"])
def test_an_earlier_try_under_the_key_may_have_copied_a_message_that_is_gone(fixture, is_keyed, where):
    offset = send(fixture)
    if where == "purged":
        fixture.broker.browser.purge("t", partition=0, before_offset=None)
    else:
        offset = fixture.broker.topics.get("t").local[0].replica.next_offset + (where == "beyond the end")
    with pytest.raises(MessageNotFound) as told:
        find(fixture, offset, is_keyed=is_keyed)
    assert told.value.outcome == ("unknown" if is_keyed else "not_applied")
