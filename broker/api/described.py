"""What the types of bodies do not say: an example of each, and schemas of fields that are decoded later."""

from __future__ import annotations

from typing import Any

from portalmq import stream_wire, wire
from portalmq.broker.api import answers
from portalmq.contract import history
from portalmq.contract.schedules import ScheduleDescription, ScheduleRequest

_milliseconds: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": wire.INTEGER_MAX}
_at: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, _milliseconds]}

_text: dict[str, Any] = {"type": "string", "minLength": 1}

_priority: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 31}, {"type": "null"}]}
# Conditions that must all hold, {field: {operator: operand}}: broker/core/queue/predicate.py.
_where: dict[str, Any] = {
    "type": ["object", "null"],
    "minProperties": 1,
    "maxProperties": 32,
    "propertyNames": {"pattern": r"^(value(\.[^.]+){0,16}|headers\..+|key|reason|delivery_count)$"},
    "additionalProperties": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {
            **{name: {"type": ["string", "number", "boolean", "null"]} for name in ("eq", "ne", "contains")},
            **{name: {"type": ["string", "number"]} for name in ("lt", "lte", "gt", "gte")},
            "exists": {"type": "boolean"},
        },
        "additionalProperties": False,
    },
}

# Schemas of fields, besides those of their types; "" for members that are not fields.
FIELDS: dict[tuple[type, str], dict[str, Any]] = {
    (answers.CloudEvent, ""): {"type": ["string", "boolean", "integer", "null"]},
    **{(answers.CloudEvent, name): _text for name in ("id", "source", "type", "datacontenttype", "subject")},
    (answers.CloudEvent, "time"): {"type": "string", "format": "date-time"},
    (wire.AlterTopic, "config"): {"$ref": "#/components/schemas/TopicConfig"},
    (wire.JsonMessage, "priority"): _priority,
    (wire.GroupConfig, "start"): {
        "anyOf": [
            {"enum": ["earliest", "latest"]},
            {"type": "object", "properties": {"at": _at}, "required": ["at"], "additionalProperties": False},
        ],
        "default": "earliest",
    },
    (wire.RedriveRequest, "where"): _where,
    (wire.ScheduledSelection, "where"): _where,
    (wire.MoveScheduled, "where"): _where,
    (wire.CopyRequest, "priority"): _priority,
    (stream_wire.SeekRequest, "to"): {
        "anyOf": [
            {"enum": ["earliest", "latest"]},
            {
                "type": "object",
                "properties": {"offset": {"type": "integer", "minimum": 0, "maximum": wire.INTEGER_MAX}},
                "required": ["offset"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"at": _at},
                "required": ["at"],
                "additionalProperties": False,
            },
        ]
    },
}

_place = {"partition": 0, "offset": 17}
_message = {
    "id": "0-17",
    "topic": "orders",
    **_place,
    "key": "customer-7",
    "content_type": "application/json",
    "headers": {},
    "timestamp_ms": 1_774_000_000_000,
    "value": {"total": 12.5},
}
_event = {
    "specversion": "1.0",
    "id": "o-1",
    "source": "/shop",
    "type": "shop.order",
    "datacontenttype": "application/json",
    "data": {"total": 12.5},
}
_lease = {"receipt": "cmVjZWlwdA", "delivery_count": 1, "lease_expires_at_ms": 1_774_000_030_000}
_group = {
    "group": "billing",
    "mode": "queue",
    "members": [],
    "ready": 3,
    "in_flight": 1,
    "scheduled": 0,
    "dead": 0,
    "lag": 4,
    "oldest_unacked_ms": 1_200,
    "config": {"visibility_timeout_ms": 30_000},
}
_counts = {"ready": 3, "in_flight": 1, "scheduled": 0, "dead": 0, "oldest_unacked_ms": 1_200}
_past = {"mode": "queue", **_counts, "lag": 4}
_written = {"leader_epoch": 3, "broker": 1}
_recurring = {
    "topic": "reports",
    "cron": "0 6 * * 1-5",
    "timezone": "Europe/Berlin",
    "value": {"report": "sales"},
    "headers": {},
    "paused": False,
    "catch_up": True,
}
_schedule = {
    "name": "nightly-report",
    "partition": 0,
    "content_type": "application/json",
    "key": None,
    "next_tick": "2026-05-04T04:00:00Z",
    **_recurring,
}
_lock = {"name": "nightly-job", "owner": "host-1", "fencing_token": 7}
_broker = {"id": 1, "url": "http://localhost:5000", "live": True}
_assigned = {"topic": "orders", **_place, "since": 3}
_grant = {"owner": "host-1", "fencing_token": 7, "expires_in_ms": 30_000}
_page = {"next_offset": 18, "log_start_offset": 0, "high_watermark": 18}

