"""The rules that a run's history and logs have to obey. Each has a name, counts what it examined, and lists what
violates it.

`check(evidence)` applies all of them. They use nothing of the broker's code: what a file holds is read as SCHEMA.md
describes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

from chaos.evidence import Evidence, Log, Partition, Place
from chaos.history import OK, REFUSED, Act

# The kinds of control records, as SCHEMA.md numbers them.
GRANT, ACK, NACK, EXTEND, DEAD, COMMIT, CLAIM, COMMIT_OFFSET = 11, 12, 13, 14, 16, 19, 21, 22
EARLY_S = 0.05


@dataclass
class Verdict:
    checked: int = 0
    violations: list[str] = field(default_factory=list)

    def unless(self, holds: object, what: Callable[[], str]) -> None:
        self.checked += 1
        if not holds:
            self.violations.append(what())


Rule = Callable[[Evidence, Verdict], None]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__.replace("_", " ")] = function
    return function


def check(evidence: Evidence) -> dict[str, Verdict]:
    verdicts = {}
    for name, judge in RULES.items():
        verdicts[name] = Verdict()
        judge(evidence, verdicts[name])
    return verdicts


def _highest_before(acts: Iterable[Act], what: str) -> Callable[[float], int]:
    """Return a function of a time: the highest value of `what` among the answers that had arrived by then, or -1."""
    ended = sorted(acts, key=lambda act: act.ended)
    ends = [act.ended for act in ended]
    highest = [-1, *accumulate([act.got[what] for act in ended], max)]
    return lambda time: highest[bisect_left(ends, time)]


# --- messages --------------------------------------------------------------------------------------------------------


@rule
def what_is_acked_is_stored(evidence: Evidence, verdict: Verdict) -> None:
    for act in _acked(evidence):
        topic, partition, offset = _place_of(act)
        log = evidence.truth.get((topic, partition))
        found = log.messages.get(offset) if log else None
        verdict.unless(
            found is not None and found.value == act.asked["value"],
            lambda act=act, found=found: f"{act.asked['value']} was acked at {_place_of(act)}, where {found} is",
        )


@rule
def what_is_stored_is_delivered(evidence: Evidence, verdict: Verdict) -> None:
    """To every group that reads its topic."""
    workload = evidence.workload
    delivered = defaultdict(set)
    for act, place, _ in evidence.deliveries():
        delivered[act.asked["group"]].add(place)
    for group, topics in {**workload.queue_groups, **workload.stream_groups}.items():
        for topic in topics:
            for place, message in evidence.stored(topic):
                verdict.unless(
                    place in delivered[group],
                    lambda group=group, place=place, message=message: f"{group} never got {message.value} at {place}",
                )


@rule
def nothing_is_phantom(evidence: Evidence, verdict: Verdict) -> None:
    """Whatever is stored or shown was sent to that topic."""
    sent = {(act.asked["topic"], act.asked["value"]) for act in evidence.of("send")}
    for act in evidence.of("transform"):
        topic = evidence.workload.outputs[act.asked["topic"]]
        sent |= {(topic, value) for value in act.asked["outputs"]}
    for topic, (copies, _) in evidence.workload.dead_letters.items():
        sent |= {(copies, value) for name, value in tuple(sent) if name == topic}
    for place, value in _shown(evidence):
        verdict.unless((place[0], value) in sent, lambda place=place, value=value: f"{value} at {place} was never sent")


@rule
def nothing_refused_is_there(evidence: Evidence, verdict: Verdict) -> None:
    refused = {(act.asked["topic"], act.asked["value"]) for act in evidence.of("send") if act.outcome == REFUSED}
    verdict.checked += len(refused)
    there = {(place[0], value) for place, value in _shown(evidence)}
    verdict.violations += [f"{value} was refused, and is in {topic}" for topic, value in sorted(refused & there)]


@rule
def one_offset_has_one_value(evidence: Evidence, verdict: Verdict) -> None:
    """On all replicas, in all reads and deliveries, and in the answers to producers."""
    values: dict[Place, str] = {}
    acked = ((_place_of(act), act.asked["value"]) for act in _acked(evidence))
    replicas = (
        ((topic, partition, offset), message.value)
        for (topic, partition), logs in evidence.logs.items()
        for log in logs.values()
        for offset, message in log.messages.items()
    )
    for place, value in chain(acked, replicas, _shown(evidence)):
        first = values.setdefault(place, value)
        verdict.unless(first == value, lambda place=place, value=value, first=first: f"{place}: {first}, and {value}")


@rule
def order_of_sending_is_order_of_offsets(evidence: Evidence, verdict: Verdict) -> None:
    """Within a producer and a partition; and what was acked before another send began is before it."""
    by_producer: dict[tuple[str, str, int], list[Act]] = defaultdict(list)
    by_partition: dict[Partition, list[Act]] = defaultdict(list)
    for act in _acked(evidence):
        topic, partition, _ = _place_of(act)
        by_producer[act.actor, topic, partition].append(act)
        by_partition[topic, partition].append(act)
    for (_, topic, partition), acts in by_producer.items():
        for before, after in pairwise(sorted(acts, key=lambda act: act.began)):
            verdict.unless(
                before.got["offset"] < after.got["offset"],
                lambda a=before, b=after, place=(topic, partition): (
                    f"{a.asked['value']} is behind {b.asked['value']} in {place}"
                ),
            )
    for place, acts in by_partition.items():
        highest = _highest_before(acts, "offset")
        for act in acts:
            verdict.unless(
                highest(act.began) < act.got["offset"],
                lambda act=act, place=place: (
                    f"{act.asked['value']} at {act.got} of {place} is before an earlier message"
                ),
            )


@rule
def what_has_an_identity_is_stored_once(evidence: Evidence, verdict: Verdict) -> None:
    once = {(act.asked["topic"], act.asked["value"]) for act in evidence.of("send") if act.asked.get("once")}
    places = defaultdict(list)
    for place, message in evidence.stored():
        if (place[0], message.value) in once:
            places[place[0], message.value].append(place)
    for (_, value), found in places.items():
        verdict.unless(len(found) == 1, lambda value=value, found=found: f"{value} is stored at {found}")


@rule
def browsing_rises_and_skips_nothing(evidence: Evidence, verdict: Verdict) -> None:
    offsets = {place: sorted(log.messages) for place, log in evidence.truth.items()}
    for act in evidence.of("read"):
        if act.outcome != OK:
            continue
        seen = [offset for offset, _ in act.got["messages"]]
        start, end = act.asked["offset"], act.got["next"]
        stored = offsets.get((act.asked["topic"], act.asked["partition"]), [])
        expected = stored[bisect_left(stored, start) : bisect_left(stored, end)]
        verdict.unless(
            seen == expected and start <= end,
            lambda act=act, seen=seen, expected=expected: (
                f"{act.actor} read {act.asked} and got {_difference(seen, expected)}, next {act.got['next']}"
            ),
        )


# --- groups ----------------------------------------------------------------------------------------------------------


@rule
def committed_offsets_rise_and_skip_nothing(evidence: Evidence, verdict: Verdict) -> None:
    _check_observed_offsets(evidence, verdict)
    for (topic, partition), log in evidence.truth.items():
        committed: dict[str, int] = {}
        for record, offset in _committed_in(log):
            before = committed.get(record.group, 0)
            verdict.unless(
                before <= offset,
                lambda record=record, offset=offset, before=before, place=(topic, partition): (
                    f"{record.group} in {place}: record {record.offset} commits {offset} after {before}"
                ),
            )
            committed[record.group] = max(before, offset)
    given = _given_below(evidence)
    for act in chain(evidence.of("commit"), evidence.of("transform")):
        for topic, partition, upto in act.asked.get("positions", ()) if act.outcome == OK else ():
            offsets, latest = given.get((act.asked["group"], topic, partition), ([], [0.0]))
            verdict.unless(
                latest[bisect_left(offsets, upto)] < act.ended,
                lambda act=act, place=(topic, partition, upto): (
                    f"{act.actor} committed {place} at {act.ended:.3f}, and nobody had been given all messages before"
                ),
            )


def _check_observed_offsets(evidence: Evidence, verdict: Verdict) -> None:
    """An observation that began after another had ended, and knows as much of the log, shows no lower offset.

    Where a leader does not answer, the listing shows a checkpoint. It is older, and so is its high watermark."""
    seen: dict[tuple[Any, ...], list[tuple[Act, int, int]]] = defaultdict(list)
    for act in evidence.of("offsets"):
        for topic, partition, offset, high_watermark in act.got.get("offsets", ()):
            seen[act.asked["group"], topic, partition].append((act, offset, high_watermark))
    for place, observed in seen.items():
        for after, offset, high_watermark in observed:
            before = (each for act, each, end in observed if act.ended < after.began and end <= high_watermark)
            highest = max(before, default=0)
            verdict.unless(
                highest <= offset,
                lambda place=place, after=after, offset=offset, highest=highest: (
                    f"{place} was {highest}, and {offset} in a call of {after.began:.3f}"
                ),
            )


def _committed_in(log: Log) -> Iterable[tuple[Any, int]]:
    for record in log.records:
        if record.kind == COMMIT_OFFSET:
            yield record, record.body[0]
        elif record.kind == COMMIT and len(record.body) > 5 and record.body[5] >= 0:
            yield record, record.body[5]


def _given_below(evidence: Evidence) -> dict[tuple[str, str, int], tuple[list[int], list[float]]]:
    """For each group and partition: its offsets, and when all messages before the n-th had been delivered."""
    first: dict[tuple[str, Place], float] = {}
    for act, place, _ in evidence.deliveries():
        first[act.asked["group"], place] = min(act.ended, first.get((act.asked["group"], place), math.inf))
    given = {}
    for group, topics in {**evidence.workload.stream_groups, **evidence.workload.queue_groups}.items():
        for (topic, partition), log in evidence.truth.items():
            if topic in topics:
                offsets = sorted(log.messages)
                times = (first.get((group, (topic, partition, offset)), math.inf) for offset in offsets)
                given[group, topic, partition] = offsets, [0.0, *accumulate(times, max)]
    return given


@rule
def nothing_is_delivered_after_its_ack(evidence: Evidence, verdict: Verdict) -> None:
    """No receive that began after the ack was answered has the message, no member that joined a stream group after the
    commit was answered, and no later grant in the log."""
    acked: dict[tuple[str, Place], float] = {}
    for act in chain(evidence.of("ack"), evidence.of("transform")):
        for place in act.got.get("done", ()):
            acked.setdefault((act.asked["group"], tuple(place)), act.ended)
    committed = _committed_by(evidence)
    for act, place, value in evidence.deliveries():
        group = act.asked["group"]
        if "joined" in act.asked:
            positions, times = committed.get((group, *place[:2]), ([], []))
            at = times[bisect_right(positions, place[2])] if bisect_right(positions, place[2]) < len(times) else None
            began = act.asked["joined"]
        else:
            at, began = acked.get((group, place)), act.began
        verdict.unless(
            at is None or began <= at,
            lambda act=act, place=place, value=value, at=at, began=began: (
                f"{act.actor} got {value} at {place} in a call or life of {began:.3f}; its ack was answered at {at:.3f}"
            ),
        )
    for partition, log in evidence.truth.items():
        done: dict[tuple[str, int], int] = {}
        for record in log.records:
            if record.kind in (ACK, DEAD, COMMIT):
                done |= {(record.group, offset): record.offset for offset in _offsets(_finished_by(record), log)}
            elif record.kind == GRANT:
                for offset in _offsets(record.body[0], log):
                    finished_at = done.get((record.group, offset))
                    verdict.unless(
                        finished_at is None,
                        lambda record=record, offset=offset, at=finished_at, partition=partition: (
                            f"{record.group} in {partition}: {offset} is granted by {record.offset}, finished by {at}"
                        ),
                    )


def _committed_by(evidence: Evidence) -> dict[tuple[str, str, int], tuple[list[int], list[float]]]:
    """For each stream group and partition: its committed positions, and when the n-th or a higher one was answered."""
    answered: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for act in chain(evidence.of("commit"), evidence.of("transform")):
        for topic, partition, position in act.asked.get("positions", ()) if act.outcome == OK else ():
            times = answered[act.asked["group"], topic, partition]
            times[position] = min(act.ended, times.get(position, act.ended))
    by_partition = {}
    for key, times in answered.items():
        positions = sorted(times)
        earliest = list(accumulate((times[position] for position in reversed(positions)), min))[::-1]
        by_partition[key] = positions, earliest
    return by_partition


@rule
def leases_of_a_message_do_not_overlap(evidence: Evidence, verdict: Verdict) -> None:
    """Within a leader epoch, by the times that the log itself has."""
    for partition, log in evidence.truth.items():
        leases: dict[tuple[str, int], tuple[int, int]] = {}  # (group, offset): leader epoch, deadline
        for record in log.records:
            group, body = record.group, record.body
            if record.kind == GRANT:
                for offset in _offsets(body[0], log):
                    epoch, deadline = leases.get((group, offset), (-1, 0))
                    verdict.unless(
                        epoch != record.leader_epoch or deadline <= body[2],
                        lambda record=record, offset=offset, deadline=deadline, partition=partition: (
                            f"{record.group} in {partition}: record {record.offset} grants {offset}"
                            f" {deadline - record.body[2]} ms before its lease ends"
                        ),
                    )
                    leases[group, offset] = record.leader_epoch, body[3]
            elif record.kind == EXTEND:
                for offset in _offsets(body[0], log):
                    if (group, offset) in leases:
                        leases[group, offset] = leases[group, offset][0], body[1]
            elif record.kind in (ACK, NACK, DEAD, COMMIT):
                for offset in _offsets(_finished_by(record), log):
                    leases.pop((group, offset), None)


@rule
def dead_letters_are_copied_once(evidence: Evidence, verdict: Verdict) -> None:
    """A message of such a group is acked, or copied to the dead-letter topic: exactly one of both."""
    for topic, (copies, group) in evidence.workload.dead_letters.items():
        sources = Counter(message.source for _, message in evidence.stored(copies))
        finished = defaultdict(list)
        for place, log in evidence.truth.items():
            for record in log.records if place[0] == topic else ():
                if record.group == group and record.kind in (ACK, DEAD):
                    for offset in _offsets(_finished_by(record), log):
                        finished[(*place, offset)].append(record.kind)
        verdict.unless(None not in sources, lambda copies=copies: f"{copies} has messages without a source")
        for place, message in evidence.stored(topic):
            found, expected = sources.pop(place, 0), finished[place].count(DEAD)
            verdict.unless(
                len(finished[place]) == 1 and found == expected,
                lambda place=place, message=message, found=found, finished=finished: (
                    f"{message.value} at {place}: {found} copies, finished by records of kinds {finished[place]}"
                ),
            )
        verdict.violations += [f"{copies} has a copy of {source}, which does not exist" for source in sources if source]


@rule
def commits_are_whole(evidence: Evidence, verdict: Verdict) -> None:
    """Each input has exactly one output, and each output an input."""
    for topic, outputs in evidence.workload.outputs.items():
        made = Counter(message.value for _, message in evidence.stored(outputs))
        for place, message in evidence.stored(topic):
            count = made.pop(output_of(message.value), 0)
            verdict.unless(
                count == 1,
                lambda place=place, message=message, count=count: f"{message.value} at {place} has {count} outputs",
            )
        verdict.violations += [f"{value} in {outputs} has no input" for value in made]


def output_of(identity: str) -> str:
    return f"out:{identity}"


@rule
def nothing_delayed_is_early(evidence: Evidence, verdict: Verdict) -> None:
    due = {
        act.asked["value"]: act.began + act.asked["delay_s"] for act in evidence.of("send") if "delay_s" in act.asked
    }
    for act, place, value in evidence.deliveries():
        if value in due and act.ended < evidence.clock_moved_at:
            verdict.unless(
                act.ended >= due[value] - EARLY_S,
                lambda act=act, place=place, value=value: f"{value} at {place} is {due[value] - act.ended:.3f} s early",
            )


# --- locks and replicas ----------------------------------------------------------------------------------------------


@rule
def fencing_tokens_rise(evidence: Evidence, verdict: Verdict) -> None:
    """A token has one owner, and nobody is found to hold a lock in a call that began after a higher token was seen."""
    owners: dict[tuple[str, int], str] = {}
    held: dict[str, list[Act]] = defaultdict(list)
    for act in chain(evidence.of("lock"), evidence.of("check")):
        if act.outcome == OK:
            owner = owners.setdefault((act.asked["name"], act.got["token"]), act.asked["owner"])
            verdict.unless(
                owner == act.asked["owner"],
                lambda act=act, owner=owner: (
                    f"token {act.got} of {act.asked['name']}: {owner} and {act.asked['owner']}"
                ),
            )
            held[act.asked["name"]].append(act)
    for name, acts in held.items():
        highest = _highest_before(acts, "token")
        for act in acts:
            seen = highest(act.began)
            verdict.unless(
                seen <= act.got["token"],
                lambda act=act, seen=seen, name=name: (
                    f"{name}: {act.actor} held {act.got['token']} in a {act.kind} of {act.began:.3f}, after {seen}"
                ),
            )


@rule
def replicas_are_equal(evidence: Evidence, verdict: Verdict) -> None:
    """Row by row below the lowest high watermark; every file passes SQLite's own check."""
    for partition, replicas in evidence.logs.items():
        damage = [f"{partition} on broker {broker}: {what}" for broker, log in replicas.items() for what in log.damage]
        verdict.violations += damage
        verdict.unless(len(replicas) > 1, lambda p=partition, r=replicas: f"{p} is on brokers {sorted(r)} alone")
        end = min((log.high_watermark for log in replicas.values()), default=0)
        (first, one), *others = sorted(replicas.items())
        expected = one.below(end)
        for broker, log in others:
            found = log.below(end)
            verdict.checked += len(found)
            if found != expected:
                verdict.violations.append(
                    f"{partition}: brokers {first} and {broker} differ below {end}: {_difference(expected, found)}"
                )


