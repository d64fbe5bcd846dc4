"""Fetch sessions: one long poll for all partitions that a broker follows, bounded and fair."""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent
import pytest
from support.replicas import CLUSTER, TOPIC_ID, Group, eventually, replicas, send

from portalmq.broker.core.replica.events import Fetch, FetchReceived, Refresh
from portalmq.broker.core.replica.isr import NEVER_MS
from portalmq.broker.core.replica.state import VOUCHED_FOR_MS
from portalmq.broker.partition.fetch_answers import (
    BelowStartAnswer,
    DivergingAnswer,
    RecordsAnswer,
    RejectedAnswer,
    echo_of,
)
from portalmq.broker.replication.fetch_protocol import (
    AskedPartition,
    ReplicaFetchAnswer,
    ReplicaFetchRequest,
    decode_answer,
    decode_request,
    encode,
    fetch_of,
)
from portalmq.broker.replication.fetcher import Fetchers
from portalmq.errors import Backpressure, InvalidRequest

# Longer than a test waits: an answer within the test did not come from the end of the poll.
PARKED_MS = 60_000
WITHIN_S = 50.0


@pytest.fixture
def group(tmp_path, monkeypatch) -> Iterator[Group]:
    """A leader whose second replica is played by the test."""
    monkeypatch.setattr("portalmq.broker.replication.fetch_server.WAIT_MS_MAX", PARKED_MS)
    with replicas(tmp_path, 2, least=1, isr=(1,)) as it:
        it.hosts[2].fetchers.close()
        eventually(lambda: it.leader.serves)
        yield it


def request(turn: int = 1, *asked: AskedPartition, wait_ms: int = 0, **more) -> bytes:
    fields = {"cluster_id": CLUSTER, "session": 100, "max_bytes": 1 << 20, "left": [], "incarnation": 1, **more}
    return encode(
        ReplicaFetchRequest(
            fields["cluster_id"],
            2,
            fields["incarnation"],
            "store-2",
            fields["session"],
            turn,
            wait_ms,
            fields["max_bytes"],
            list(asked),
            fields["left"],
            fields.get("answered_ms"),
        )
    )


def asked(offset: int, number: int = 1, *, epoch: int = 1, last: int = 1, hw: int = 0, partition: int = 0):
    return AskedPartition(TOPIC_ID, partition, None, epoch, offset, offset, last, number, hw)


def ask(group: Group, body: bytes) -> ReplicaFetchAnswer:
    return decode_answer(group.hosts[1].replication.serve(body, None))


def only(answer: ReplicaFetchAnswer):
    assert answer.known
    (each,) = answer.partitions
    return each


def test_records_come_at_once_and_with_the_high_watermark(group):
    base, _ = send(group.leader, "a", "b")
    found = only(ask(group, request(1, asked(base), wait_ms=PARKED_MS)))
    assert isinstance(found, RecordsAnswer)
    assert len(found.frames) == 1
    assert found.high_watermark == base + 2
    assert found.echo == (1, base, 1, 1)


def test_a_poll_without_records_ends_after_its_time(group):
    end = group.leader.replica.next_offset
    began = time.monotonic()
    answer = ask(group, request(1, asked(end, hw=end), wait_ms=300))
    assert (answer.known, answer.partitions) == (True, [])
    assert 0.25 < time.monotonic() - began < WITHIN_S


def test_a_parked_poll_is_answered_when_something_is_written(group):
    end = group.leader.replica.next_offset
    poll = gevent.spawn(ask, group, request(1, asked(end, hw=end), wait_ms=PARKED_MS))
    gevent.sleep(0.05)
    assert not poll.ready()
    send(group.leader, "a", acks="leader")
    assert only(poll.get(timeout=WITHIN_S)).frames


def test_a_high_watermark_alone_is_answered_within_a_moment(group):
    end = group.leader.replica.next_offset
    began = time.monotonic()
    found = only(ask(group, request(1, asked(end, hw=end - 1), wait_ms=PARKED_MS)))
    assert (found.frames, found.high_watermark) == ([], end)
    assert time.monotonic() - began < WITHIN_S, "the answer does not wait for the end of the poll"


def test_a_fetch_stays_parked_over_several_polls_until_it_is_answered(group):
    end = group.leader.replica.next_offset
    ask(group, request(1, asked(end, hw=end)))
    ask(group, request(2))
    send(group.leader, "a", acks="leader")
    assert only(ask(group, request(3))).frames
    assert ask(group, request(4)).partitions == [], "the fetch has been answered"


