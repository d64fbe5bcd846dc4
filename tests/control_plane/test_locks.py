"""Locks: their holders, waiters and tokens; the table over a plane that loses answers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interrupted import Interrupted

from portalmq.control_plane.locks import (
    LOCK_FLOOR,
    PATIENCE_MS,
    QUEUE_MAX,
    LockOutcome,
    LockState,
    LockTable,
    LockTicket,
    VersionedLock,
    digest_of,
    lock_path,
    released,
    remaining_ms,
    renewed,
    requested,
    until_turn_ms,
)
from portalmq.control_plane.plane import DATA_BYTES_MAX, Create, Delete
from portalmq.control_plane.state import encode
from portalmq.errors import Backpressure, Fenced, LockNotFound

LIVE = {1: 10, 2: 20, 3: 30}
TTL = 5_000


def ticket(owner: str, broker_id: int = 1) -> LockTicket:
    return LockTicket(digest_of(owner), broker_id, broker_id * 10)


def held_by(owner: str | None, *queue: LockTicket, token: int = 7) -> LockState:
    return LockState(token, owner, TTL, 0, queue)


class TestWhoGetsIt:
    def test_a_free_lock_goes_to_the_caller_under_the_next_token(self) -> None:
        outcome = requested(held_by(None), "a", TTL, 0, LIVE, None)
        assert outcome == LockOutcome(LockState(8, "a", TTL), granted=True)

    def test_a_held_lock_is_not_granted(self) -> None:
        assert not requested(held_by("a"), "b", TTL, TTL - 1, LIVE, None).granted

    def test_a_lock_whose_ttl_has_passed_goes_to_the_next_owner(self) -> None:
        outcome = requested(held_by("a"), "b", TTL, TTL, LIVE, None)
        assert outcome.granted
        assert (outcome.state.owner, outcome.state.token) == ("b", 8)

    def test_a_holder_that_acquires_again_keeps_its_token_and_restarts_its_ttl(self) -> None:
        outcome = requested(held_by("a"), "a", 9_000, 100, LIVE, None)
        assert outcome.granted
        assert (outcome.state.token, outcome.state.ttl_ms, outcome.state.beat) == (7, 9_000, 1)

    def test_a_late_copy_of_an_earlier_request_does_not_shorten_the_lease(self) -> None:
        lock = requested(held_by("a"), "a", 500, 100, LIVE, None).state
        assert (lock.token, lock.ttl_ms, lock.beat) == (7, TTL, 1)
        assert not requested(lock, "b", TTL, TTL - 1, LIVE, None).granted

    def test_a_holder_that_returns_after_its_ttl_gets_a_new_token(self) -> None:
        assert requested(held_by("a"), "a", TTL, TTL, LIVE, None).state.token == 8

    def test_a_waiter_is_queued_at_the_end_once(self) -> None:
        lock = requested(held_by("a", ticket("b")), "c", TTL, 0, LIVE, ticket("c")).state
        assert [each.owner_digest for each in lock.queue] == [digest_of("b"), digest_of("c")]
        assert requested(lock, "c", TTL, 0, LIVE, ticket("c")).state == lock

    def test_a_waiter_that_moves_to_another_broker_keeps_its_place(self) -> None:
        lock = held_by("a", ticket("b", 1), ticket("c", 1))
        moved = requested(lock, "b", TTL, 0, LIVE, ticket("b", 2)).state
        assert moved.queue == (ticket("b", 2), ticket("c", 1))

    def test_no_room_to_wait_is_reported(self) -> None:
        lock = held_by("a", *(ticket(f"w{number}") for number in range(QUEUE_MAX)))
        with pytest.raises(Backpressure):
            requested(lock, "late", TTL, 0, LIVE, ticket("late"))
        assert requested(lock, "w5", TTL, 0, LIVE, ticket("w5", 2)).state.queue[5] == ticket("w5", 2)

    def test_a_full_queue_fits_into_a_node(self) -> None:
        queue = [LockTicket(digest_of(str(number)), 2**31, 2**31) for number in range(QUEUE_MAX)]
        assert len(encode(LockState(2**53, "\x00" * 190, 2**31, 2**31, tuple(queue)))) < DATA_BYTES_MAX


class TestTurns:
    def test_the_first_in_the_queue_takes_a_free_lock_at_once_the_second_waits(self) -> None:
        lock = held_by(None, ticket("a", 1), ticket("b", 2))
        assert until_turn_ms(lock, digest_of("a"), 0, LIVE) == 0
        assert until_turn_ms(lock, digest_of("b"), 0, LIVE) == PATIENCE_MS

    def test_a_new_waiter_does_not_overtake_earlier_ones(self) -> None:
        assert not requested(held_by(None, ticket("a", 2)), "new", TTL, 0, LIVE, None).granted

    def test_tickets_of_dead_or_restarted_brokers_do_not_count(self) -> None:
        gone, older = LockTicket(digest_of("x"), 9, 1), LockTicket(digest_of("y"), 2, 19)
        lock = held_by(None, gone, older, ticket("b", 3))
        outcome = requested(lock, "b", TTL, 0, LIVE, ticket("b", 3))
        assert outcome.granted
        assert outcome.state.queue == ()

    def test_a_silent_broker_delays_the_others_only_briefly(self) -> None:
        lock = held_by(None, ticket("a", 2), ticket("b", 2), ticket("c", 3))
        assert until_turn_ms(lock, digest_of("c"), 0, LIVE) == PATIENCE_MS  # once for a broker, not for each ticket
        assert until_turn_ms(lock, digest_of("c"), PATIENCE_MS, LIVE) == 0

    def test_a_waiters_turn_counts_from_the_end_of_the_ttl(self) -> None:
        lock = held_by("h", ticket("a", 1), ticket("b", 2))
        assert until_turn_ms(lock, digest_of("a"), 1_000, LIVE) == TTL - 1_000
        assert until_turn_ms(lock, digest_of("b"), TTL + 400, LIVE) == PATIENCE_MS - 400

    def test_acquiring_drops_skipped_waiters_and_keeps_later_ones(self) -> None:
        lock = held_by(None, ticket("a", 2), ticket("b", 1), ticket("c", 2))
        outcome = requested(lock, "b", TTL, PATIENCE_MS, LIVE, ticket("b", 1))
        assert outcome.state.queue == (ticket("c", 2),)


class TestTheHolder:
    def test_renewing_raises_the_beat_and_nothing_else(self) -> None:
        lock = held_by("a", ticket("b"))
        assert renewed(lock, "a", 7, None) == msgspec.structs.replace(lock, beat=1)

    def test_a_renewal_may_lengthen_the_ttl_and_a_late_copy_of_one_does_not_shorten_it(self) -> None:
        lock = renewed(held_by("a"), "a", 7, 9_000)
        assert (lock.ttl_ms, lock.beat) == (9_000, 1)
        assert renewed(lock, "a", 7, 500) == msgspec.structs.replace(lock, beat=2)

    @pytest.mark.parametrize(("owner", "token"), [("a", 6), ("b", 7), ("a", 8)])
    def test_a_stale_or_foreign_token_is_fenced(self, owner: str, token: int) -> None:
        for change in (lambda: renewed(held_by("a"), owner, token, None), lambda: released(held_by("a"), owner, token)):
            with pytest.raises(Fenced) as caught:
                change()
            assert caught.value.extra["newest_token"] == 7

    def test_a_second_release_is_fine_until_another_owner_holds_the_lock(self) -> None:
        free = released(held_by("a"), "a", 7)
        assert free.owner is None
        assert released(free, "a", 7) == free
        with pytest.raises(Fenced):
            released(requested(free, "b", TTL, 0, LIVE, None).state, "a", 7)
        with pytest.raises(Fenced):
            renewed(free, "a", 7, None)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["ask", "wait", "renew", "release"]), st.integers(0, 3_000)),
        max_size=60,
    )
)
def test_tokens_rise_with_holders_and_two_never_hold_at_once(steps: list[tuple[str, str, int]]) -> None:
    """Each owner counts the ttl by its own clock from its request on, as a client does."""
    lock, now, since = held_by(None, token=0), 0, 0
    until: dict[str, tuple[int, int]] = {}  # owner -> (token, end of its ttl, by its own count)
    for owner, verb, later in steps:
        now += later
        age, before = now - since, lock
        try:
            if verb in {"ask", "wait"}:
                outcome = requested(lock, owner, TTL, age, LIVE, ticket(owner) if verb == "wait" else None)
                lock = outcome.state
                if outcome.granted:
                    others = [end for name, (_, end) in until.items() if name != owner]
                    assert all(end <= now for end in others)
                    if lock.token != before.token:
                        assert lock.token == before.token + 1
                    until[owner] = (lock.token, now + TTL)
            elif owner in until:
                token, _ = until[owner]
                if verb == "renew":
                    lock = renewed(lock, owner, token, None)
                    until[owner] = (token, now + TTL)
                else:
                    lock = released(lock, owner, token)
                    del until[owner]
        except Fenced:
            assert until.pop(owner)[1] <= now  # a fenced owner knew already that its ttl is over
        assert lock.token >= before.token
        assert len({each.owner_digest for each in lock.queue}) == len(lock.queue)
        if lock.mark != before.mark:
            since = now


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_brokers_that_look_rarely_and_hold_up_requests_never_shorten_a_lease(data: st.DataObject) -> None:
    """Two brokers observe the lock at different times. A request reaches its broker after a delay, and its answer takes
    longer still: the holder counts from the sending, a broker from its observation. A broker may restart empty."""
    lock, now = held_by(None, token=0), 0
    sightings: dict[int, tuple[tuple[int, int, bool], int]] = {}
    ends: dict[str, tuple[int, int]] = {}  # owner -> (token, end of its lease, by its own count)

    def age(broker: int) -> int:
        mark, since = sightings.get(broker, (lock.mark, now))
        sightings[broker] = (lock.mark, since if mark == lock.mark else now)
        return now - sightings[broker][1]

    for _ in range(data.draw(st.sampled_from([40, 10]))):
        now += data.draw(st.sampled_from([0, 1, TTL // 2 + 1, TTL - 1, TTL]))
        broker = data.draw(st.integers(1, 2))
        match data.draw(st.sampled_from(["ask", "wait", "renew", "free", "free", "release", "look", "restart"])):
            case "look":
                age(broker)
            case "restart":
                sightings.pop(broker, None)
            case "free":
                if lock.owner is not None and remaining_ms(lock, age(broker)) == 0:
                    lock = msgspec.structs.replace(lock, owner=None)
            case "renew" | "release" as verb if ends:
                owner = data.draw(st.sampled_from(sorted(ends)))
                token, end = ends[owner]
                if now >= end:  # the owner knows that its lease is over, and stops renewing
                    del ends[owner]
                    continue
                sent_at = now
                now += data.draw(st.sampled_from([0, 50, TTL // 2]))
                try:
                    if verb == "renew":
                        lock = renewed(lock, owner, token, None)
                        ends[owner] = (token, sent_at + TTL)
                    else:
                        lock = released(lock, owner, token)
                        del ends[owner]
                except Fenced:
                    assert ends.pop(owner)[1] <= now
            case "ask" | "wait" as verb:
                owner = data.draw(st.sampled_from("abcd"))
                sent_at = now
                now += data.draw(st.sampled_from([0, 50, TTL // 2, 2 * TTL]))
                before = lock
                outcome = requested(
                    lock, owner, TTL, age(broker), LIVE, ticket(owner, broker) if verb == "wait" else None
                )
                lock = outcome.state
                if outcome.granted and lock.token != before.token:
                    assert lock.token == before.token + 1
                    assert [name for name, (_, end) in ends.items() if end > now and name != owner] == []
                if outcome.granted:
                    ends[owner] = (lock.token, sent_at + TTL)
        age(broker)  # a broker observes its own writes


class Seen:
    """An `observe` that has just seen every mark, except for the ages that a test sets."""

    def __init__(self) -> None:
        self.age_ms = 0
        self.states: list[VersionedLock | None] = []

    def __call__(self, name: str, held: VersionedLock | None) -> int:
        self.states.append(held)
        return self.age_ms


class TestTheTable:
    @pytest.fixture
    def seen(self) -> Seen:
        return Seen()

    @pytest.fixture
    def table(self, plane: Interrupted) -> LockTable:
        return LockTable(plane)

    def test_the_first_acquisition_creates_the_lock(self, table: LockTable, seen: Seen) -> None:
        assert table.ask("l", "a", TTL, seen, LIVE).state == LockState(1, "a", TTL)
        assert not table.ask("l", "b", TTL, seen, LIVE).granted
        assert table.names() == ["l"]

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_a_lost_answer_gives_no_second_token(
        self, plane: Interrupted, table: LockTable, seen: Seen, lost: str
    ) -> None:
        table.ask("other", "x", TTL, seen, LIVE)
        setattr(plane, lost, 1)
        assert table.ask("l", "a", TTL, seen, LIVE).state.token == 1
        setattr(plane, lost, 1)
        assert table.renew("l", "a", 1, None, seen).token == 1
        setattr(plane, lost, 1)
        table.ask("l", "b", TTL, seen, LIVE, ticket=ticket("b"))
        setattr(plane, lost, 1)
        free = table.release("l", "a", 1, seen)
        assert (free.owner, free.token, len(free.queue)) == (None, 1, 1)
        setattr(plane, lost, 1)
        taken = table.ask("l", "b", TTL, seen, LIVE, ticket=ticket("b")).state
        assert (taken.owner, taken.token, taken.queue) == ("b", 2, ())

    def test_tokens_are_reserved_beside_a_lock_that_cannot_be_read(
        self, plane: Interrupted, table: LockTable, seen: Seen
    ) -> None:
        table.ask("l", "a", TTL, seen, LIVE)
        plane.commit(Create("/locks/broken", b"{"), Create("/locks/not.a=name", b""))
        table.reserve_tokens(100)
        assert table.ask("l", "a", TTL, seen, LIVE).state.token == 100
        assert table.ask("m", "a", TTL, seen, LIVE).state.token == 101

    @pytest.mark.parametrize("upto", [99, 100])
    def test_tokens_that_are_reserved_already_stay_as_they_are(
        self, plane: Interrupted, table: LockTable, seen: Seen, upto: int
    ) -> None:
        table.ask("l", "a", TTL, seen, LIVE)
        table.reserve_tokens(100)
        before = plane.get(LOCK_FLOOR), table.read("l")
        table.reserve_tokens(upto)
        assert (plane.get(LOCK_FLOOR), table.read("l")) == before

    def test_a_concurrent_renewal_wins_over_a_judgement_of_expiry(
        self, plane: Interrupted, table: LockTable, seen: Seen
    ) -> None:
        table.ask("l", "a", TTL, seen, LIVE)
        ages = iter([TTL, 0])

        def observe(name: str, held: VersionedLock | None) -> int:
            return next(ages)  # the first observation has an old mark, the second a new one

        plane.meanwhile.append(lambda: table.renew("l", "a", 1, None, seen))
        assert not table.ask("l", "b", TTL, observe, LIVE).granted
        assert table.read("l").value.owner == "a"  # type: ignore[union-attr]

    def test_of_two_concurrent_acquisitions_of_a_free_lock_one_succeeds(
        self, plane: Interrupted, table: LockTable, seen: Seen
    ) -> None:
        plane.meanwhile.append(lambda: table.ask("l", "b", TTL, seen, LIVE))
        assert not table.ask("l", "a", TTL, seen, LIVE).granted
        assert table.read("l").value.owner == "b"  # type: ignore[union-attr]

    def test_tokens_keep_rising_when_a_lock_is_removed_and_created_again(self, table: LockTable, seen: Seen) -> None:
        for token in range(1, 6):
            state = table.ask("l", "a", TTL, seen, LIVE).state
            assert state.token == token
            free = table.release("l", "a", token, seen)
            assert table.remove("l", free.mark)
            assert table.read("l") is None
        assert table.ask("another", "a", TTL, seen, LIVE).state.token == 6

    @pytest.mark.parametrize("verb", ["ask", "renew", "release"])
    def test_a_judgement_of_a_lock_that_is_created_again_is_repeated(
        self, plane: Interrupted, table: LockTable, seen: Seen, verb: str
    ) -> None:
        """The new node begins at the old node's version: the version alone does not distinguish them."""
        mark = table.ask("l", "gone", TTL, seen, LIVE).state.mark
        another = LockTable(plane)

        def made_anew() -> None:
            assert another.remove("l", mark)
            assert another.ask("l", "holder", TTL, Seen(), LIVE).state.token == 2

        plane.meanwhile.append(made_anew)
        ages = iter([TTL, 0, 0])
        if verb == "ask":
            assert not table.ask("l", "b", TTL, lambda *_: next(ages), LIVE).granted
        else:
            with pytest.raises(Fenced):
                table.renew("l", "gone", 1, None, seen) if verb == "renew" else table.release("l", "gone", 1, seen)
        assert table.read("l").value == LockState(2, "holder", TTL)  # type: ignore[union-attr]

    def test_many_unused_locks_are_removed_in_one_step_except_acquired_ones(
        self, plane: Interrupted, table: LockTable, seen: Seen
    ) -> None:
        marks = {
            name: table.release(name, "a", table.ask(name, "a", TTL, seen, LIVE).state.token, seen).mark
            for name in ("k", "l", "m")
        }
        plane.meanwhile.append(lambda: table.ask("l", "b", TTL, seen, LIVE))
        before = plane.commits
        assert table.remove_all({**marks, "not there": (1, 0, False)}) == ["k", "m"]
        assert plane.commits - before == 3
        assert table.names() == ["l"]

    def test_a_zombie_of_a_removed_lock_is_fenced_and_an_unknown_lock_is_not_found(
        self, table: LockTable, seen: Seen
    ) -> None:
        table.remove("l", table.release("l", "a", table.ask("l", "a", TTL, seen, LIVE).state.token, seen).mark)
        with pytest.raises(Fenced):
            table.renew("l", "a", 1, None, seen)
        with pytest.raises(LockNotFound):
            table.release("l", "a", 2, seen)

    def test_a_held_or_awaited_lock_is_not_removed(self, plane: Interrupted, table: LockTable, seen: Seen) -> None:
        mark = table.ask("l", "a", TTL, seen, LIVE).state.mark
        table.renew("l", "a", 1, None, seen)
        assert not table.remove("l", mark)
        table.ask("l", "b", TTL, seen, LIVE, ticket=ticket("b"))
        free = table.release("l", "a", 1, seen)
        assert not table.remove("l", free.mark)
        table.leave("l", {ticket("b")}, seen)
        plane.meanwhile.append(lambda: table.ask("l", "c", TTL, seen, LIVE))
        assert not table.remove("l", free.mark)

    def test_the_floor_and_the_removal_are_one_transaction(
        self, plane: Interrupted, table: LockTable, seen: Seen
    ) -> None:
        free = table.release("l", "a", table.ask("l", "a", TTL, seen, LIVE).state.token, seen)
        plane.lose_answers = 1
        assert not table.remove("l", free.mark)  # it is gone, and its removal raised the floor
        assert table.ask("l", "a", TTL, seen, LIVE).state.token == 2

    def test_only_the_given_ticket_leaves_the_queue(self, table: LockTable, seen: Seen) -> None:
        table.ask("l", "a", TTL, seen, LIVE)
        table.ask("l", "b", TTL, seen, LIVE, ticket=ticket("b", 2))
        table.leave("l", {ticket("b", 1)}, seen)
        assert len(table.read("l").value.queue) == 1  # type: ignore[union-attr]
        table.leave("l", {ticket("b", 2)}, seen)
        assert table.read("l").value.queue == ()  # type: ignore[union-attr]

    def test_an_expiry_is_published_unless_the_lock_was_renewed(self, table: LockTable, seen: Seen) -> None:
        mark = table.ask("l", "a", TTL, seen, LIVE).state.mark
        again = table.renew("l", "a", 1, None, seen)
        table.free("l", mark, seen)
        assert table.read("l").value.owner == "a"  # type: ignore[union-attr]
        table.free("l", again.mark, seen)
        assert remaining_ms(table.read("l").value, 0) == 0  # type: ignore[union-attr]

    def test_without_room_for_more_locks_existing_ones_are_served(self, table: LockTable, seen: Seen) -> None:
        table.ask("l", "a", TTL, seen, LIVE)
        assert table.ask("l", "a", TTL, seen, LIVE, may_create=False).granted
        with pytest.raises(Backpressure):
            table.ask("more", "a", TTL, seen, LIVE, may_create=False)

    def test_every_state_is_reported_to_the_witness(self, plane: Interrupted, table: LockTable, seen: Seen) -> None:
        table.ask("l", "a", TTL, seen, LIVE)
        assert seen.states[0] is None
        assert seen.states[-1].version == plane.get(lock_path("l")).version  # type: ignore[union-attr]
        plane.commit(Delete(lock_path("l"), 0))
        assert plane.get(LOCK_FLOOR) is not None
