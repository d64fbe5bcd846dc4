"""Actors that receive: queue groups by plain HTTP, stream groups and atomic commits with the client."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from chaos.checker import output_of
from chaos.clients import RUN, STOP, Client
from chaos.history import OK, REFUSED, UNKNOWN, identity_of, value_of
from chaos.plain_http import Http, NoAnswer, NotSent, outcome_of
from chaos.workload import LEASE_S, MEMBER_SESSION_S, WORKLOAD

from portalmq import Admin, Consumer, Message, PortalMQError

# Poisoned messages are those whose number this divides: they are never acked.
POISONED_EVERY = 4


def queue(client: Client) -> None:
    for number in range(2):
        client.actor(f"worker-{number}", work, "workers")
    client.actor("strict", work, "strict")
    client.actor("transform", transform, "queue-transform", "queue-in", "queue")


def stream(client: Client) -> None:
    client.actor("reader", follow, "readers")
    client.actor("transform", transform, "stream-transform", "stream-in", "stream")
    client.actor("observer", observe, "readers")


# --- queue groups ----------------------------------------------------------------------------------------------------


def work(client: Client, actor: str, chance: random.Random, group: str) -> None:
    """Receive; then ack, nack, extend, or crash: forget the messages, whose leases run out."""
    http = Http(client.urls, chance)
    settle = _settle_poison if group == "strict" else _settle
    while client.phase != STOP:
        body = {
            "topics": list(WORKLOAD.queue_groups[group]),
            "max_messages": chance.choice((1, 20, 200)) if client.phase == RUN else 200,
            "wait_ms": 1_000,
            "visibility_timeout_ms": int(LEASE_S * 1_000),
        }
        call = client.history.call(actor, "receive", group=group)
        try:
            status, got = http.call("POST", f"/v1/groups/{group}/receive", body)
        except (NoAnswer, NotSent):
            client.history.answer(actor, call, UNKNOWN)
            client.pause(0.1)
            continue
        if status != 200:
            client.history.answer(actor, call, outcome_of(status, got), why=status)
            client.pause(0.1)
            continue
        messages = got["messages"]
        shown = [
            (each["topic"], each["partition"], each["offset"], identity_of(each["value"]), each["delivery_count"])
            for each in messages
        ]
        client.history.answer(actor, call, OK, messages=shown, by=http.asked)
        settle(client, actor, chance, http, group, messages)


def _settle(client: Client, actor: str, chance: random.Random, http: Http, group: str, messages: list[dict]) -> None:
    drains = client.phase != RUN
    draw = chance.random()
    if drains or draw < 0.75:
        _call(client, actor, http, group, "ack", messages)
        if draw < 0.05:
            _call(client, actor, http, group, "ack", messages)
    elif draw < 0.85:
        cut = chance.randrange(len(messages) + 1)
        _call(client, actor, http, group, "nack", messages[:cut], delay_ms=chance.choice((0, 200, 2_000)))
        _call(client, actor, http, group, "ack", messages[cut:])
    elif draw < 0.92:
        _call(client, actor, http, group, "extend", messages)
        client.pause(chance.uniform(0, LEASE_S))
        _call(client, actor, http, group, "ack", messages)
    elif draw < 0.96:
        client.pause(chance.uniform(0.5, 1.5) * LEASE_S)  # as late as its lease, or later
        _call(client, actor, http, group, "ack", messages)


def _settle_poison(
    client: Client, actor: str, chance: random.Random, http: Http, group: str, messages: list[dict]
) -> None:
    if client.phase == RUN and chance.random() < 0.05:
        return
    poisoned = [each for each in messages if _number_of(each) % POISONED_EVERY == 0]
    _call(client, actor, http, group, "nack", poisoned, delay_ms=chance.choice((0, 300)), reason="poisoned")
    _call(client, actor, http, group, "ack", [each for each in messages if each not in poisoned])


def _number_of(message: dict) -> int:
    return int(identity_of(message["value"]).rpartition("/")[2])


def _call(client: Client, actor: str, http: Http, group: str, kind: str, messages: list[dict], **more: object) -> None:
    if not messages:
        return
    places = {each["receipt"]: (each["topic"], each["partition"], each["offset"]) for each in messages}
    call = client.history.call(actor, kind, group=group, messages=list(places.values()))
    try:
        status, got = http.call("POST", f"/v1/groups/{group}/{kind}", {"receipts": list(places), **more})
    except (NoAnswer, NotSent):
        client.history.answer(actor, call, UNKNOWN)
        return
    done = [places[each["receipt"]] for each in got.get("results", ()) if each["status"] == "ok"]
    client.history.answer(actor, call, outcome_of(status, got), done=done, by=http.asked)


# --- stream groups ---------------------------------------------------------------------------------------------------


def follow(client: Client, actor: str, chance: random.Random, group: str) -> None:
    """Poll and commit as a member of a stream group; leave and join again now and then."""

    def turn(consumer: Consumer, joined: float) -> None:
        messages = _poll(client, actor, consumer, chance.choice((1, 50, 500)), group=group, joined=joined)
        if messages and (client.phase != RUN or chance.random() < 0.8):
            call = client.history.call(actor, "commit", group=group, positions=_positions(messages))
            client.history.answer(actor, call, *_outcome_of(consumer.commit))

    _in_turns(client, actor, chance, turn, lambda: Consumer(
        *WORKLOAD.stream_groups[group], group=group, bootstrap=client.urls, mode="stream", manual_ack=True,
        session_timeout_s=MEMBER_SESSION_S,
    ))  # fmt: skip


def transform(client: Client, actor: str, chance: random.Random, group: str, topic: str, mode: str) -> None:
    """Commit each batch with its outputs, both or neither."""

    def turn(consumer: Consumer, joined: float) -> None:
        asked = {"group": group} | ({"joined": joined} if mode == "stream" else {})
        messages = _poll(client, actor, consumer, chance.choice((1, 10, 50)), **asked)
        ordered = sorted(messages, key=lambda message: (message.partition, message.offset))
        for _, own in groupby(ordered, key=lambda message: message.partition):
            if _commit(client, actor, group, topic, mode, consumer, list(own)) != OK and mode == "stream":
                return  # what follows in the partition is not acked before this

    _in_turns(client, actor, chance, turn, lambda: Consumer(
        topic, group=group, bootstrap=client.urls, mode=mode, manual_ack=True, prefetch=False,  # type: ignore[arg-type]
        visibility_timeout_s=LEASE_S, session_timeout_s=MEMBER_SESSION_S,
    ))  # fmt: skip


def _commit(
    client: Client, actor: str, group: str, topic: str, mode: str, consumer: Consumer, batch: list[Message]
) -> str:
    made = [output_of(identity_of(message.text)) for message in batch]
    outputs = [{"topic": WORKLOAD.outputs[topic], "value": value_of(identity)} for identity in made]
    places = [(message.topic, message.partition, message.offset) for message in batch]
    positions = _positions(batch) if mode == "stream" else []
    call = client.history.call(
        actor, "transform", group=group, topic=topic, inputs=places, outputs=made, positions=positions
    )
    outcome, *why = _outcome_of(lambda: consumer.commit_with(batch, outputs))
    client.history.answer(actor, call, outcome, done=places if outcome == OK else [], why=why)
    return outcome


def _in_turns(
    client: Client,
    actor: str,
    chance: random.Random,
    turn: Callable[[Consumer, float], None],
    make: Callable[[], Consumer],
) -> None:
    """Take turns with a consumer, which is closed and made again every now and then, and after an error."""
    while client.phase != STOP:
        try:
            joined = time.monotonic()
            with make() as consumer:
                ends_at = joined + chance.uniform(10, 60)
                while client.phase != STOP and (client.phase != RUN or time.monotonic() < ends_at):
                    turn(consumer, joined)
        except PortalMQError as error:
            client.history.note(actor, f"{error.code}: {error}")
            client.pause(0.2)


def _poll(client: Client, actor: str, consumer: Consumer, at_most: int, **asked: Any) -> list[Message]:
    """`asked` names the group; of a member of a stream group, when it joined."""
    call = client.history.call(actor, "poll", **asked)
    try:
        messages = consumer.poll(timeout_s=1.0, max_messages=at_most)
    except PortalMQError:
        client.history.answer(actor, call, UNKNOWN)
        raise
    shown = [(each.topic, each.partition, each.offset, identity_of(each.text)) for each in messages]
    client.history.answer(actor, call, OK, messages=shown)
    return messages


def _positions(messages: Iterable[Message]) -> list[tuple[str, int, int]]:
    """The next offset of each partition after these messages."""
    positions: dict[tuple[str, int], int] = {}
    for message in messages:
        place = message.topic, message.partition
        positions[place] = max(message.offset + 1, positions.get(place, 0))
    return [(*place, offset) for place, offset in positions.items()]


def _outcome_of(call: Callable[[], Any]) -> list[str]:
    """The outcome, which is all that counts, and the error for a human reader."""
    try:
        call()
    except PortalMQError as error:
        return [REFUSED if error.outcome == "not_applied" else UNKNOWN]
    return [OK]


def observe(client: Client, actor: str, chance: random.Random, group: str) -> None:
    """Ask for the committed offsets, by way of any broker."""
    while client.phase != STOP:
        with Admin(chance.sample(client.urls, len(client.urls)), timeout_s=5) as admin:
            call = client.history.call(actor, "offsets", group=group)
            try:
                offsets = [
                    (each.topic, each.partition, each.committed, each.high_watermark) for each in admin.offsets(group)
                ]
                client.history.answer(actor, call, OK, offsets=offsets)
            except PortalMQError as error:
                client.history.answer(actor, call, UNKNOWN, why=error.code)
        client.pause(1.0)