def test_a_later_request_ends_the_poll_that_is_parked(group):
    end = group.leader.replica.next_offset
    poll = gevent.spawn(ask, group, request(1, asked(end, hw=end), wait_ms=PARKED_MS))
    gevent.sleep(0.05)
    ask(group, request(2))
    assert poll.get(timeout=WITHIN_S).partitions == []


def test_a_late_request_is_ignored(group):
    end = group.leader.replica.next_offset
    ask(group, request(1))
    ask(group, request(3, asked(end, 2, hw=end)))
    ask(group, request(2, asked(end, 1, hw=end)))
    send(group.leader, "a", acks="leader")
    assert only(ask(group, request(4))).echo.number == 2


def test_a_copy_of_a_request_whose_answer_may_be_lost_begins_the_session_anew(group):
    base, _ = send(group.leader, "a")
    assert only(ask(group, request(1, asked(base)))).frames
    assert not ask(group, request(1, asked(base))).known
    ask(group, request(3))
    assert ask(group, request(2)).known, "it was overtaken"
    assert not ask(group, request(2)).known
    assert not ask(group, request(3)).known


def test_a_fetch_that_is_repeated_is_answered_once(group):
    base, _ = send(group.leader, "a")
    assert only(ask(group, request(1, asked(base)))).frames
    assert ask(group, request(2, asked(base))).partitions == []
    assert only(ask(group, request(3, asked(base, 2)))).frames


def test_a_fetch_of_a_partition_no_longer_followed_is_forgotten(group):
    end = group.leader.replica.next_offset
    ask(group, request(1, asked(end, hw=end)))
    assert group.leader.serving.parked
    ask(group, request(2, left=[(TOPIC_ID, 0)]))
    assert not group.leader.serving.parked
    send(group.leader, "a", acks="leader")
    assert ask(group, request(3)).partitions == []


def test_an_unknown_session_has_to_begin_first(group):
    assert not ask(group, request(2)).known
    assert ask(group, request(1)).known
    assert ask(group, request(1, session=101)).known
    assert not ask(group, request(2, session=100)).known, "an older session does not return"
    assert not ask(group, request(1, session=200, incarnation=0)).known, "nor does one of an earlier incarnation"
    assert ask(group, request(1, session=1, incarnation=2)).known


def test_a_new_session_ends_the_parked_poll_of_the_old_one(group):
    end = group.leader.replica.next_offset
    poll = gevent.spawn(ask, group, request(1, asked(end, hw=end), wait_ms=PARKED_MS))
    gevent.sleep(0.05)
    ask(group, request(1, session=101))
    assert poll.get(timeout=WITHIN_S).partitions == []
    assert not group.leader.serving.parked


def test_an_answer_is_bounded_and_the_next_one_continues_it(group):
    base, _ = send(group.leader, "x" * 50_000)
    for _ in range(9):
        send(group.leader, "x" * 50_000)
    sizes = []
    offset, turn = base, 1
    while offset < group.leader.replica.next_offset:
        found = only(ask(group, request(turn, asked(offset, turn), max_bytes=120_000)))
        sizes.append(len(found.frames))
        offset, turn = offset + len(found.frames), turn + 1
    assert sum(sizes) == 10
    assert max(sizes) == 3, "at most one batch more than fits"
    assert only(ask(group, request(turn, asked(base, turn), max_bytes=1))).frames, "at least one batch"


def test_other_epochs_are_rejected_and_a_later_one_is_stored(group):
    end = group.leader.replica.next_offset
    rejected = only(ask(group, request(1, asked(end, epoch=0))))
    assert isinstance(rejected, RejectedAnswer)
    assert rejected.leader_epoch == 1
    rejected = only(ask(group, request(2, asked(end, 2, epoch=2), wait_ms=PARKED_MS)))
    assert isinstance(rejected, RejectedAnswer)
    assert rejected.leader_epoch == 2
    assert not group.leader.replica.leading
    assert group.leader.state_file.highest_epoch() == 2, "the epoch is durable before the answer"


def test_a_follower_with_another_log_gets_the_offset_where_they_differ(group):
    base, _ = send(group.leader, "a")
    diverging = only(ask(group, request(1, asked(base + 5))))
    assert isinstance(diverging, DivergingAnswer)
    assert (diverging.epoch, diverging.end) == (1, base + 1)


