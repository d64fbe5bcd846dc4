"""Answers of brokers as values or errors; also answers of others, such as proxies."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from portalmq import wire
from portalmq.errors import ERRORS_BY_CODE, PortalMQError, Unavailable, error_from_problem
from portalmq.network.http_answer import HttpAnswer

T = TypeVar("T")


def decode_answer(answer: HttpAnswer, kind: type[T]) -> T:
    """Decode the body of a 2xx answer as a `kind`, from MessagePack or JSON by its Content-Type."""
    packed = answer.headers.get("Content-Type", "").startswith(wire.BATCH_MSGPACK)
    try:
        if packed:
            return msgspec.msgpack.decode(answer.body, type=kind)
        return msgspec.json.decode(answer.body or b"null", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise Unavailable(f"the answer is not PortalMQ's: {fault}", retryable=False, outcome="unknown") from fault


def error_of_answer(answer: HttpAnswer) -> PortalMQError:
    """Return the error of an answer with status 300 or more, from its problem document if it has one."""
    retry_after_s = _seconds(answer.headers.get("Retry-After"))
    if answer.headers.get("Content-Type", "").startswith(wire.PROBLEM):
        try:
            problem: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = {}
        if "code" in problem:
            return error_from_problem(problem, retry_after_s=retry_after_s)
    return _error_of_foreign_answer(answer, retry_after_s)


def _error_of_foreign_answer(answer: HttpAnswer, retry_after_s: float | None) -> PortalMQError:
    """Return the error of an answer that no broker wrote, perhaps a proxy: only the status counts."""
    excerpt = answer.body[:200].decode("utf-8", "replace").strip()
    detail = f"the answer was HTTP {answer.status}, and not in PortalMQ's form: {excerpt or 'an empty body'}"
    if answer.status < 400:
        location = answer.headers.get("Location", "elsewhere")
        return Unavailable(
            f"the broker redirects to {location}; redirects are not followed, name that address yourself",
            retryable=False,
        )
    if answer.status >= 500:
        return Unavailable(
            detail, retryable=answer.status in {502, 503, 504}, outcome="unknown", retry_after_s=retry_after_s
        )
    by_status = {cls.status: cls for cls in reversed(list(ERRORS_BY_CODE.values()))}
    # 404 has several classes: use the general one.
    cls = ERRORS_BY_CODE["not_found"] if answer.status == 404 else by_status.get(answer.status, PortalMQError)
    return cls(detail, retryable=answer.status in {408, 429}, outcome="not_applied", retry_after_s=retry_after_s)


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None
