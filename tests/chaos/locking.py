"""Actors that hold locks, and check again and again that they do."""

from __future__ import annotations

import random

from chaos.clients import RUN, Client
from chaos.history import OK, REFUSED, UNKNOWN

from portalmq import Lock, PortalMQError

NAMES = ("red", "blue")
TTL_S = 2.0


def locks(client: Client) -> None:
    for name in NAMES:
        client.actor(name, hold, name)


def hold(client: Client, actor: str, chance: random.Random, name: str) -> None:
    number = 0
    while client.phase == RUN:
        number += 1
        owner = f"{actor}/{number}"
        lock = Lock(name, client.urls, ttl_s=TTL_S, owner=owner)
        call = client.history.call(actor, "lock", name=name, owner=owner)
        try:
            token = lock.acquire(timeout_s=10)
            client.history.answer(actor, call, OK, token=token)
        except PortalMQError as error:
            client.history.answer(actor, call, REFUSED if error.outcome == "not_applied" else UNKNOWN, why=error.code)
            lock.close()
            client.pause(0.1)
            continue
        _check_and_release(client, actor, chance, name, lock, owner)


def _check_and_release(client: Client, actor: str, chance: random.Random, name: str, lock: Lock, owner: str) -> None:
    try:
        for _ in range(chance.randrange(1, 10)):
            call = client.history.call(actor, "check", name=name, owner=owner)
            client.history.answer(actor, call, OK, token=lock.check())
            client.pause(chance.uniform(0, 0.4))
        if chance.random() < 0.8:
            lock.release()
    except PortalMQError as error:
        client.history.note(actor, f"{name}: {error.code}")
    finally:
        lock.close()
