"""The route table of the broker."""

from __future__ import annotations

from typing import Any

from portalmq import stream_wire as stream
from portalmq import wire
from portalmq.broker.api import (
    answers,
    cluster,
    commits,
    copies,
    docs,
    fetch,
    groups,
    locks,
    messages,
    request_headers,
    reschedule,
    schedules,
    sql,
    streams,
    topics,
    traffic,
)
from portalmq.broker.api.query import Parameters
from portalmq.broker.api.route import Answer, Lines, Link, Route
from portalmq.contract.history import PastGroup
from portalmq.contract.schedules import ScheduleDescription, ScheduleRequest
from portalmq.errors import (
    Fenced,
    Forbidden,
    GroupModeMismatch,
    GroupNotFound,
    IdempotencyKeyReused,
    IllegalGeneration,
    KeyOrder,
    LockHeld,
    LockNotFound,
    MessageNotFound,
    MessageTooLarge,
    NotEnoughReplicas,
    NotLeader,
    OffsetMoved,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PartitionNotFound,
    QueryLimit,
    RequestInProgress,
    ScheduleNotFound,
    StaleReceipt,
    TopicExists,
    TopicNotFound,
    Unauthorized,
    Unavailable,
)

PLAIN, HTML, SCRIPT = "text/plain", "text/html", "text/javascript"

# Errors of calls that go to the leaders of partitions: to read, and to append.
READING = (TopicNotFound, PartitionNotFound, NotLeader, OffsetOutOfRange)
APPENDING = (*READING, NotEnoughReplicas)
# Errors of calls on a queue group, and on a stream group.
OF_QUEUE = (GroupNotFound, GroupModeMismatch, *APPENDING)
OF_STREAM = (GroupNotFound, GroupModeMismatch, IllegalGeneration, Fenced, *APPENDING)
# Errors of calls with an idempotency key, or a producer's stamp.
OF_REPEATS = (RequestInProgress, IdempotencyKeyReused, Fenced, OutOfOrderSequence)

_receipts = {"receipts": ["$response.body#/messages/0/receipt"]}
_same_group = {"group": "$request.path.group"}
_same_schedule = {"schedule": "$request.path.schedule"}
_where_stored = {"topic": "$request.path.topic", "partition": "$response.body#/partition"}

