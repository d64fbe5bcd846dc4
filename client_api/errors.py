"""Every error of PortalMQ.

Each class has the stable code of the HTTP contract, its status, whether a repeat may help, and what is known of the
outcome. The broker raises these classes, one place encodes them as `application/problem+json` (RFC 9457), and the
client decodes the answer into the same class.

    PortalMQError
    |-- InvalidRequest 400          |-- StaleReceipt 409            |-- MessageTooLarge 413
    |   `-- QueryLimit 400          |   `-- LeaseLost (client)      |
    |-- Unauthorized 401            |-- Fenced 409                  |-- UnsupportedMediaType 415
    |-- Forbidden 403               |-- IllegalGeneration 409       |-- OffsetOutOfRange 416
    |-- TopicNotFound 404           |-- OutOfOrderSequence 409      |-- NotLeader 421
    |-- GroupNotFound 404           |-- TopicExists 409             |-- IdempotencyKeyReused 422
    |-- PartitionNotFound 404       |-- LockHeld 409                |-- Backpressure 429
    |-- LockNotFound 404            |-- RequestInProgress 409       |-- NotEnoughReplicas 503
    |-- ScheduleNotFound 404        |-- GroupModeMismatch 409       |-- Unavailable 503
    |-- MessageNotFound 404         |-- KeyOrder 409                `-- StorageFull 507
    |-- NotFound 404                |-- OffsetMoved 409
    `-- MethodNotAllowed 405

The outcome is one of three: `not_applied` (the request had no effect, and will have none), `unknown` (it may have had
one, or may yet), `partial` (the items answered "ok" were applied, the others were not).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

Outcome = Literal["not_applied", "unknown", "partial"]

PROBLEM_TYPE_BASE = "urn:portalmq:error:"


class PortalMQError(Exception):
    """Base of every error of PortalMQ.

    `code` is stable and meant for programs. `str(error)` is for people and says what to do. `retry_after_s` is how long
    a repeat should wait. `extra` has the members that this error adds to its problem document (for instance
    `leader_url`, `results`).
    """

    code: ClassVar[str] = "unavailable"
    status: ClassVar[int] = 503
    title: ClassVar[str] = "PortalMQ error"
    retryable_by_default: ClassVar[bool] = False

    def __init__(
        self,
        detail: str = "",
        *,
        retryable: bool | None = None,
        outcome: Outcome = "not_applied",
        retry_after_s: float | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.retryable = self.retryable_by_default if retryable is None else retryable
        self.outcome: Outcome = outcome
        self.retry_after_s = retry_after_s
        self.extra = extra

    def __copy__(self) -> Self:
        """Return an error of its own, without the traceback. Not every subclass can be made from its `args`."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__, extra=dict(self.extra))
        return made

    def problem(self) -> dict[str, Any]:
        """Return the members of this error's RFC 9457 problem document."""
        return {
            "type": PROBLEM_TYPE_BASE + self.code,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
            "outcome": self.outcome,
            **({} if self.retry_after_s is None else {"retry_after_ms": round(self.retry_after_s * 1000)}),
            **self.extra,
        }


class InvalidRequest(PortalMQError):
    code, status, title = "invalid_request", 400, "The request is not valid"


class QueryLimit(InvalidRequest):
    code, title = "query_limit", "The query takes more time or memory than it may"


class Unauthorized(PortalMQError):
    code, status, title = "unauthorized", 401, "A valid token is needed"


class Forbidden(PortalMQError):
    code, status, title = "forbidden", 403, "This is not allowed"


class NotFound(PortalMQError):
    code, status, title = "not_found", 404, "There is no such resource"


class TopicNotFound(NotFound):
    code, status, title = "topic_not_found", 404, "There is no such topic"


class GroupNotFound(NotFound):
    code, status, title = "group_not_found", 404, "There is no such group"


class PartitionNotFound(NotFound):
    code, status, title = "partition_not_found", 404, "There is no such partition"


class LockNotFound(NotFound):
    code, status, title = "lock_not_found", 404, "There is no such lock"


class ScheduleNotFound(NotFound):
    code, status, title = "schedule_not_found", 404, "There is no such schedule"


class MessageNotFound(NotFound):
    code, status, title = "message_not_found", 404, "There is no such message"


class MethodNotAllowed(PortalMQError):
    code, status, title = "method_not_allowed", 405, "The resource does not support this method"


