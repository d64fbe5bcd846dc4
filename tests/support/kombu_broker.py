"""The scripted broker, with the calls that kombu's transport makes besides: topics, browsing and counts."""

from __future__ import annotations

import json
from typing import Any

import kombu
import msgspec
from support.scripted_broker import Call, Reply, ScriptedBroker

import portalmq.kombu as registered
from portalmq import wire
from portalmq.errors import ERRORS_BY_CODE

__all__ = ["KombuBroker", "registered"]


class KombuBroker(ScriptedBroker):
    def __init__(self) -> None:
        super().__init__()
        self.shows_groups = True

    def connect(self, **options: Any) -> kombu.Connection:
        return kombu.Connection(self.url.replace("http", "portalmq"), transport_options={"wait_time_s": 0.1, **options})

    def tasks(self, topic: str) -> list[Any]:
        """The bodies in a topic."""
        return [json.loads(json.loads(message.value)["body"]) for message in self.topics[topic][0]]

    def held(self) -> int:
        return len(self.leased)

    def work(self, call: Call) -> Reply:
        with self.changed:
            match call.method, *call.path.strip("/").split("/")[1:]:
                case "PUT", "topics", topic:
                    self.topics.setdefault(topic, [[]])
                    partition = wire.PartitionDescription(0, 1, 1, [1], [1], 0, 0, 0)
                    return self._json(wire.TopicDescription(topic, [partition], wire.TopicConfig()), 201)
                case "GET", "topics", topic if topic not in self.topics:
                    raise ERRORS_BY_CODE["topic_not_found"](topic)
                case "GET", "topics", topic:
                    return self._json({"name": topic, "partitions": [], "config": {}})
                case "GET", "topics", topic, "partitions", "0", "messages":
                    return self._browse(topic, call)
                case "GET", "groups", _, "messages":
                    return self._counts(call.query["topic"])
                case "DELETE", "topics", topic:
                    self.topics.pop(topic, None)
                    return Reply(204)
                case "DELETE", "groups", _:
                    return Reply(204)
                case "POST", "topics", _, "scheduled", "cancel":
                    return self._json({"matched": 0, "cancelled": 0})
        return super().work(call)

    def _json(self, body: Any, status: int = 200) -> Reply:
        return Reply(status, msgspec.json.encode(body))

    def _browse(self, topic: str, call: Call) -> Reply:
        if topic not in self.topics:
            raise ERRORS_BY_CODE["topic_not_found"](topic)
        log = self.topics[topic][0]
        if call.query["offset"] != "latest" and "wait_ms" in call.query and int(call.query["offset"]) == len(log):
            self.changed.wait(min(int(call.query["wait_ms"]) / 1000, 0.05))
        first = len(log) if call.query["offset"] == "latest" else int(call.query["offset"].replace("earliest", "0"))
        some = log[first : first + int(call.query["limit"])]
        messages = [
            wire.PackMessageOut(
                0, first + number, each.value if isinstance(each.value, bytes) else b"", 0,
                key=each.key.encode() if isinstance(each.key, str) else each.key, priority=each.priority or 0,
            )
            for number, each in enumerate(some)
        ]  # fmt: skip
        page = wire.PackBrowsePage(messages, first + len(some), 0, len(log))
        return Reply(body=msgspec.msgpack.encode(page), content_type=wire.BATCH_MSGPACK)

    def _counts(self, topic: str) -> Reply:
        if topic not in self.topics:
            raise ERRORS_BY_CODE["topic_not_found"](topic)
        taken = set(self.leased.values()) | self.done
        ready = sum((topic, 0, offset) not in taken for offset in range(len(self.topics[topic][0])))
        return self._json({"messages": [], "counts": wire.QueueCounts(ready, 0, 0, 0, 0)})