EXAMPLES: dict[Any, Any] = {
    answers.Status: {"status": "ok"},
    answers.Health: {"status": "ready", "broker_id": 1, "led": 2, "disk_full": False},
    wire.ClusterDescription: {"cluster_id": "0f" * 16, "controller": 1, "brokers": [_broker]},
    wire.Metadata: {
        "brokers": [_broker],
        "topics": [
            {
                "name": "orders",
                "partitions": [
                    {"partition": 0, "leader": 1, "leader_epoch": 3, "leader_url": "http://localhost:5000"},
                ],
            }
        ],
    },
    # topics
    answers.TopicList: {"topics": [{"name": "orders", "partitions": 3, "replication_factor": 3}]},
    wire.CreateTopic: {"partitions": 3, "config": {"retention_ms": 86_400_000}},
    wire.AlterTopic: {"config": {"max_message_bytes": 65_536}},
    wire.TopicDescription: {
        "name": "orders",
        "partitions": [
            {
                "partition": 0,
                "leader": 1,
                "leader_epoch": 3,
                "replicas": [1, 2, 3],
                "isr": [1, 2, 3],
                "log_start_offset": 0,
                "high_watermark": 18,
                "size_bytes": 4_096,
            }
        ],
        "config": {"retention_ms": 86_400_000},
    },
    wire.ReplicaDigest: {
        "broker_id": 1,
        "log_start_offset": 0,
        "high_watermark": 18,
        "end_offset": 18,
        "compacted_upto": 0,
        "next_offset": 18,
        "sha256": "00" * 32,
    },
    # messages
    wire.JsonBatch: {
        "messages": [{"value": {"total": 12.5}, "key": "customer-7"}, {"value": "text", "delay_ms": 60_000}]
    },
    wire.PackBatch: {"messages": [{"value": {"total": 12.5}}]},
    answers.ProducedMessage: {"topic": "orders", "id": "0-17", **_place, "timestamp_ms": 1_774_000_000_000},
    answers.ProduceResults: {"results": [{**_place, "timestamp_ms": 1_774_000_000_000}]},
    wire.ProducedRange: {"partition": 0, "base_offset": 17, "count": 2, "timestamp_ms": 1_774_000_000_000},
    answers.BrowsedMessages: {"messages": [_message], **_page},
    wire.PackBrowsePage: {"messages": [{**_place, "value": "dmFsdWU=", "timestamp_ms": 1_774_000_000_000}], **_page},
    answers.CloudEvent: _event,
    list[answers.CloudEvent]: [_event],
    answers.TopicMessages: {"messages": [_message], "more": False},
    answers.ScheduledPage: {"messages": [{**_message, "deliver_at_ms": 1_774_000_060_000}]},
    wire.DeliveryTime: {"delay_ms": 60_000},
    answers.MovedMessage: {"copy_of": "orders/0-17", "deliver_at_ms": 1_774_000_060_000},
    wire.ScheduledSelection: {"where": {"value.customer": {"eq": 7}}, "dry_run": True},
    wire.MoveScheduled: {"ids": ["0-17"], "delay_ms": 60_000},
    answers.RunMessages: {"matched": 2, "run": 0},
    answers.CancelledMessages: {"matched": 2, "cancelled": 0},
    wire.CopyRequest: {"value": {"total": 13.5}, "headers": {"edited-by": "eva"}},
    answers.TracePage: {
        "message": _message,
        "events": [
            {"at_ms": 1_774_000_000_000, "event": "appended", **_written, "offset": 17},
            {
                "at_ms": 1_774_000_000_500,
                "event": "delivered",
                "group": "billing",
                "consumer": "host-1",
                "delivery_count": 1,
                "until_ms": 1_774_000_030_500,
                **_written,
                "offset": 18,
            },
        ],
        "replicas": {"leader": 1, "leader_epoch": 3, "replicas": [1, 2, 3], "isr": [1, 2, 3], "holders": [1, 2, 3]},
        "as_of": {"broker": 1, "is_leader": True, "offset": 19, "at_ms": 1_774_000_001_000},
    },
    wire.ProducerIdRequest: {"name": "importer"},
    wire.ProducerIdentity: {"id": 12, "epoch": 1},
    # groups
    answers.GroupList: {"groups": [_group]},
    wire.GroupConfig: {"visibility_timeout_ms": 60_000, "max_deliveries": 3, "start": "latest"},
    wire.GroupDescription: _group,
    history.PastGroup: {
        "group": "billing",
        "at_ms": 1_774_000_000_000,
        **_past,
        "partitions": [{"topic": "orders", **_place, **_past}],
    },
    answers.UnfinishedPage: {"messages": [{**_message, "state": "ready", "delivery_count": 0}], "counts": _counts},
    wire.ReceiveRequest: {"topics": ["orders"], "max_messages": 10, "wait_ms": 0},
    answers.ReceivedMessages: {"messages": [{**_message, **_lease}]},
    wire.PackReceived: {"messages": [{**_place, "value": "dmFsdWU=", "timestamp_ms": 1_774_000_000_000, **_lease}]},
    wire.AckRequest: {"receipts": ["cmVjZWlwdA"]},
    wire.NackRequest: {"receipts": ["cmVjZWlwdA"], "delay_ms": 5_000, "reason": "the bank does not answer"},
    wire.ExtendRequest: {"receipts": ["cmVjZWlwdA"], "visibility_timeout_ms": 60_000},
    wire.ReceiptResults: {"results": [{"receipt": "cmVjZWlwdA", "status": "ok"}]},
    wire.JsonCommit: {"ack": ["cmVjZWlwdA"], "publish": [{"topic": "invoices", "value": {"total": 12.5}}]},
    wire.PackCommit: {"ack": ["cmVjZWlwdA"], "publish": [{"topic": "invoices", "value": {"total": 12.5}}]},
    wire.Committed: {"acked": 1, "published": 1, "id": "0-23"},
    answers.DeadLetterPage: {"messages": [_message], "next_after": None},
    answers.DroppedDeadLetters: {"dropped": 2},
    wire.RedriveRequest: {"topic": "orders", "where": {"reason": {"contains": "timeout"}}, "dry_run": True},
    wire.PauseRequest: {"reason": "the database moves", "by": "eva@host-1"},
    wire.MoveRequest: {"topic": "orders.dlq", "to_topic": "orders", "limit": 100},
    wire.Moved: {"matched": 2, "moved": 2},
    wire.Redriven: {"matched": 2, "redriven": 0},
    # stream groups
    stream_wire.JoinRequest: {"topics": ["orders"], "member_id": "worker-1"},
    stream_wire.HeartbeatRequest: {"generation": 3},
    stream_wire.MemberAnswer: {
        "member_id": "worker-1",
        "generation": 3,
        "assignment": [_assigned],
        "heartbeat_interval_ms": 2_000,
    },
    stream_wire.CommitOffsetsRequest: {
        "member_id": "worker-1",
        "generation": 3,
        "offsets": [{"topic": "orders", **_place}],
    },
    stream_wire.OffsetResults: {"results": [{"topic": "orders", **_place, "status": "ok"}]},
    stream_wire.GroupOffsets: {
        "offsets": [
            {"topic": "orders", "partition": 0, "committed": 17, "high_watermark": 18, "lag": 1, "lag_ms": 250},
        ]
    },
    stream_wire.SeekRequest: {"topic": "orders", "to": {"at": "2026-01-31T12:00:00Z"}, "dry_run": True},
    stream_wire.SeekAnswer: {"topic": "orders", "offsets": [{"partition": 0, "from": 17, "to": 4}], "dry_run": True},
    stream_wire.FetchRequest: {"partitions": [{"topic": "orders", **_place}], "wait_ms": 0},
    stream_wire.FetchAnswer: {"partitions": [{"topic": "orders", "partition": 0, "next_offset": 18}]},
    # locks
    answers.LockList: {"locks": [{**_lock, "ttl_ms": 30_000, "expires_in_ms": 12_000, "waiters": 0}]},
    wire.LockDescription: {**_lock, "ttl_ms": 30_000, "expires_in_ms": 12_000, "waiters": 0},
    wire.SqlRequest: {"query": "SELECT topic, count(*) AS messages FROM messages GROUP BY topic", "limit": 100},
    wire.SqlResult: {
        "columns": ["topic", "messages"],
        "rows": [["orders", 18]],
        "truncated": False,
        "elapsed_ms": 96.4,
    },
    ScheduleRequest: _recurring,
    ScheduleDescription: _schedule,
    answers.ScheduleList: {"schedules": [_schedule]},
    wire.LockRequest: {"owner": "host-1", "ttl_ms": 30_000, "wait_ms": 0},
    wire.LockRenewal: {"owner": "host-1", "fencing_token": 7},
    wire.LockRelease: {"owner": "host-1", "fencing_token": 7},
    wire.LockGrant: _grant,
}