class TopicExists(PortalMQError):
    code, status, title = "topic_exists", 409, "The topic exists with other settings"


class LockHeld(PortalMQError):
    code, status, title, retryable_by_default = "lock_held", 409, "The lock is held", True


class RequestInProgress(PortalMQError):
    code, status, title, retryable_by_default = "request_in_progress", 409, "The first request is still running", True


class GroupModeMismatch(PortalMQError):
    code, status, title = "group_mode_mismatch", 409, "The group has the other mode"


class KeyOrder(PortalMQError):
    code, status, title = "key_order", 409, "A group reads the topic in key order"


class StaleReceipt(PortalMQError):
    code, status, title = "stale_receipt", 409, "The lease was lost"


class LeaseLost(StaleReceipt):
    """The leases of messages expired while they were handled, and other consumers have or had them.

    Only a consumer raises this, when it is asked for the next message. `extra["messages"]` is the number of messages.
    """

    title = "The lease of a message was lost while it was handled"


class Fenced(PortalMQError):
    code, status, title = "fenced", 409, "A newer owner has taken over"


class IllegalGeneration(PortalMQError):
    code, status, title = "illegal_generation", 409, "The group has moved to another generation"


class OffsetMoved(PortalMQError):
    code, status, title = "offset_moved", 409, "The group has committed another offset"


class OutOfOrderSequence(PortalMQError):
    code, status, title = "out_of_order_sequence", 409, "The producer's sequence has a gap"


class MessageTooLarge(PortalMQError):
    code, status, title = "message_too_large", 413, "The body or a message is too large"


class UnsupportedMediaType(PortalMQError):
    code, status, title = "unsupported_media_type", 415, "The content type or encoding is not supported"


class OffsetOutOfRange(PortalMQError):
    code, status, title = "offset_out_of_range", 416, "The offset is outside the log"


class NotLeader(PortalMQError):
    code, status, title, retryable_by_default = "not_leader", 421, "Another broker leads this partition", True


class IdempotencyKeyReused(PortalMQError):
    code, status, title = "idempotency_key_reused", 422, "The Idempotency-Key was used for another message"


class Backpressure(PortalMQError):
    code, status, title, retryable_by_default = "backpressure", 429, "Too many messages or requests", True


class NotEnoughReplicas(PortalMQError):
    code, status, title, retryable_by_default = "not_enough_replicas", 503, "Too few replicas are in sync", True


class Unavailable(PortalMQError):
    code, status, title, retryable_by_default = "unavailable", 503, "The broker cannot answer now", True


class StorageFull(PortalMQError):
    code, status, title, retryable_by_default = "storage_full", 507, "The disk is nearly full", True


def _subclasses(cls: type[PortalMQError]) -> list[type[PortalMQError]]:
    return [cls, *(deeper for direct in cls.__subclasses__() for deeper in _subclasses(direct))]


# The base class comes first, so that Unavailable, which has the same code, replaces it.
ERRORS_BY_CODE: dict[str, type[PortalMQError]] = {
    cls.code: cls for cls in _subclasses(PortalMQError) if cls is not LeaseLost
}


def error_from_problem(problem: dict[str, Any], *, retry_after_s: float | None = None) -> PortalMQError:
    """Return the error that a problem document describes; an unknown code gives the base class with that code.

    A document without an `outcome` counts as `unknown`: an intermediary (a proxy, for instance) may have written it.
    """
    known = {"type", "title", "status", "detail", "code", "retryable", "outcome", "instance", "retry_after_ms"}
    extra = {name: value for name, value in problem.items() if name not in known and name != "retry_after_s"}
    if isinstance(problem.get("retry_after_ms"), int):  # the header has whole seconds only
        retry_after_s = problem["retry_after_ms"] / 1000
    cls = ERRORS_BY_CODE.get(str(problem.get("code")), PortalMQError)
    error = cls(
        str(problem.get("detail") or problem.get("title") or ""),
        retryable=bool(problem.get("retryable", cls.retryable_by_default)),
        outcome=problem.get("outcome", "unknown"),
        retry_after_s=retry_after_s,
        **extra,
    )
    if cls is PortalMQError:
        error.code = str(problem.get("code", cls.code))  # type: ignore[misc]
        error.status = int(problem.get("status", cls.status))  # type: ignore[misc]
    return error
