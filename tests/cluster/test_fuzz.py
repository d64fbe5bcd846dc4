"""Invalid requests: wrong values in every field, cut and mutated bodies, from a seed. The broker answers each with a
declared status, keeps running and stays small. `PORTALMQ_FUZZ=20000` sends more of them."""

from __future__ import annotations

import http.client
import json
import os
import random
from typing import Any

import psutil
import pytest
from support.broker_process import BrokerProcess

from portalmq import wire
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES

pytestmark = pytest.mark.cluster

REQUESTS = int(os.environ.get("PORTALMQ_FUZZ", "300"))
SEED = 7
DECLARED = {503, 507}
GROWTH_BYTES_MAX = 256 * 1024 * 1024

VALUES = [None, True, -1, 0, 1, 2**53, 2**64, 10**400, 1e308, "", "x" * 300, "a/b", "..", "\ud800", "\x00", [], {}, 1.5]
WORDS = ["latest", "earliest", "0-0", "__x", "t", "g"]
NAMES = [
    "t",
    "g",
    "0",
    "1",
    "-1",
    "a%20b",
    "%00",
    "%FF",
    "x" * 200,
    "__i",
    "..",
    *[f"t{number}" for number in range(20)],
]
FIELDS = [
    *("messages", "value", "key", "headers", "partition", "delay_ms", "ttl_ms", "priority", "producer", "id", "epoch"),
    *("sequence", "topics", "max_messages", "consumer", "visibility_timeout_ms", "attempt_id", "receipts", "reason"),
    *("mode", "start", "config", "partitions", "replication_factor", "name", "owner", "ack", "type", "fencing_token"),
    *("member_id", "generation", "offsets", "to", "topic", "ids", "where", "rate_per_s", "publish", "Message", "Key"),
    *("payload", "message"),
]
PARAMETERS = ["limit", "offset", "topic", "after", "at", "cid", "id", "queue", "partition", "acks"]
TYPES = [wire.JSON, wire.BATCH_JSON, wire.BATCH_MSGPACK, wire.NDJSON, "text/plain", "x" * 300, ""]


class Dice(random.Random):
    """Random parts of a request."""

    def value(self, depth: int = 0) -> Any:
        chance = self.random()
        if chance < 0.6 or depth > 2:
            return self.choice([*VALUES, *WORDS])
        if chance < 0.8:
            return {self.choice(FIELDS): self.value(depth + 1) for _ in range(self.randint(0, 4))}
        return [self.value(depth + 1) for _ in range(self.randint(0, 4))]

    def path(self, template: str) -> str:
        parts = [self.choice(NAMES) if part.startswith("<") else part for part in template.split("/")]
        query = [f"{self.choice(PARAMETERS)}={self.choice(['1', '-1', 'x', '', '9' * 30, 't', '0-0'])}"]
        return "/".join(parts) + ("?" + "&".join(query) if self.random() < 0.3 else "")

    def body(self) -> bytes:
        fields = {self.choice(FIELDS): self.value() for _ in range(self.randint(0, 5))}
        if self.random() < 0.3:
            fields["topics"] = ["t"]
        body = bytearray(json.dumps(fields).encode())
        if self.random() < 0.2:
            body[self.randrange(len(body))] = self.randrange(256)
        return bytes(body[: self.randrange(len(body))] if self.random() < 0.05 else body)


def test_no_request_causes_an_internal_error(tmp_path):
    dice = Dice(SEED)
    routes = sorted({(route.method, route.path) for route in (*ROUTES, *PROTOCOL_ROUTES)})
    with BrokerProcess(tmp_path) as broker:
        connection = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=100)
        before = psutil.Process(broker.worker.pid).memory_info().rss
        for number in range(REQUESTS):
            method, template = dice.choice(routes)
            path, body = dice.path(template), None if method == "GET" else dice.body()
            connection.request(method, path, body, {"Content-Type": dice.choice(TYPES)})
            answer = connection.getresponse()
            answer.read()
            assert answer.status < 500 or answer.status in DECLARED, (number, method, path, body, answer.status)
        connection.close()
        assert broker.request("GET", "/livez").status == 200
        assert "Traceback" not in broker.stderr()
        assert psutil.Process(broker.worker.pid).memory_info().rss - before < GROWTH_BYTES_MAX
