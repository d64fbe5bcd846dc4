"""Topics, partitions and groups unknown to a broker: a mirror older than the request never denies them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.domain import Fixture, records, running
from support.replicas import eventually

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.cluster.routing import NoSuchPartition, one_by_one
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.queues import KNOWN, LookAt, MemberOffset
from portalmq.broker.cluster.rpc.streams import Coordinate
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.commit import OutputMessage
from portalmq.control_plane.state import GroupState, TopicState
from portalmq.errors import (
    ERRORS_BY_CODE,
    GroupModeMismatch,
    GroupNotFound,
    MessageNotFound,
    PartitionNotFound,
    TopicNotFound,
    Unavailable,
)


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        it.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield it


def place(fixture: Fixture, number: int = 0) -> TopicPartition:
    return TopicPartition("t", fixture.broker.topics.known("t").state.topic_id, number)


def has_not_read_yet(fixture: Fixture) -> None:
    """Put the broker in the state of one that has just started, or returned after the topic was created."""
    topics = fixture.broker.topics
    topic = topics._topics.pop("t")
    del topics._by_id[topic.state.topic_id]
    for partition in topic.local.values():
        partition.close()


def knows_older(fixture: Fixture, **older: object) -> TopicState:
    topic = fixture.broker.topics.known("t")
    now = topic.state
    topic.state = msgspec.structs.replace(now, **older)
    return now


def refused(error: pytest.ExceptionInfo[Unavailable]) -> tuple[bool, str]:
    return error.value.retryable, error.value.outcome


def brought(fixture: Fixture, at: TopicPartition) -> None:
    """Call the leader of a partition as another broker does."""
    request = LookAt("g", at.topic, at.topic_id, [at.number])
    fixture.broker.leaders.call_one(KNOWN, request, one_by_one(lambda _: True), forward=False)


def test_a_call_about_a_topic_not_yet_known_is_retryable(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.cluster.routing.OWN_PATIENCE_S", 0.05)
    at = place(fixture)
    has_not_read_yet(fixture)
    with pytest.raises(Unavailable) as error:
        brought(fixture, at)
    assert refused(error) == (True, "not_applied")


def test_a_call_about_a_partition_not_yet_known_is_retryable(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.cluster.routing.OWN_PATIENCE_S", 0.05)
    at = place(fixture, 1)
    knows_older(fixture, partitions=1)
    with pytest.raises(Unavailable) as error:
        brought(fixture, at)
    assert refused(error) == (True, "not_applied")


def test_a_call_about_a_deleted_topic_is_refused_for_good(fixture):
    at = place(fixture)
    fixture.broker.delete_topic("t")
    with pytest.raises(TopicNotFound):
        brought(fixture, at)


@pytest.mark.parametrize("known", [1, 2])
def test_a_partition_is_missing_only_if_the_control_plane_has_none(fixture, known):
    knows_older(fixture, partitions=known)
    number = 1 if known == 1 else 2
    broker = fixture.broker
    for use in (
        lambda: broker.produce("t", ProduceRequest(records("a"), partition=number)),
        lambda: broker.browser.purge("t", partition=number, before_offset=None),
    ):
        with pytest.raises(PartitionNotFound) as found:
            use()
        assert type(broker.explain(found.value)) is (Unavailable if known == 1 else NoSuchPartition)
    with pytest.raises(MessageNotFound if known == 2 else Unavailable):
        broker.scheduled_messages.cancel("t", number, 0)


def fetched(fixture: Fixture, number: int) -> None:
    request = contract.FetchRequest([contract.PartitionOffset("t", number, 0)])
    (answer,) = fixture.broker.reader_fetch.fetch(request, None)
    assert answer.error is not None
    raise ERRORS_BY_CODE[answer.error["code"]](answer.error["detail"])


def committed(fixture: Fixture, number: int) -> None:
    asked = contract.PartitionOffset("t", number, 0)
    fixture.broker.offsets.commit("s", contract.CommitOffsetsRequest("a", 1, [asked]))


def committed_with_outputs(fixture: Fixture, number: int) -> None:
    fixture.broker.group_commits.commit_offset("s", "t", number, MemberOffset("a", 1, 0, 0), [], forward=True)


def published_by_a_commit(fixture: Fixture, number: int) -> None:
    published = [OutputMessage("t", *records("a"), partition=number)]
    fixture.broker.group_commits.commit_offset("s", "t", 0, MemberOffset("a", 1, 0, 0), published, forward=True)


def coordinated(fixture: Fixture, number: int) -> None:
    """Call the coordinator as another broker does whose mirror is newer."""
    group = fixture.broker.groups.get("s")
    call = Coordinate("s", group.group_id, "seek", topics=("t",), to="earliest", numbers=(number,))
    fixture.broker.group_coordinators.answer(call)


@pytest.mark.parametrize("known", [1, 2])
@pytest.mark.parametrize(
    "use",
    [
        fetched,
        committed,
        committed_with_outputs,
        published_by_a_commit,
        coordinated,
        lambda it, number: it.broker.group_coordinators.seek("s", "t", "earliest", partition=number, dry_run=False),
        lambda it, number: it.broker.shared_offsets.head("s", "t", number),
        lambda it, number: it.broker.shared_offsets.advance("s", "t", number, 0),
        lambda it, number: it.broker.shared_offsets.first_head("s", "t", [0, number]),
        lambda it, number: it.broker.offset_acks.finish("q", "t", [(number, 0)]),
        lambda it, number: list(it.broker.unfinished.messages("q", "t", after=(number, 0))),
        lambda it, number: it.broker.dead_letters.page("q", "t", limit=1, after=f"{number}-0"),
        lambda it, number: it.broker.dead_letters.drop("q", "t", ids=[f"{number}-0"]),
    ],
)
def test_a_partition_that_may_be_new_is_not_denied(fixture, use, known):
    fixture.broker.put_group("s", {"mode": "stream"})
    fixture.broker.groups.ensure("q")
    fixture.broker.group_coordinators.join("s", contract.JoinRequest(["t"], "a"))
    knows_older(fixture, partitions=known)
    with pytest.raises(PartitionNotFound if known == 2 else Unavailable) as error:
        use(fixture, known)
    assert (error.value.retryable, error.value.outcome) == (known == 1, "not_applied")


def test_a_topic_missing_from_the_mirror_is_looked_up_before_it_is_denied(fixture, monkeypatch):
    """Only the control plane has the topic: the broker waits for it, and does not deny it."""
    topics = fixture.broker.topics
    monkeypatch.setattr(topics, "_auto_create", False)
    monkeypatch.setattr("portalmq.broker.cluster.topics.KNOWN_WITHIN_S", 60.0)
    has_not_read_yet(fixture)
    fixture.broker.mirror.note(None)  # the mirror reads everything again, and calls its subscribers
    assert topics.get_or_create("t").name == "t"
    with pytest.raises(TopicNotFound, match="auto_create_topics"):
        topics.get_or_create("u")


def test_a_group_of_another_mode_may_be_a_deleted_one_of_its_name(fixture):
    groups, group = fixture.broker.groups, fixture.broker.groups.ensure("g")
    earlier = GroupState("g", msgspec.structs.replace(group.config, mode="stream"), "an earlier id")
    groups._remember("g", earlier)
    assert groups.ensure("g") == group
    groups._remember("g", earlier)
    assert groups.get("g", mode="queue") == group
    groups._remember("g", earlier)
    assert groups.get("g", group_id=group.group_id) == group
    fixture.broker.put_group("s", {"mode": "stream"})
    with pytest.raises(GroupModeMismatch):
        groups.ensure("s")


def test_a_group_deleted_here_and_created_again_elsewhere_exists(fixture):
    broker = fixture.broker
    broker.groups.ensure("g")
    broker.group_admin.delete("g")
    with pytest.raises(GroupNotFound):
        broker.groups.get("g")
    made, _ = broker._catalog.put_group("g", {})
    broker.groups._remember("g", None)  # its own record is newer than the mirror's
    assert broker.groups.get("g") == made


def test_a_later_change_in_the_mirror_replaces_what_this_broker_wrote(fixture):
    """The group was created here, then deleted and created again elsewhere with another id and another mode."""
    broker = fixture.broker
    broker.groups.ensure("g")
    broker._catalog.delete_group("g")
    made, _ = broker._catalog.put_group("g", {"mode": "stream"})
    eventually(lambda: broker.mirror.groups.get("g") == made)
    assert broker.groups.find("g") == made