def test_a_fetch_below_the_log_start_gets_the_start_and_what_precedes_it(group):
    for number in range(5):
        send(group.leader, f"m{number}")
    group.leader.retention.purge(4)
    found = only(ask(group, request(1, asked(0, last=0))))
    assert isinstance(found, BelowStartAnswer)
    assert (found.offset, found.messages_before) == (4, 3)
    assert found.epochs == [(1, 0)]


def test_a_fetch_of_a_partition_not_yet_here_waits_for_it(group):
    host = group.hosts[1]
    partition, host.partition = host.partition, None
    end = partition.replica.next_offset
    poll = gevent.spawn(ask, group, request(1, asked(end - 1, last=1), wait_ms=PARKED_MS))
    gevent.sleep(0.05)
    assert not poll.ready()
    host.partition = partition
    host.on_opened(partition)
    assert only(poll.get(timeout=WITHIN_S)).frames


def test_a_step_down_rejects_parked_fetches(group):
    end = group.leader.replica.next_offset
    poll = gevent.spawn(ask, group, request(1, asked(end, hw=end), wait_ms=PARKED_MS))
    gevent.sleep(0.05)
    group.elect(None, isr=(1,))
    assert isinstance(only(poll.get(timeout=WITHIN_S)), RejectedAnswer)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", encode([1, 2, 3])])
def test_an_invalid_fetch_is_refused(group, body):
    with pytest.raises(InvalidRequest):
        group.hosts[1].replication.serve(body, None)


def test_another_cluster_is_refused(group):
    with pytest.raises(InvalidRequest, match="cluster"):
        ask(group, request(1, cluster_id="another"))


def test_appends_that_wait_for_followers_are_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.partition.appending.UNCOMMITTED_BYTES_MAX", 1_000)
    with replicas(tmp_path, 2) as group:
        eventually(lambda: group.leader.serves and group.agree())
        group.cut(2)
        waiting = gevent.spawn(send, group.leader, "x" * 2_000)
        gevent.sleep(0.05)
        with pytest.raises(Backpressure):
            send(group.leader, "y")
        group.mend(2)
        waiting.get(timeout=WITHIN_S)
        send(group.leader, "y")


def test_a_poll_that_ends_during_the_linger_of_a_high_watermark_does_not_spin(group, monkeypatch):
    send(group.leader, "a")
    looks: list[int] = []
    collect = group.hosts[1].replication._collect

    def counted(session, max_bytes):
        looks.append(max_bytes)
        return collect(session, max_bytes)

    monkeypatch.setattr(group.hosts[1].replication, "_collect", counted)
    end = group.leader.replica.next_offset
    (answer,) = ask(group, request(1, asked(end), wait_ms=20)).partitions
    assert isinstance(answer, RecordsAnswer)
    assert answer.high_watermark == end
    assert len(looks) <= 3


def test_an_answer_that_fails_in_one_replica_reaches_the_others(tmp_path):
    class Followed:
        """The part of a partition that a fetcher uses."""

        def __init__(self, number: int) -> None:
            self.topic_id, self.number, self.high_watermark = TOPIC_ID, number, 0
            self.following = self
            self.replies: list[object] = []

        def replied(self, answer) -> None:
            self.replies.append(answer)
            if self.number == 0:
                raise RuntimeError("a bug")

    class OneAnswer:
        """A leader that answers only the first request."""

        def call_bytes(self, broker_id: int, name: str, body: bytes, *, timeout_s: float) -> bytes:
            named = decode_request(body)
            if named.turn > 1:
                gevent.sleep(timeout_s)
            answers = [
                RejectedAnswer(each.topic_id, each.partition, echo_of(fetch_of(named, each)), 1)
                for each in named.partitions
            ]
            return encode(ReplicaFetchAnswer(True, answers))

    with replicas(tmp_path, 1) as one:
        fetchers = Fetchers(one.hosts[1], OneAnswer())
        both = [Followed(0), Followed(1)]
        for partition in both:
            fetchers.follow(partition, 2, Fetch(1, 1, "store-1", 1, 0, 0, 0, 1))
        eventually(lambda: all(partition.replies for partition in both))
        fetchers.close()


# --- what a fetch vouches for ----------------------------------------------------------------------------------------


def said_after(group: Group, monkeypatch) -> list[int | None]:
    """Return the times after which the fetches were sent, as the leader's core gets them."""
    told: list[int | None] = []
    step = group.leader.step

    def stepping(event) -> None:
        if isinstance(event, FetchReceived):
            told.append(event.sent_after_ms)
        step(event)

    monkeypatch.setattr(group.leader, "step", stepping)
    return told


