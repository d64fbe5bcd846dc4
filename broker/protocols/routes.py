"""The routes of the older queues' protocols."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Response, request
from werkzeug.exceptions import MethodNotAllowed

from portalmq import wire
from portalmq.broker.api.request_context import RequestContext
from portalmq.broker.api.route import Link, Route
from portalmq.broker.protocols import miniq, wonderq
from portalmq.broker.protocols import portal_mq as portal
from portalmq.broker.protocols.payload import MessageBody
from portalmq.errors import (
    GroupModeMismatch,
    GroupNotFound,
    IdempotencyKeyReused,
    KeyOrder,
    MessageNotFound,
    NotEnoughReplicas,
    NotFound,
    OffsetOutOfRange,
    PartitionNotFound,
    RequestInProgress,
    TopicExists,
    TopicNotFound,
)


def _taking(view: Callable[..., Response], other: str) -> Callable[..., Response]:
    """Refuse HEAD for a view that consumes by GET: Flask routes HEAD to it too, whose answer cannot carry the message.
    `other` is the other method of the path."""

    def taken(context: RequestContext, **given: Any) -> Response:
        if request.method != "GET":
            raise MethodNotAllowed(valid_methods=["GET", other])
        return view(context, **given)

    taken.__wrapped__ = view  # type: ignore[attr-defined]
    return taken


TOPIC = (TopicNotFound, PartitionNotFound, NotEnoughReplicas, OffsetOutOfRange)
APPENDING = (*TOPIC, KeyOrder)
QUEUE = (*TOPIC, GroupNotFound, GroupModeMismatch)

PROTOCOL_ROUTES = (
    Route(
        *("POST", "/publish", portal.publish),
        body=portal.PublishRequest,
        answers={200: portal.MessagePlace},
        errors=(*APPENDING, RequestInProgress, IdempotencyKeyReused),
    ),
    Route(
        *("POST", "/read", portal.read),
        body=portal.ReadRequest,
        answers={200: portal.CurrentMessage, 204: None},
        errors=QUEUE,
        links=(Link(portal.consume, {}, {"name": "$request.body#/name", "offset": "$response.body#/offset"}),),
    ),
    Route(
        *("POST", "/consume", portal.consume),
        body=portal.ConsumeRequest,
        answers={200: portal.ConsumedOffset, 204: None},
        errors=QUEUE,
    ),
    *(
        Route("POST", f"/topic/{verb}", view, body=portal.TopicBody, answers={200: portal.TopicAnswer}, errors=errors)
        for verb, view, errors in (
            ("create", portal.create_topic, (TopicExists,)),
            ("delete", portal.delete_topic, (TopicNotFound,)),
            ("exists", portal.topic_exists, (TopicNotFound,)),
        )
    ),
    *(
        Route(
            *("POST", f"/{kind}/{verb}", partial(view, kind=kind)),
            body=portal.ProgramBody,
            answers={200: portal.ProgramAnswer},
            errors=errors,
        )
        for kind in ("producer", "consumer")
        for verb, view, errors in (
            ("create", portal.create_program, ()),
            ("delete", portal.delete_program, (NotFound,)),
            ("exists", portal.program_exists, (NotFound,)),
        )
    ),
    Route(
        *("POST", "/message", miniq.post, miniq.QueueQuery),
        body={wire.JSON: miniq.PostRequest, "*/*": bytes},
        answers={200: miniq.PostedMessage},
        errors=APPENDING,
        links=(Link(miniq.confirm, {}, {"Key": "$response.body#/key"}),),
    ),
    Route(
        *("GET", "/message", _taking(miniq.get, "POST"), miniq.GetQuery),
        answers={200: miniq.TakenMessage},
        errors=(*QUEUE, MessageNotFound),
        links=(Link(miniq.confirm, {}, {"Key": "$response.body#/key"}),),
    ),
    Route(
        *("POST", "/confirm", miniq.confirm, miniq.QueueQuery),
        body=miniq.Confirmation,
        answers={200: miniq.ConfirmedKey},
        errors=(*QUEUE, MessageNotFound),
    ),
    Route("GET", "/messages", miniq.read_all, miniq.QueueQuery, answers={200: miniq.ListedMessages}, errors=QUEUE),
    Route(
        *("POST", "/miniq/command", miniq.command),
        body=miniq.Command,
        answers={200: miniq.CommandAnswer},
        errors=(*QUEUE, TopicExists, MessageNotFound),
    ),
    Route(
        *("POST", "/v1/publish", wonderq.publish),
        body=MessageBody,
        answers={200: wonderq.PublishedMessage},
        errors=APPENDING,
    ),
    Route(
        *("GET", "/v1/consumer", _taking(wonderq.consume, "DELETE"), wonderq.ConsumeQuery),
        answers={200: wonderq.LockedMessages},
        errors=QUEUE,
        links=(Link(wonderq.delete, {"cid": "$request.query.cid", "id": "$response.body#/messages/0/id"}),),
    ),
    Route(
        *("DELETE", "/v1/consumer", wonderq.delete, wonderq.DeleteQuery),
        answers={200: bool},
        errors=QUEUE,
    ),
    Route("GET", "/v1/queue", wonderq.state, wonderq.StateQuery, answers={200: wonderq.WonderQueue}, errors=QUEUE),
)