ROUTES = (
    # --- cluster -----------------------------------------------------------------------------------------------------
    Route("GET", "/livez", cluster.live, answers={200: answers.Status}, is_open=True, while_starting=True),
    Route(
        *("GET", "/readyz", cluster.ready),
        answers={200: answers.Status},
        errors=(Unavailable,),
        is_open=True,
        while_starting=True,
    ),
    Route(
        *("GET", "/healthz", cluster.health),
        answers={200: answers.Health},
        errors=(Unavailable,),
        is_open=True,
        while_starting=True,
    ),
    Route("GET", "/metrics", cluster.exposition, answers={200: {PLAIN: str}}, while_starting=True),
    Route("GET", "/openapi.json", docs.openapi, answers={200: Any, 304: None}, while_starting=True),
    Route(
        *("GET", "/docs", docs.page),
        answers={200: {HTML: str}, 303: Answer(None, {"Location": "The sign-in"}), 304: None},
        errors=(Unauthorized, Forbidden),
        is_open=True,
        while_starting=True,
    ),
    Route(
        "GET", "/docs/openapi-explorer.js", docs.explorer, answers={200: {SCRIPT: str}, 304: None}, while_starting=True
    ),
    Route("GET", "/v1/cluster", cluster.describe, answers={200: wire.ClusterDescription}),
    Route("GET", "/v1/metadata", cluster.metadata, cluster.MetadataQuery, answers={200: wire.Metadata}),
    # --- topics ------------------------------------------------------------------------------------------------------
    Route("GET", "/v1/topics", topics.list_all, answers={200: answers.TopicList}),
    Route(
        *("PUT", "/v1/topics/<topic>", topics.create, topics.CreateTopicQuery),
        body=wire.CreateTopic,
        answers={200: wire.TopicDescription, 201: wire.TopicDescription},
        errors=(TopicNotFound, TopicExists),
        links=(Link(topics.show, {"topic": "$request.path.topic"}),),
    ),
    Route("GET", "/v1/topics/<topic>", topics.show, answers={200: wire.TopicDescription}, errors=(TopicNotFound,)),
    Route(
        *("PATCH", "/v1/topics/<topic>", topics.alter, topics.AlterTopicQuery),
        body=wire.AlterTopic,
        answers={200: wire.TopicDescription},
        errors=(TopicNotFound, TopicExists, KeyOrder),
    ),
    Route(
        *("DELETE", "/v1/topics/<topic>", topics.delete, topics.DeleteTopicQuery),
        answers={204: None},
        errors=(TopicNotFound,),
    ),
    # --- messages ----------------------------------------------------------------------------------------------------
    Route(
        *("POST", "/v1/topics/<topic>/messages", traffic.produce, traffic.ProduceQuery, request_headers.ProduceHeaders),
        body={
            wire.BATCH_JSON: wire.JsonBatch,
            wire.BATCH_MSGPACK: wire.PackBatch,
            wire.NDJSON: Lines(Any),
            wire.CLOUD_EVENT: answers.CloudEvent,
            wire.CLOUD_EVENTS: list[answers.CloudEvent],
            wire.JSON: Any,
            PLAIN: str,
            wire.BYTES: bytes,
            "*/*": bytes,
        },
        answers={
            status: Answer(
                {
                    wire.JSON: (answers.ProducedMessage, answers.ProduceResults, wire.ProducedRange),
                    wire.BATCH_MSGPACK: (answers.ProduceResults, wire.ProducedRange),
                },
                {"Preference-Applied": "`return=minimal` if the answer is a range"},
            )
            for status in (200, 202)
        },
        errors=(*APPENDING, *OF_REPEATS, KeyOrder),
        links=(
            Link(messages.browse, {**_where_stored, "offset": "$response.body#/offset"}),
            Link(traffic.receive, {}, {"topics": ["$request.path.topic"]}),
        ),
        is_traffic=True,
    ),
    Route(
        *("GET", "/v1/topics/<topic>/messages", messages.read_all, messages.ReadAllQuery),
        answers={
            200: Answer(
                {
                    wire.JSON: answers.TopicMessages,
                    wire.NDJSON: Lines(wire.JsonMessageOut),
                    wire.CLOUD_EVENTS: list[answers.CloudEvent],
                },
                {"PortalMQ-More": "As `more` of a page, where the body is an array of events"},
            )
        },
        errors=READING,
    ),
    Route(
        *("DELETE", "/v1/topics/<topic>/messages", topics.purge, topics.PurgeQuery),
        answers={204: None},
        errors=APPENDING,
    ),
    Route(
        *("GET", "/v1/topics/<topic>/scheduled", messages.list_scheduled, messages.ScheduledQuery),
        answers={200: answers.ScheduledPage},
        errors=READING,
    ),
    Route(
        *("DELETE", "/v1/topics/<topic>/scheduled/<message_id>", messages.cancel_scheduled, Parameters),
        answers={204: None},
        errors=(*APPENDING, MessageNotFound),
    ),
    Route(
        *("PATCH", "/v1/topics/<topic>/scheduled/<message_id>", reschedule.move, Parameters),
        body=wire.DeliveryTime,
        answers={200: answers.MovedMessage},
        errors=(*APPENDING, MessageNotFound),
    ),
    Route(
        *("POST", "/v1/topics/<topic>/scheduled/<message_id>/run", reschedule.run, Parameters),
        answers={204: None},
        errors=(*APPENDING, MessageNotFound),
    ),
    Route(
        *("POST", "/v1/topics/<topic>/scheduled/run", reschedule.run_many, Parameters),
        body=wire.ScheduledSelection,
        answers={200: answers.RunMessages},
        errors=APPENDING,
    ),
    Route(
        *("POST", "/v1/topics/<topic>/scheduled/move", reschedule.move_many, Parameters),
        body=wire.MoveScheduled,
        answers={200: wire.Moved},
        errors=APPENDING,
    ),
    Route(
        *("POST", "/v1/topics/<topic>/scheduled/cancel", reschedule.cancel_many, Parameters),
        body=wire.ScheduledSelection,
        answers={200: answers.CancelledMessages},
        errors=APPENDING,
    ),
    Route(
        *("POST", "/v1/topics/<topic>/messages/<message_id>/copy", copies.copy, Parameters),
        headers=request_headers.IdempotencyHeaders,
        body=wire.CopyRequest,
        answers={200: answers.ProducedMessage},
        errors=(*APPENDING, *OF_REPEATS, KeyOrder, MessageNotFound, MessageTooLarge),
    ),
    Route(
        *("GET", "/v1/topics/<topic>/partitions/<partition>/messages", messages.browse),
        query=messages.BrowseQuery,
        headers=request_headers.BrowseHeaders,
        answers={
            200: Answer(
                {
                    wire.JSON: answers.BrowsedMessages,
                    wire.BATCH_MSGPACK: wire.PackBrowsePage,
                    wire.NDJSON: Lines(wire.JsonMessageOut),
                    wire.CLOUD_EVENT: answers.CloudEvent,
                    wire.CLOUD_EVENTS: list[answers.CloudEvent],
                    wire.EVENT_STREAM: Lines(wire.JsonMessageOut),
                },
                {
                    "PortalMQ-Next-Offset": "As `next_offset` of a page, where the body is no page",
                    "PortalMQ-High-Watermark": "As `high_watermark` of a page, where the body is no page",
                },
            ),
            204: None,
        },
        errors=READING,
    ),
    Route(
        *("GET", "/v1/topics/<topic>/partitions/<partition>/digest", topics.digest, topics.DigestQuery),
        answers={200: wire.ReplicaDigest},
        errors=READING,
    ),
    Route(
        *("GET", "/v1/messages/<topic>/<message_id>/trace", messages.trace, messages.TraceQuery),
        answers={200: answers.TracePage},
        errors=(*READING, MessageNotFound),
    ),
    Route(
        *("POST", "/v1/producers", messages.new_producer),
        body=wire.ProducerIdRequest,
        answers={200: wire.ProducerIdentity},
        errors=(Fenced,),
    ),
    # --- groups ------------------------------------------------------------------------------------------------------
    Route("GET", "/v1/groups", groups.list_all, answers={200: answers.GroupList}),
    Route(
        *("PUT", "/v1/groups/<group>", groups.put, groups.PutGroupQuery),
        body=wire.GroupConfig,
        answers={200: wire.GroupDescription, 201: wire.GroupDescription},
        errors=(GroupModeMismatch, KeyOrder, NotLeader),
        links=(Link(groups.show, _same_group),),
    ),
    Route(
        *("GET", "/v1/groups/<group>", groups.show, groups.GroupQuery),
        answers={200: (wire.GroupDescription, PastGroup)},
        errors=(GroupNotFound, OffsetOutOfRange),
    ),
    Route("DELETE", "/v1/groups/<group>", groups.delete, answers={204: None}, errors=(GroupNotFound,)),
    Route(
        *("GET", "/v1/groups/<group>/messages", groups.list_unfinished, groups.UnfinishedQuery),
        answers={200: answers.UnfinishedPage},
        errors=OF_QUEUE,
    ),
    Route(
        *("POST", "/v1/groups/<group>/receive", traffic.receive),
        headers=request_headers.ReceiveHeaders,
        body=wire.ReceiveRequest,
        answers={
            200: {
                wire.JSON: answers.ReceivedMessages,
                wire.BATCH_MSGPACK: wire.PackReceived,
                wire.CLOUD_EVENT: answers.CloudEvent,
                wire.CLOUD_EVENTS: list[answers.CloudEvent],
            },
            204: None,
        },
        errors=(*OF_QUEUE, KeyOrder, StaleReceipt),
        links=tuple(Link(view, _same_group, _receipts) for view in (traffic.ack, traffic.nack, traffic.extend)),
        is_traffic=True,
    ),
    Route(
        *("POST", "/v1/groups/<group>/ack", traffic.ack),
        body=wire.AckRequest,
        answers={200: wire.ReceiptResults},
        errors=(*OF_QUEUE, StaleReceipt),
        is_traffic=True,
    ),
    Route(
        *("POST", "/v1/groups/<group>/nack", traffic.nack),
        body=wire.NackRequest,
        answers={200: wire.ReceiptResults},
        errors=(*OF_QUEUE, StaleReceipt),
        is_traffic=True,
    ),
    Route(
        *("POST", "/v1/groups/<group>/extend", traffic.extend),
        body=wire.ExtendRequest,
        answers={200: wire.ReceiptResults},
        errors=(*OF_QUEUE, StaleReceipt),
        is_traffic=True,
    ),
    Route(
        *("POST", "/v1/groups/<group>/commit", commits.commit),
        body={wire.JSON: wire.JsonCommit, wire.BATCH_MSGPACK: wire.PackCommit},
        answers={200: {wire.JSON: wire.Committed, wire.BATCH_MSGPACK: wire.Committed}},
        errors=(*OF_STREAM, StaleReceipt, OffsetMoved, KeyOrder, MessageTooLarge),
        is_traffic=True,
    ),
    Route(
        *("POST", "/v1/groups/<group>/pause", groups.pause, Parameters),
        body=wire.PauseRequest,
        answers={204: None},
        errors=(GroupNotFound, GroupModeMismatch),
    ),
    Route(
        *("POST", "/v1/groups/<group>/resume", groups.resume, Parameters),
        body=wire.PauseRequest,
        answers={204: None},
        errors=(GroupNotFound, GroupModeMismatch),
    ),
    Route(
        *("POST", "/v1/groups/<group>/move", groups.move, Parameters),
        body=wire.MoveRequest,
        answers={200: wire.Moved},
        errors=(*OF_QUEUE, KeyOrder, StaleReceipt, MessageTooLarge),
    ),
    Route(
        *("GET", "/v1/groups/<group>/dead-letters", groups.list_dead_letters, groups.DeadLettersQuery),
        answers={
            200: Answer(
                {wire.JSON: answers.DeadLetterPage, wire.CLOUD_EVENTS: list[answers.CloudEvent]},
                {"PortalMQ-Next-After": "As `next_after` of a page, where the body is an array of events"},
            )
        },
        errors=OF_QUEUE,
    ),
    Route(
        *("DELETE", "/v1/groups/<group>/dead-letters", groups.drop_dead_letters, groups.DropDeadLettersQuery),
        answers={200: answers.DroppedDeadLetters},
        errors=OF_QUEUE,
    ),
    Route(
        *("POST", "/v1/groups/<group>/dead-letters/redrive", groups.redrive),
        body=wire.RedriveRequest,
        answers={200: wire.Redriven},
        errors=OF_QUEUE,
    ),
    # --- stream groups -----------------------------------------------------------------------------------------------
    Route(
        *("POST", "/v1/groups/<group>/members", streams.join),
        body=stream.JoinRequest,
        answers={200: stream.MemberAnswer},
        errors=OF_STREAM,
        links=(
            Link(
                streams.heartbeat,
                {**_same_group, "member": "$response.body#/member_id"},
                {"generation": "$response.body#/generation"},
            ),
            Link(streams.leave, {**_same_group, "member": "$response.body#/member_id"}),
        ),
    ),
    Route(
        *("POST", "/v1/groups/<group>/members/<member>/heartbeat", streams.heartbeat),
        body=stream.HeartbeatRequest,
        answers={200: stream.MemberAnswer},
        errors=OF_STREAM,
    ),
    Route(
        *("DELETE", "/v1/groups/<group>/members/<member>", streams.leave),
        answers={204: None},
        errors=OF_STREAM,
    ),
    Route(
        *("PUT", "/v1/groups/<group>/offsets", streams.commit),
        body=stream.CommitOffsetsRequest,
        answers={200: stream.OffsetResults},
        errors=OF_STREAM,
    ),
    Route(
        *("GET", "/v1/groups/<group>/offsets", streams.offsets),
        answers={200: stream.GroupOffsets},
        errors=OF_STREAM,
    ),
    Route(
        *("POST", "/v1/groups/<group>/seek", streams.seek),
        headers=request_headers.IdempotencyHeaders,
        body=stream.SeekRequest,
        answers={200: stream.SeekAnswer},
        errors=(*OF_STREAM, RequestInProgress, IdempotencyKeyReused),
    ),
    Route(
        *("POST", "/v1/fetch", fetch.fetch),
        body=stream.FetchRequest,
        answers={200: {stream.FRAMES_MSGPACK: stream.FetchAnswer}},
        is_traffic=True,
    ),
    Route("POST", "/v1/sql", sql.query, body=wire.SqlRequest, answers={200: wire.SqlResult}, errors=(QueryLimit,)),
    # --- schedules ---------------------------------------------------------------------------------------------------
    Route("GET", "/v1/schedules", schedules.list_all, answers={200: answers.ScheduleList}),
    Route(
        *("PUT", "/v1/schedules/<schedule>", schedules.put, Parameters),
        body=ScheduleRequest,
        answers={200: ScheduleDescription, 201: ScheduleDescription},
        errors=(TopicNotFound, NotLeader, NotEnoughReplicas),
        links=tuple(Link(view, _same_schedule) for view in (schedules.show, schedules.pause, schedules.delete)),
    ),
    Route(
        *("GET", "/v1/schedules/<schedule>", schedules.show),
        answers={200: ScheduleDescription},
        errors=(ScheduleNotFound,),
    ),
    Route(
        *("DELETE", "/v1/schedules/<schedule>", schedules.delete),
        answers={204: None},
        errors=(ScheduleNotFound, NotLeader, NotEnoughReplicas),
    ),
    Route(
        *("POST", "/v1/schedules/<schedule>/pause", schedules.pause, Parameters),
        answers={204: None},
        errors=(ScheduleNotFound, NotLeader, NotEnoughReplicas),
    ),
    Route(
        *("POST", "/v1/schedules/<schedule>/resume", schedules.resume, Parameters),
        answers={204: None},
        errors=(ScheduleNotFound, NotLeader, NotEnoughReplicas),
    ),
    # --- locks -------------------------------------------------------------------------------------------------------
    Route("GET", "/v1/locks", locks.list_all, answers={200: answers.LockList}),
    Route("GET", "/v1/locks/<lock>", locks.show, answers={200: wire.LockDescription}, errors=(LockNotFound,)),
    Route(
        *("POST", "/v1/locks/<lock>", locks.acquire),
        body=wire.LockRequest,
        answers={200: wire.LockGrant},
        errors=(LockHeld,),
        links=(
            Link(
                locks.renew,
                {"lock": "$request.path.lock"},
                {"owner": "$response.body#/owner", "fencing_token": "$response.body#/fencing_token"},
            ),
            Link(
                locks.release,
                {
                    "lock": "$request.path.lock",
                    "owner": "$response.body#/owner",
                    "fencing_token": "$response.body#/fencing_token",
                },
            ),
        ),
    ),
    Route(
        *("PUT", "/v1/locks/<lock>", locks.renew),
        body=wire.LockRenewal,
        answers={200: wire.LockGrant},
        errors=(LockNotFound, Fenced),
    ),
    Route(
        *("DELETE", "/v1/locks/<lock>", locks.release, locks.ReleaseQuery),
        body=wire.LockRelease,
        answers={204: None},
        errors=(LockNotFound, Fenced),
    ),
)