def test_a_request_confirms_the_leader_at_the_time_of_the_previous_answer(group, monkeypatch):
    told = said_after(group, monkeypatch)
    end = group.leader.replica.next_offset
    first = ask(group, request(1, asked(end, 1, hw=end), answered_ms=0))
    assert 0 < first.answered_ms <= group.clock.now_ms()
    ask(group, request(2, asked(end, 2, hw=end), answered_ms=first.answered_ms))
    assert told == [NEVER_MS, first.answered_ms]


def test_a_request_without_that_time_confirms_the_leader_now(group, monkeypatch):
    told = said_after(group, monkeypatch)
    end = group.leader.replica.next_offset
    ask(group, request(1, asked(end, hw=end)))
    assert told == [None]


def test_a_request_renews_the_fetches_that_it_does_not_leave_without_a_word_to_their_partitions(group, monkeypatch):
    """However many they are, a request costs the same."""
    told = said_after(group, monkeypatch)
    end = group.leader.replica.next_offset
    insync = group.leader.replica.in_sync

    def heard() -> tuple[int, int]:
        known = insync._follower(2)
        return known.heard_ms, known.vouched_ms

    first = ask(group, request(1, asked(end, hw=end), answered_ms=0))
    before = heard()
    gevent.sleep(0.002)
    second = ask(group, request(2, answered_ms=first.answered_ms))
    renewed = heard()
    assert renewed > before
    assert renewed[1] == first.answered_ms
    gevent.sleep(0.002)
    ask(group, request(3, left=[(TOPIC_ID, 0)], answered_ms=second.answered_ms))
    assert heard() == renewed, "the follower may follow another leader by now"
    assert told == [NEVER_MS]


def test_an_answered_fetch_is_not_renewed(group):
    end = group.leader.replica.next_offset
    first = ask(group, request(1, asked(end, hw=end), answered_ms=0))
    send(group.leader, "a", acks="leader")
    second = ask(group, request(2, answered_ms=first.answered_ms))
    assert only(second).frames
    known = group.leader.replica.in_sync._follower(2)
    renewed = known.heard_ms, known.vouched_ms
    gevent.sleep(0.002)
    ask(group, request(3, answered_ms=second.answered_ms))
    assert group.leader.replica.in_sync._follower(2) is known
    assert (known.heard_ms, known.vouched_ms) == renewed


def test_followers_confirm_their_leader_as_long_as_they_poll(tmp_path):
    with replicas(
        tmp_path, 2, lag_ms=1_000_000
    ) as group:  # the silent replica stays in the ISR: a leader alone delivers
        eventually(lambda: group.leader.serves)
        eventually(lambda: group.leader.replica.may_deliver(group.clock.now_ms()))
        group.cut(2)
        eventually(lambda: not group.leader.replica.may_deliver(group.clock.now_ms()))
        assert group.leader.replica.may_serve(group.clock.now_ms()), "the lease of the control plane is valid"
        group.mend(2)
        eventually(lambda: group.leader.replica.may_deliver(group.clock.now_ms()))


def test_a_successor_knows_until_when_the_previous_leader_was_confirmed(tmp_path):
    with replicas(tmp_path, 2) as group:
        eventually(lambda: group.leader.serves)
        host = group.hosts[2]
        eventually(lambda: host.fetchers.heard_ms(group.partition(2)) > 0)
        group.cut(1)
        gevent.sleep(0)
        heard_ms = host.fetchers.heard_ms(group.partition(2))
        group.elect(2)
        eventually(lambda: group.partition(2).replica.leading)
        replica = group.partition(2).replica
        assert not replica.may_settle(heard_ms + VOUCHED_FOR_MS)
        assert host.fetchers.heard_ms(group.partition(2)) >= heard_ms


def test_a_successor_that_reads_of_its_election_itself_knows_it_too(tmp_path):
    """Found by the simulated shell: it answered acks at once, while the previous leader could still deliver."""
    with replicas(tmp_path, 2) as group:
        eventually(lambda: group.leader.serves)
        successor, fetchers = group.partition(2), group.hosts[2].fetchers
        eventually(lambda: fetchers.heard_ms(successor) > 0)
        group.cut(1)
        group.cut(2)  # nobody tells it
        group.elect(2)
        heard_ms = fetchers.heard_ms(successor)
        successor.isr_updates.send(Refresh(1))
        eventually(lambda: successor.replica.leading)
        assert not successor.replica.may_settle(heard_ms + VOUCHED_FOR_MS)
