"""A scripted broker that has one lock, `l`, which changes hands when a test says so."""

from __future__ import annotations

import msgspec
from support.scripted_broker import Call, Reply, ScriptedBroker

from portalmq import Fenced, LockHeld, wire

PATH = "/v1/locks/l"


class LockBroker(ScriptedBroker):
    """One lock, which changes hands when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.holder: str | None = None
        self.token = 0

    def work(self, call: Call) -> Reply:
        if call.path != PATH:
            return super().work(call)
        with self.changed:
            if call.method == "POST":
                asked = msgspec.json.decode(call.body, type=wire.LockRequest)
                if self.holder not in (None, asked.owner):
                    self.changed.wait_for(lambda: self.holder is None, asked.wait_ms / 1000)
                if self.holder not in (None, asked.owner):
                    raise LockHeld("held", owner=self.holder)
                if self.holder is None:
                    self.holder, self.token = asked.owner, self.token + 1
                return Reply(body=msgspec.json.encode(wire.LockGrant(asked.owner, self.token, asked.ttl_ms)))
            said = call.query if call.method == "DELETE" else call.json()
            if self.holder != said["owner"] or self.token != int(said["fencing_token"]):
                raise Fenced("the lock has passed on")
            if call.method == "DELETE":
                self.holder = None
                self.changed.notify_all()
                return Reply(204)
            return Reply(body=msgspec.json.encode(wire.LockGrant(self.holder, self.token, 1)))

    def pass_on(self, owner: str | None = "another") -> None:
        with self.changed:
            self.holder = owner
            self.token += owner is not None
            self.changed.notify_all()

    def count(self, method: str) -> int:
        return len(self.calls_of(method, PATH))
