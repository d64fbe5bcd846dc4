"""Commits of very many receipts are checked with pauses and stay atomic."""

from __future__ import annotations

import pytest
from support.domain import running
from support.outputs import commit, outputs, receive, send, settled, there

from portalmq import wire
from portalmq.broker.queues import commit as commit_module
from portalmq.broker.queues.commit import OutputMessage
from portalmq.errors import InvalidRequest, MessageTooLarge, StaleReceipt


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as it:
        yield it


@pytest.fixture
def in_small_parts(monkeypatch):
    """Check commits in small parts. Call `meanwhile` in the given pause, and record the pauses."""
    monkeypatch.setattr(commit_module, "RECEIPTS_A_TURN", 3)

    def during(pause: int = -1, meanwhile=lambda: None) -> list[int]:
        pauses: list[int] = []

        def give_way() -> None:
            pauses.append(len(pauses))
            if len(pauses) - 1 == pause:
                meanwhile()

        monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", give_way)
        monkeypatch.setattr(commit_module, "give_way", give_way)
        return pauses

    return during


def leased(fixture, at_once: int) -> list:
    send(fixture, *map(str, range(10)))
    return [message for _ in range(0, 10, at_once) for message in receive(fixture, at_once)]


PAUSES = pytest.mark.parametrize("pause", [0, 3])


@pytest.mark.parametrize("at_once", [1, 10])
def test_a_commit_of_very_many_receipts_is_checked_with_pauses_and_done_whole(fixture, in_small_parts, at_once):
    messages = leased(fixture, at_once)
    pauses = in_small_parts()
    first = commit(fixture, messages[::2] + messages[1:2], outputs("A"))
    assert first.acked == 6
    assert len(pauses) >= 2
    assert commit(fixture, messages[::2] + messages[1:2], outputs("A")) == first
    assert commit(fixture, messages[3::2], outputs("B")).acked == 4
    settled(fixture)
    assert there(fixture) == ["A", "B"]
    assert fixture.broker.describe_group("g").lag == 0


@PAUSES
@pytest.mark.parametrize(("at_once", "number"), [(1, 0), (1, 9), (10, 4)])
def test_an_ack_during_the_check_of_a_commit_refuses_it(fixture, in_small_parts, at_once, pause, number):
    messages = leased(fixture, at_once)
    in_small_parts(pause, lambda: fixture.broker.settlement.settle("g", [messages[number].receipt]))
    with pytest.raises(StaleReceipt, match="1 of 10 messages are done"):
        commit(fixture, messages, outputs("A"))
    settled(fixture)
    assert there(fixture) == []
    assert fixture.broker.describe_group("g").in_flight == 9


@PAUSES
def test_a_lease_that_moves_on_during_the_check_of_a_commit_refuses_it(fixture, in_small_parts, pause):
    messages = leased(fixture, 2)

    def passes_on() -> None:
        fixture.clock.advance(60_000)
        receive(fixture, 1)

    in_small_parts(pause, passes_on)
    with pytest.raises(StaleReceipt, match="1 of 10 leases have expired or moved on"):
        commit(fixture, messages, outputs("A"))
    settled(fixture)
    assert there(fixture) == []
    assert fixture.broker.describe_group("g").lag == 10


@PAUSES
def test_a_large_commit_sent_twice_at_once_is_done_once(fixture, in_small_parts, pause):
    messages = leased(fixture, 2)
    twins = []
    in_small_parts(pause, lambda: twins.append(commit(fixture, messages, outputs("A"))))
    assert [commit(fixture, messages, outputs("A"))] == twins
    settled(fixture)
    assert there(fixture) == ["A"]


@PAUSES
def test_a_large_commit_does_nothing_to_a_group_that_is_created_again_during_it(fixture, in_small_parts, pause):
    """The receipts of the new group have the same numbers."""
    messages = leased(fixture, 1)

    def made_anew() -> None:
        fixture.broker.group_admin.delete("g")
        assert len(receive(fixture)) == 10

    in_small_parts(pause, made_anew)
    with pytest.raises(InvalidRequest, match="earlier group"):
        commit(fixture, messages, outputs("A"))
    settled(fixture)
    assert there(fixture) == []
    assert fixture.broker.describe_group("g").in_flight == 10


class Walked(list[OutputMessage]):
    """Publications that count their iterations."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_outputs_for_many_topics_are_iterated_twice_with_pauses(fixture, in_small_parts, monkeypatch):
    monkeypatch.setattr(commit_module, "OUTPUTS_A_TURN", 3)
    publications = Walked([each for name in "abcdef" for each in outputs(name, topic=f"out-{name}")])
    fixture.broker.group_commits._outputs(publications)  # this creates the topics
    publications.walks, pauses = 0, in_small_parts()
    made = fixture.broker.group_commits._outputs(publications)
    assert [(each.topic, each.record.value) for each in made] == [(f"out-{name}", name.encode()) for name in "abcdef"]
    assert (publications.walks, len(pauses)) == (2, 2)


def test_an_output_that_its_topic_does_not_take_is_named_by_its_place_among_those_of_the_topic(fixture):
    fixture.broker.create_topic("small", wire.CreateTopic(config={"max_message_bytes": 1_024}))
    publications = [*outputs("a", "b"), *outputs("c", "x" * 2_000, topic="small")]
    with pytest.raises(MessageTooLarge, match="message 1 has 2000 bytes, topic 'small'"):
        fixture.broker.group_commits._outputs(publications)
