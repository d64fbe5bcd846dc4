"""The route table of the broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flask import Response

from portalmq.broker.api import cluster, commits, fetch, groups, locks, messages, streams, topics, traffic
from portalmq.broker.api.request_context import ResponseParts


@dataclass(frozen=True, slots=True)
class Route:
    """A route. `is_open`: no token needed. `while_starting`: served before the broker is ready and while it drains.
    `is_traffic`: a POST whose view takes an HttpRequest and returns ResponseParts; Dispatcher serves it in front of
    Flask if its path is fixed or has the form /v1/<first>/<name>/<last>."""

    method: str
    path: str
    view: Callable[..., Response | ResponseParts]
    is_open: bool = False
    while_starting: bool = False
    is_traffic: bool = False


ROUTES = (
    Route("GET", "/livez", cluster.live, is_open=True, while_starting=True),
    Route("GET", "/readyz", cluster.ready, is_open=True, while_starting=True),
    Route("GET", "/healthz", cluster.health, is_open=True, while_starting=True),
    Route("GET", "/metrics", cluster.exposition, while_starting=True),
    Route("GET", "/v1/cluster", cluster.describe),
    Route("GET", "/v1/metadata", cluster.metadata),
    Route("GET", "/v1/topics", topics.list_all),
    Route("PUT", "/v1/topics/<topic>", topics.create),
    Route("GET", "/v1/topics/<topic>", topics.show),
    Route("PATCH", "/v1/topics/<topic>", topics.alter),
    Route("DELETE", "/v1/topics/<topic>", topics.delete),
    Route("POST", "/v1/topics/<topic>/messages", traffic.produce, is_traffic=True),
    Route("GET", "/v1/topics/<topic>/messages", messages.read_all),
    Route("DELETE", "/v1/topics/<topic>/messages", topics.purge),
    Route("GET", "/v1/topics/<topic>/scheduled", messages.list_scheduled),
    Route("DELETE", "/v1/topics/<topic>/scheduled/<message_id>", messages.cancel_scheduled),
    Route("GET", "/v1/topics/<topic>/partitions/<partition>/messages", messages.browse),
    Route("GET", "/v1/topics/<topic>/partitions/<partition>/digest", topics.digest),
    Route("POST", "/v1/producers", messages.new_producer),
    Route("GET", "/v1/groups", groups.list_all),
    Route("PUT", "/v1/groups/<group>", groups.put),
    Route("GET", "/v1/groups/<group>", groups.show),
    Route("DELETE", "/v1/groups/<group>", groups.delete),
    Route("GET", "/v1/groups/<group>/messages", groups.list_unfinished),
    Route("POST", "/v1/groups/<group>/receive", traffic.receive, is_traffic=True),
    Route("POST", "/v1/groups/<group>/ack", traffic.ack, is_traffic=True),
    Route("POST", "/v1/groups/<group>/nack", traffic.nack, is_traffic=True),
    Route("POST", "/v1/groups/<group>/extend", traffic.extend, is_traffic=True),
    Route("POST", "/v1/groups/<group>/commit", commits.commit, is_traffic=True),
    Route("GET", "/v1/groups/<group>/dead-letters", groups.list_dead_letters),
    Route("DELETE", "/v1/groups/<group>/dead-letters", groups.drop_dead_letters),
    Route("POST", "/v1/groups/<group>/dead-letters/redrive", groups.redrive),
    Route("POST", "/v1/groups/<group>/members", streams.join),
    Route("POST", "/v1/groups/<group>/members/<member>/heartbeat", streams.heartbeat),
    Route("DELETE", "/v1/groups/<group>/members/<member>", streams.leave),
    Route("PUT", "/v1/groups/<group>/offsets", streams.commit),
    Route("GET", "/v1/groups/<group>/offsets", streams.offsets),
    Route("POST", "/v1/groups/<group>/seek", streams.seek),
    Route("POST", "/v1/fetch", fetch.fetch, is_traffic=True),
    Route("GET", "/v1/locks", locks.list_all),
    Route("GET", "/v1/locks/<lock>", locks.show),
    Route("POST", "/v1/locks/<lock>", locks.acquire),
    Route("PUT", "/v1/locks/<lock>", locks.renew),
    Route("DELETE", "/v1/locks/<lock>", locks.release),
)