# --- parts -----------------------------------------------------------------------------------------------------------


def _acked(evidence: Evidence) -> Iterable[Act]:
    return (act for act in evidence.of("send") if act.outcome == OK)


def _place_of(act: Act) -> Place:
    return act.asked["topic"], act.got["partition"], act.got["offset"]


def _shown(evidence: Evidence) -> Iterable[tuple[Place, str]]:
    delivered = ((place, value) for _, place, value in evidence.deliveries())
    stored = ((place, message.value) for place, message in evidence.stored())
    return chain(delivered, evidence.reads(), stored)


def _finished_by(record: Any) -> list[Any]:
    """The ranges that an ack, a commit, a dead record or a nack names; of the first two, also what they finish ahead of
    its grant."""
    body, first = record.body, 3 if record.kind == COMMIT else 0
    ranges = body[first] if len(body) > first else []
    after = first + 1 if record.kind == COMMIT else 2
    ahead = body[after] if record.kind in (ACK, COMMIT) and len(body) > after else []
    return [*ranges, *((offset, offset + 1) for _, _, offset in ahead)]


def _offsets(ranges: Iterable[Any], log: Log) -> Iterable[int]:
    """The messages in these ranges; control records between them belong to no group."""
    return (offset for start, end, *_ in ranges for offset in range(start, end) if offset in log.messages)


def _difference(one: list[Any], other: list[Any]) -> str:
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{str(one[at : at + 1])[:200]} or {str(other[at : at + 1])[:200]} ({len(one)} and {len(other)} in all)"
