"""Actors that send: idempotent producers of the client, and plain HTTP."""

from __future__ import annotations

import random
import time
from typing import Any

from chaos.clients import RUN, STOP, Client
from chaos.history import OK, REFUSED, UNKNOWN, identity_of, value_of
from chaos.plain_http import Http, NoAnswer, NotSent, outcome_of
from chaos.workload import WORKLOAD

from portalmq import PortalMQError, Producer

SETTLED_WITHIN_S = 180.0
BURST_S = 0.05
TOO_LARGE = "x" * (1 << 20)


def producers(client: Client) -> None:
    for number in range(3):
        client.actor(f"orders-{number}", produce, ("orders",), 200)
    client.actor("inputs", produce, ("queue-in", "stream-in"), 20)
    client.actor("poison", produce, ("poison",), 5)
    for partition in range(WORKLOAD.partitions["probe"]):
        client.actor(f"probe-{partition}", produce, ("probe",), 20, partition)


def senders(client: Client) -> None:
    client.actor("plain", send, "plain", {"pause_s": 0.1})
    client.actor("once", send, "plain", {"pause_s": 0.1, "once": True})
    client.actor("later", send, "later", {"pause_s": 0.2, "once": True, "delays_s": (0.5, 2.0, 8.0)})
    client.actor("wrong", send_wrong)
    for topic in ("orders", "plain"):
        for partition in range(WORKLOAD.partitions[topic]):
            client.actor(f"browse-{topic}-{partition}", browse, topic, partition)


def produce(
    client: Client, actor: str, chance: random.Random, topics: tuple[str, ...], rate: int, partition: int | None = None
) -> None:
    """Send with portalmq.Producer, `rate` messages a second, and wait for no answer but the last ones."""
    history, number, futures = client.history, 0, []
    with Producer(client.urls, linger_ms=5, buffer_messages=20_000) as producer:
        while client.phase == RUN:
            began = time.monotonic()
            for _ in range(max(1, round(rate * BURST_S))):
                number += 1
                topic = chance.choice(topics)
                identity = f"{actor}/{number}"
                call = history.call(actor, "send", topic=topic, value=identity, once=True)
                try:
                    future = producer.send(topic, value_of(identity), partition=partition)
                except PortalMQError as error:
                    history.answer(actor, call, _outcome(error), why=error.code)
                    continue
                future.add_done_callback(lambda done, call=call: _note(client, actor, call, done))
                futures.append(future)
            futures = [future for future in futures if not future.done()]
            client.pause(BURST_S - (time.monotonic() - began))
        producer.flush(SETTLED_WITHIN_S)


def _outcome(error: PortalMQError) -> str:
    return REFUSED if error.outcome == "not_applied" else UNKNOWN


def _note(client: Client, actor: str, call: int, future: Any) -> None:
    error = future.exception()
    if error is None:
        place = future.result()
        client.history.answer(actor, call, OK, partition=place.partition, offset=place.offset)
    elif isinstance(error, PortalMQError):
        client.history.answer(actor, call, _outcome(error), why=error.code)
    else:
        client.history.answer(actor, call, UNKNOWN, why=repr(error))


def send(client: Client, actor: str, chance: random.Random, topic: str, options: dict[str, Any]) -> None:
    """Send one message a request: with an Idempotency-Key and repeats, or without, and then only once."""
    http, number = Http(client.urls, chance), 0
    while client.phase == RUN:
        number += 1
        identity, once = f"{actor}/{number}", options.get("once", False)
        headers = {"Content-Type": "text/plain"}
        asked: dict[str, Any] = {"topic": topic, "value": identity, "once": once}
        if once:
            headers["Idempotency-Key"] = identity
        if "delays_s" in options:
            asked["delay_s"] = chance.choice(options["delays_s"])
            headers["PortalMQ-Delay-Ms"] = str(int(asked["delay_s"] * 1000))
        call = client.history.call(actor, "send", **asked)
        outcome, status, got = _settled(http, topic, value_of(identity), headers, tries=20 if once else 1)
        place = {"partition": got["partition"], "offset": got["offset"]} if outcome == OK else {"why": status}
        client.history.answer(actor, call, outcome, **place)
        client.pause(chance.expovariate(1 / options["pause_s"]))


def _settled(http: Http, topic: str, value: str, headers: dict[str, str], tries: int) -> tuple[str, int, dict]:
    """Repeat until the outcome is known. One unknown answer leaves the outcome unknown, unless a later one is 2xx."""
    worst, status, got = REFUSED, 0, {}
    for _ in range(tries):
        try:
            status, got = http.call("POST", f"/v1/topics/{topic}/messages", value.encode(), headers)
            outcome = outcome_of(status, got)
            if outcome == OK:
                return OK, status, got
            worst = UNKNOWN if UNKNOWN in (worst, outcome) else REFUSED
            if not got.get("retryable"):
                break
        except NoAnswer:
            worst = UNKNOWN
        except NotSent:
            pass
        time.sleep(0.2)
    return worst, status, got


def send_wrong(client: Client, actor: str, chance: random.Random) -> None:
    """Send what has to be refused: too large, to a partition that does not exist, with bad options."""
    http, number = Http(client.urls, chance), 0
    while client.phase == RUN:
        number += 1
        identity, query, more = f"{actor}/{number}", "", {}
        body = value_of(identity)
        wrong = chance.choice(("large", "partition", "delay", "priority"))
        if wrong == "large":
            body += TOO_LARGE
        elif wrong == "partition":
            query = "?partition=99"
        else:
            more = {f"PortalMQ-{'Delay-Ms' if wrong == 'delay' else 'Priority'}": "-1"}
        call = client.history.call(actor, "send", topic="plain", value=identity, wrong=wrong)
        try:
            status, _got = http.call(
                "POST", f"/v1/topics/plain/messages{query}", body.encode(), {"Content-Type": "text/plain", **more}
            )
            # A 2xx has no place here: the rule of phantoms and refusals finds the message, which counts as refused.
            client.history.answer(actor, call, UNKNOWN if status >= 500 else REFUSED, why=status)
        except (NoAnswer, NotSent):
            client.history.answer(actor, call, UNKNOWN)
        client.pause(chance.expovariate(2.0))


def browse(client: Client, actor: str, chance: random.Random, topic: str, partition: int) -> None:
    """Read a partition to its end by way of any broker, and begin again now and then."""
    http, offset = Http(client.urls, chance), 0
    while client.phase != STOP:
        call = client.history.call(actor, "read", topic=topic, partition=partition, offset=offset)
        try:
            path = f"/v1/topics/{topic}/partitions/{partition}/messages?offset={offset}&limit=500&wait_ms=300"
            status, got = http.call("GET", path)
            if status == 200:
                shown = [(each["offset"], identity_of(each["value"])) for each in got["messages"]]
                client.history.answer(actor, call, OK, next=got["next_offset"], messages=shown)
                offset = 0 if chance.random() < 0.01 else got["next_offset"]
            else:
                client.history.answer(actor, call, outcome_of(status, got), why=status)
        except (NoAnswer, NotSent):
            client.history.answer(actor, call, UNKNOWN)
        client.pause(0.5)
