"""Exactly-once delivery of a batch to its leader: the stamp, the request, and the reaction to a failure.

The sequence number of a lane advances only when a request is known to be applied, and a lane has one request in flight.
So a request that fails as "not applied" leaves no gap. A batch that expires with an unknown outcome may have left one:
then the producer takes a new identity, and no stamp of the old one is used again (as KIP-98 and KIP-360 do for Kafka).
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import msgspec

from portalmq import wire
from portalmq.errors import (
    Fenced,
    InvalidRequest,
    MessageTooLarge,
    OutOfOrderSequence,
    PortalMQError,
    Unavailable,
)
from portalmq.network.either import Waits, settled
from portalmq.producers.batching import Lane, ProducerBatch
from portalmq.producers.outgoing import with_compressed_values
from portalmq.transport.answers import decode_answer
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import Request, json_request
from portalmq.transport.retries import Backoff, DeadlinePassed, may_repeat

_log = logging.getLogger("portalmq.producer")

RESTAMPS_MAX = 3

_HEADERS = (
    ("Content-Type", wire.BATCH_MSGPACK),
    ("Accept", wire.BATCH_MSGPACK),
    ("Prefer", "return=minimal"),
)

_encode = msgspec.msgpack.Encoder().encode


class _OutBatch(msgspec.Struct, omit_defaults=True):
    """A wire.PackBatch whose messages have either form (wire.PackMessage, outgoing.PlainMessage)."""

    messages: list[Any]
    producer: wire.ProducerStamp | None = None
    values: wire.CompressedValues | None = None


class BatchSender:
    """Sends batches. No two threads may send for one lane. Holds the producer's identity, which all lanes share."""

    def __init__(
        self,
        transport: EitherCalls,
        acks: wire.Acks,
        *,
        idempotent: bool,
        producer_name: str | None,
        delivery_timeout_s: float,
        waits: Waits,
        compresses: bool = False,
    ) -> None:
        self._transport = transport
        self._acks = acks
        self._idempotent = idempotent
        self._name = producer_name
        self._compresses = compresses
        self._delivery_timeout_s = delivery_timeout_s
        self._identity: wire.ProducerIdentity | None = None
        self._identity_lock = waits.mutex()
        # Identifies this instance, so that its next epoch does not fence a successor of the name.
        self._instance = secrets.token_hex(8) if producer_name is not None else ""
        self._had_name = False

    async def send_batch(self, lane: Lane, batch: ProducerBatch, limit_s: float | None) -> float | None:
        """Send the rest of the batch. Return None once every message has its outcome, else the seconds until the next
        try.

        `limit_s` bounds the wait for one answer; a later call repeats the request. Raises no PortalMQError.
        """
        limit = None if limit_s is None else time.monotonic() + limit_s
        while batch.ranges:
            deadline = batch.deadline if limit is None else min(batch.deadline, limit)
            try:
                produced = await self._post(lane, batch, deadline)
            except PortalMQError as error:
                pause_s = await self._after_failure(lane, batch, error)
                if pause_s is not None:
                    return pause_s
            else:
                start, end = batch.ranges[-1]
                # Not a sum of its own: after a signal handler's exception the range is sent, and counted, again.
                lane.next_sequence = batch.sequence + end - start
                lane.backoff = None
                batch.finish_range(produced)
        return None

    async def fail_batch(self, lane: Lane, batch: ProducerBatch, fault: BaseException) -> None:
        """Fail the batch after an error that is no PortalMQError, so that its futures do not hang."""
        _log.error("sending to %s/%d failed", lane.topic, lane.partition, exc_info=fault)
        await self._drop_identity(lane)
        while batch.ranges:
            failure = Unavailable(f"sending failed: {fault!r}", outcome="unknown", retryable=False)
            failure.__cause__ = fault
            batch.finish_range(failure)

    async def _post(self, lane: Lane, batch: ProducerBatch, deadline: float) -> wire.ProducedRange:
        if self._idempotent:
            await self._take_identity(lane, batch, deadline)
        body = batch.body
        if body is None:
            body = batch.body = self._encode(lane, batch)
        request = Request(
            "POST",
            lane.path,
            body,
            _HEADERS,
            repeatable=self._idempotent,
            leader_of=(lane.topic, lane.partition),
        )
        answer = await settled(self._transport.attempt(request, deadline))
        if self._acks == "none":
            start, end = batch.ranges[-1]
            return wire.ProducedRange(-1, -1, end - start, 0)
        return decode_answer(answer, wire.ProducedRange)

    def _encode(self, lane: Lane, batch: ProducerBatch) -> bytes:
        start, end = batch.ranges[-1]
        messages = batch.messages if end - start == batch.count else batch.messages[start:end]
        stamp = None
        batch.sequence = lane.next_sequence
        if lane.identity is not None:
            stamp = wire.ProducerStamp(lane.identity.id, lane.identity.epoch, batch.sequence)
        packed = with_compressed_values(messages) if self._compresses and not batch.is_plain else None
        batch.is_compressed = packed is not None
        if packed is None:
            return _encode(_OutBatch(messages, stamp))
        return _encode(_OutBatch(packed[0], stamp, packed[1]))

    async def _take_identity(self, lane: Lane, batch: ProducerBatch, deadline: float) -> None:
        """Stamp with the producer's current identity. A range whose last try ended unknown keeps its stamp."""
        if batch.unknown or (lane.identity is not None and lane.identity is self._identity):
            return
        async with self._identity_lock:
            if self._identity is None:
                self._identity = await self._new_identity(deadline)
            lane.identity = self._identity
        lane.next_sequence = 0
        batch.body = None

    async def _new_identity(self, deadline: float) -> wire.ProducerIdentity:
        named = wire.ProducerIdRequest(self._name)
        if self._name is not None:
            named.instance, named.renews = self._instance, self._had_name
        request = json_request("POST", "/v1/producers", named, anywhere=self._name is None)
        try:
            answer = await settled(self._transport.attempt(request, deadline))
            identity = decode_answer(answer, wire.ProducerIdentity)
            self._had_name = True
            return identity
        except PortalMQError as error:
            # An unused identity does no harm, so the batch was not applied.
            error.outcome = "not_applied"
            raise

    async def _after_failure(self, lane: Lane, batch: ProducerBatch, error: PortalMQError) -> float | None:
        """Decide about the topmost range. Return None to continue at once, else the seconds until the next try."""
        if isinstance(error, DeadlinePassed) and batch.failure is not None:
            error = batch.failure
        batch.failure = error
        batch.unknown = batch.unknown or error.outcome == "unknown"
        if not batch.unknown and await self._try_other_form(lane, batch, error):
            return None
        if may_repeat(error, self._idempotent):
            lane.backoff = lane.backoff or Backoff()
            pause_s = lane.backoff.next_s(error.retry_after_s)
            if time.monotonic() + pause_s < self._transport.reachability.limit(batch.deadline, batch.born):
                return pause_s
            if self._transport.reachability.was_reached:
                error = _late(error, self._delivery_timeout_s)
        if batch.unknown:
            error.outcome = "unknown"
            await self._drop_identity(lane)
        batch.finish_range(error)
        batch.failure = None
        return None

    async def _try_other_form(self, lane: Lane, batch: ProducerBatch, error: PortalMQError) -> bool:
        """Prepare a request that was certainly not applied in another form; return False if there is none."""
        start, end = batch.ranges[-1]
        if isinstance(error, OutOfOrderSequence) and batch.restamps < RESTAMPS_MAX:
            # The broker has forgotten this producer (its dedup window is over): continue under a new identity.
            batch.restamps += 1
            await self._drop_identity(lane)
        elif isinstance(error, Fenced) and lane.identity is not self._identity:
            # Fenced by this very producer: another lane has taken a newer epoch.
            batch.body = None
        elif isinstance(error, InvalidRequest) and batch.is_compressed:
            # By a broker that does not know compressed values, probably: the next try tells.
            _log.warning("%s/%d: compressed values were refused (%s): sent plain", lane.topic, lane.partition, error)
            batch.is_plain, batch.body = True, None
        elif isinstance(error, InvalidRequest | MessageTooLarge) and end - start > 1:
            # One message is at fault. The others are sent without it.
            batch.split_range()
        else:
            return False
        return True

    async def _drop_identity(self, lane: Lane) -> None:
        """Drop an identity whose last stamp may or may not have been used."""
        async with self._identity_lock:
            if self._identity is lane.identity:
                self._identity = None
        lane.identity = None


def _late(error: PortalMQError, delivery_timeout_s: float) -> PortalMQError:
    error.detail = f"not delivered within {delivery_timeout_s:g} s; the last try: {error.detail}"
    error.args = (error.detail,)
    return error
