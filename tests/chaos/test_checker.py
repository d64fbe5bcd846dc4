"""The checker of histories, with a good history and at least one bad one for each rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.checker import ACK, CLAIM, COMMIT, COMMIT_OFFSET, DEAD, EXTEND, GRANT, NACK, RULES, check, output_of
from chaos.evidence import ControlRecord, Evidence, Log, Stored, Workload
from chaos.history import OK, REFUSED, UNKNOWN, Act

WORKLOAD = Workload(
    partitions={"t": 1, "poison": 1, "poison.dlq": 1, "in": 1, "out": 1},
    queue_groups={"workers": ("t",), "strict": ("poison",), "transform": ("in",)},
    stream_groups={"readers": ("t",)},
    outputs={"in": "out"},
    dead_letters={"poison": ("poison.dlq", "strict")},
)


def act(kind: str, at: float, asked: dict, got: dict | None = None, *, actor: str = "a", outcome: str = OK) -> Act:
    return Act(kind, actor, at, asked, at + 0.5, outcome, got or {})


def sent(topic: str, value: str, offset: int, at: float, **more: object) -> Act:
    return act("send", at, {"topic": topic, "value": value, "once": True, **more}, {"partition": 0, "offset": offset})


def shown(kind: str, group: str, topic: str, at: float, *messages: tuple[int, str]) -> Act:
    return act(kind, at, {"group": group}, {"messages": [(topic, 0, offset, value) for offset, value in messages]})


def log(end: int, *records: ControlRecord, source: dict | None = None, **messages: str) -> Log:
    """A log with messages `m3="value"` at offset 3, and their rows."""
    held = {int(name[1:]): Stored(value, (source or {}).get(int(name[1:]))) for name, value in messages.items()}
    rows = [("message", offset, message.value) for offset, message in held.items()]
    rows += [("record", record.offset, repr(record)) for record in records]
    return Log(end, held, list(records), rows)


def record(offset: int, kind: int, group: str, *body: object, epoch: int = 1) -> ControlRecord:
    return ControlRecord(offset, epoch, kind, group, list(body))


def three() -> tuple[tuple[int, str], ...]:
    return (1, "one"), (2, "two"), (3, "three")


def good() -> Evidence:
    """Two replicas of each log. Message 3 of `t` is nacked, and leased and acked the second time."""
    t = log(
        12,
        record(4, GRANT, "workers", [[1, 4, 1]], 4, 1_000, 5_000),
        record(5, ACK, "workers", [[1, 3]], 1_100),
        record(6, NACK, "workers", [[3, 4, 1_200]], 1_200),
        record(7, GRANT, "workers", [[3, 4, 2]], 4, 1_300, 5_300),
        record(8, EXTEND, "workers", [[3, 4]], 6_300, 1_400),
        record(9, ACK, "workers", [[3, 4]], 1_500),
        record(10, CLAIM, "readers", "m", 1, 0, 1_000),
        record(11, COMMIT_OFFSET, "readers", 4, "m", 1, 2_000),
        m1="one",
        m2="two",
        m3="three",
    )
    poison = log(
        5,
        record(3, ACK, "strict", [[1, 2]], 1_000),
        record(4, DEAD, "strict", [[2, 3, 3]], 1_000),
        m1="fine",
        m2="bad",
    )
    logs = {
        "t": t,
        "poison": poison,
        "poison.dlq": log(2, m1="bad", source={1: ("poison", 0, 2)}),
        "in": log(3, record(2, COMMIT, "transform", b"id", 1_000, [], [[1, 2]]), m1="input"),
        "out": log(2, m1=output_of("input")),
    }
    acts = [
        *(sent("t", value, offset, float(offset)) for offset, value in three()),
        act("send", 4.0, {"topic": "t", "value": "large"}, outcome=REFUSED),
        act("send", 4.5, {"topic": "t", "value": "lost"}, outcome=UNKNOWN),
        sent("poison", "fine", 1, 1.0),
        sent("poison", "bad", 2, 2.0),
        sent("in", "input", 1, 1.0),
        shown("receive", "workers", "t", 5.0, *three()),
        act("ack", 6.0, {"group": "workers"}, {"done": [("t", 0, 1), ("t", 0, 2)]}),
        shown("receive", "workers", "t", 7.0, (3, "three")),
        act("ack", 8.0, {"group": "workers"}, {"done": [("t", 0, 3)]}),
        shown("receive", "strict", "poison", 5.0, (1, "fine"), (2, "bad")),
        act(
            "poll",
            5.0,
            {"group": "readers", "joined": 4.5},
            {"messages": [("t", 0, offset, value) for offset, value in three()]},
        ),
        act("offsets", 5.5, {"group": "readers"}, {"offsets": [("t", 0, 0, 10)]}),
        act("commit", 6.0, {"group": "readers", "positions": [("t", 0, 4)]}),
        act("offsets", 7.0, {"group": "readers"}, {"offsets": [("t", 0, 4, 12)]}),
        shown("poll", "transform", "in", 5.0, (1, "input")),
        act(
            "transform",
            6.0,
            {"group": "transform", "topic": "in", "outputs": [output_of("input")], "positions": []},
            {"done": [("in", 0, 1)]},
        ),
        act("read", 5.0, {"topic": "t", "partition": 0, "offset": 0}, {"next": 12, "messages": list(three())}),
        act("lock", 1.0, {"name": "red", "owner": "x"}, {"token": 1}),
        act("check", 2.0, {"name": "red", "owner": "x"}, {"token": 1}),
        act("lock", 3.0, {"name": "red", "owner": "y"}, {"token": 2}),
    ]
    copy = {
        name: Log(each.high_watermark, dict(each.messages), list(each.records), list(each.rows))
        for name, each in logs.items()
    }
    return Evidence(WORKLOAD, acts, {(name, 0): {1: each, 2: copy[name]} for name, each in logs.items()})


def broken_by(change: Callable[[Evidence], object]) -> set[str]:
    evidence = good()
    change(evidence)
    return {name for name, verdict in check(evidence).items() if verdict.violations}


def logs_of(evidence: Evidence, topic: str = "t") -> list[Log]:
    return list(evidence.logs[topic, 0].values())


def without(offset: int, topic: str = "t") -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        for each in logs_of(evidence, topic):
            each.messages.pop(offset, None)

    return change


def stored(offset: int, value: str, topic: str = "t", source: tuple | None = None) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        for each in logs_of(evidence, topic):
            each.messages[offset] = Stored(value, source)

    return change


def added(*acts: Act) -> Callable[[Evidence], None]:
    return lambda evidence: evidence.acts.extend(acts)


def recorded(topic: str, new: ControlRecord) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        for each in logs_of(evidence, topic):
            each.records.append(new)
            each.records.sort(key=lambda one: one.offset)

    return change


def removed(topic: str, offset: int) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        for each in logs_of(evidence, topic):
            each.records[:] = [one for one in each.records if one.offset != offset]

    return change


def sends_swapped(evidence: Evidence) -> None:
    one, two, *_ = (act for act in evidence.acts if act.kind == "send")
    one.got, two.got = two.got, one.got


def all_deliveries(evidence: Evidence, kind: str, topic: str, offset: int) -> None:
    for one in evidence.acts:
        if one.kind == kind:
            one.got["messages"] = [each for each in one.got["messages"] if tuple(each[:3]) != (topic, 0, offset)]


def replica_lacks_a_row(evidence: Evidence) -> None:
    logs_of(evidence)[1].rows.pop(1)


def replica_is_damaged(evidence: Evidence) -> None:
    logs_of(evidence)[1].damage.append("page 3 is never used")


def partition_is_on_one_broker(evidence: Evidence) -> None:
    del evidence.logs["t", 0][2]


DELAYED = {"topic": "t", "value": "one", "delay_s": 30.0}
BAD = {
    "what is acked is stored": [without(3), stored(3, "lost")],
    "what is stored is delivered": [
        lambda evidence: all_deliveries(evidence, "receive", "t", 2),
        lambda evidence: all_deliveries(evidence, "poll", "t", 3),
        stored(4, "lost"),
    ],
    "nothing is phantom": [
        stored(4, "never sent"),
        added(shown("receive", "workers", "t", 5.0, (4, "never sent"))),
        added(
            act("read", 5.0, {"topic": "t", "partition": 0, "offset": 9}, {"next": 10, "messages": [(9, "damaged:")]})
        ),
    ],
    "nothing refused is there": [stored(4, "large"), added(shown("poll", "readers", "t", 5.0, (4, "large")))],
    "one offset has one value": [
        added(shown("receive", "workers", "t", 5.0, (3, "two"))),
        lambda evidence: logs_of(evidence)[1].messages.update({3: Stored("two")}),
        added(act("read", 5.0, {"topic": "t", "partition": 0, "offset": 3}, {"next": 4, "messages": [(3, "one")]})),
    ],
    "order of sending is order of offsets": [
        sends_swapped,
        added(act("send", 9.0, {"topic": "t", "value": "lost"}, {"partition": 0, "offset": 0}, actor="b")),
    ],
    "what has an identity is stored once": [stored(4, "three")],
    "browsing rises and skips nothing": [
        added(
            act("read", 5.0, {"topic": "t", "partition": 0, "offset": 0}, {"next": 4, "messages": list(three()[:2])})
        ),
        added(
            act("read", 5.0, {"topic": "t", "partition": 0, "offset": 0}, {"next": 4, "messages": list(three()[::-1])})
        ),
        added(act("read", 5.0, {"topic": "t", "partition": 0, "offset": 4}, {"next": 3, "messages": []})),
    ],
    "committed offsets rise and skip nothing": [
        recorded("t", record(12, COMMIT_OFFSET, "readers", 3, "m", 1, 2_000)),
        added(act("offsets", 9.0, {"group": "readers"}, {"offsets": [("t", 0, 3, 12)]})),
        added(act("commit", 1.0, {"group": "readers", "positions": [("t", 0, 4)]})),
    ],
    "nothing is delivered after its ack": [
        added(shown("receive", "workers", "t", 7.0, (1, "one"))),
        added(shown("poll", "transform", "in", 7.0, (1, "input"))),
        added(act("poll", 9.0, {"group": "readers", "joined": 8.0}, {"messages": [("t", 0, 3, "three")]})),
        recorded("t", record(12, GRANT, "workers", [[3, 4, 3]], 4, 9_000, 9_900)),
    ],
    "leases of a message do not overlap": [
        removed("t", 6),
        recorded("t", record(4, GRANT, "workers", [[2, 3, 1]], 4, 4_999, 8_000)),
    ],
    "dead letters are copied once": [
        without(1, "poison.dlq"),
        stored(2, "bad", "poison.dlq", ("poison", 0, 2)),
        stored(2, "fine", "poison.dlq", ("poison", 0, 1)),
        recorded("poison", record(5, ACK, "strict", [[2, 3]], 1_000)),
        stored(3, "bad", "poison.dlq", ("poison", 0, 7)),
    ],
    "commits are whole": [without(1, "out"), stored(2, output_of("input"), "out"), without(1, "in")],
    "nothing delayed is early": [added(act("send", 1.0, DELAYED, outcome=UNKNOWN))],
    "fencing tokens rise": [
        added(act("lock", 4.0, {"name": "red", "owner": "z"}, {"token": 2})),
        added(act("check", 4.0, {"name": "red", "owner": "x"}, {"token": 1})),
        added(act("lock", 4.0, {"name": "red", "owner": "z"}, {"token": 0})),
    ],
    "replicas are equal": [replica_lacks_a_row, replica_is_damaged, partition_is_on_one_broker],
}


def test_a_good_history_breaks_no_rule_and_each_rule_examines_something() -> None:
    verdicts = check(good())
    assert {name: verdict.violations for name, verdict in verdicts.items() if verdict.violations} == {}
    assert [name for name, verdict in verdicts.items() if not verdict.checked] == ["nothing delayed is early"]


def test_each_rule_has_a_bad_history() -> None:
    assert set(BAD) == set(RULES)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, bad in BAD.items() for number in range(len(bad))]
)
def test_a_bad_history_is_noticed(name: str, number: int) -> None:
    assert name in broken_by(BAD[name][number])


def test_a_lease_of_an_earlier_leader_does_not_bind_the_next_one() -> None:
    regranted = recorded("t", record(4, GRANT, "workers", [[2, 3, 1]], 4, 1_001, 8_000, epoch=2))
    assert "leases of a message do not overlap" not in broken_by(regranted)


def test_an_ack_finishes_what_it_names_ahead_of_its_grant() -> None:
    def change(evidence: Evidence) -> None:
        removed("poison", 3)(evidence)
        recorded("poison", record(3, ACK, "strict", [], 1_000, [[0, 0, 1]]))(evidence)

    assert broken_by(change) == set()


def test_a_receive_that_began_before_the_ack_was_answered_may_have_the_message() -> None:
    assert broken_by(added(shown("receive", "workers", "t", 6.2, (1, "one")))) == set()


def test_a_member_that_joined_before_the_commit_may_get_messages_again() -> None:
    again = act("poll", 9.0, {"group": "readers", "joined": 6.2}, {"messages": [("t", 0, 3, "three")]})
    assert broken_by(added(again)) == set()


def test_a_listing_that_knows_less_of_the_log_may_be_older() -> None:
    assert broken_by(added(act("offsets", 9.0, {"group": "readers"}, {"offsets": [("t", 0, 3, 11)]}))) == set()


def test_the_time_of_a_delayed_message_says_nothing_once_a_clock_was_moved() -> None:
    def change(evidence: Evidence) -> None:
        evidence.acts.append(act("send", 1.0, DELAYED, outcome=UNKNOWN))
        evidence.clock_moved_at = 2.0

    assert "nothing delayed is early" not in broken_by(change)
