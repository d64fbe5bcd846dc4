"""The views of the traffic: produce, receive, ack, nack, extend.

They take an HttpRequest and return ResponseParts. So Dispatcher (dispatch.py) serves them without the cost of Flask and
of WSGI, and Flask can serve them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from portalmq import wire
from portalmq.broker.api import cloud_events, outgoing
from portalmq.broker.api.answers_in_flight import Portion
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.incoming import decode_messages
from portalmq.broker.api.query import Parameters
from portalmq.broker.api.request_context import RequestContext, ResponseParts, accepts_packed, encoded, may_forward
from portalmq.broker.cluster.rpc.queues import Verb
from portalmq.broker.partition.long_poll import Leaderships
from portalmq.broker.queues.later_acks import Acked, stale_of
from portalmq.broker.queues.settle import SettleRequest, Verdict
from portalmq.errors import InvalidRequest, PortalMQError, StaleReceipt, Unavailable
from portalmq.wire import NonNegative

_MINIMAL = (("Preference-Applied", "return=minimal"),)


class ProduceQuery(Parameters):
    """`partition`: of all messages. `acks`: which replicas have to store the messages before the answer."""

    partition: NonNegative | None = None
    acks: wire.Acks = "all"


def produce(context: RequestContext, request: HttpRequest, topic: str, query: ProduceQuery) -> ResponseParts:
    """Append messages to a topic: a batch, or the body as one message, whose options are in headers. A message header
    comes as `PortalMQ-Header-<Name>`, and `ce-*` and `traceparent` are kept."""
    wire.check_name(topic, "topic")
    partition, acks = query.partition, query.acks
    wanted = decode_messages(
        request.headers.get("content-type"),
        context.body_of(request),
        request.headers,
        context.broker.wall_ms(),
        partial(context.decompress, request),
    )
    packed = accepts_packed(request)
    if not wanted.records:
        return encoded({"results": []}, status=202 if acks == "none" else 200)
    _check_one_partition(wanted.partitions, partition)
    wanted.acks, wanted.partition, wanted.forward = acks, partition, may_forward(request)
    if partition is not None and not wanted.is_single and wanted.keys is None and _wants_minimal(request):
        produced = context.broker.produce_range(topic, wanted)
        return encoded(produced, packed=packed, status=202 if acks == "none" else 200)._replace(headers=_MINIMAL)
    results = context.broker.produce(topic, wanted)
    return single_answer(topic, results[0]) if wanted.is_single else _batch_answer(results, acks, packed=packed)


def _check_one_partition(partitions: list[int | None] | None, partition: int | None) -> None:
    """Raise InvalidRequest when a message contradicts the partition of the query."""
    if partition is None or partitions is None:
        return
    for index, named in enumerate(partitions):
        if named is not None and named != partition:
            raise InvalidRequest(f"message {index} names partition {named}, the query names {partition}")


def _wants_minimal(request: HttpRequest) -> bool:
    return _prefers(request, "return=minimal")


def _prefers(request: HttpRequest, preference: str) -> bool:
    return preference in request.headers.get("prefer", "").replace(" ", "").lower()


def single_answer(topic: str, result: wire.Produced | PortalMQError) -> ResponseParts:
    if isinstance(result, PortalMQError):
        raise result
    if result.offset < 0:
        return encoded({"topic": topic}, status=202)
    answer = {
        "id": f"{result.partition}-{result.offset}",
        "topic": topic,
        "partition": result.partition,
        "offset": result.offset,
        "timestamp_ms": result.timestamp_ms,
    }
    return encoded(answer)


def _batch_answer(results: Sequence[wire.Produced | PortalMQError], acks: wire.Acks, *, packed: bool) -> ResponseParts:
    if acks == "none":
        return encoded({"results": [_unknown_place(result) for result in results]}, packed=packed, status=202)
    if any(isinstance(result, PortalMQError) for result in results):
        return encoded({"results": [_shown(result) for result in results]}, packed=packed)
    return encoded({"results": results}, packed=packed)


def _shown(result: wire.Produced | PortalMQError) -> Any:
    return {"error": result.problem()} if isinstance(result, PortalMQError) else result


def _unknown_place(result: wire.Produced | PortalMQError) -> Any:
    return {"error": result.problem()} if isinstance(result, PortalMQError) else {}


# --- receive and settle ----------------------------------------------------------------------------------------------


def receive(context: RequestContext, request: HttpRequest, group: str) -> ResponseParts:
    """Receive messages of a queue group under leases, and wait for them."""
    wire.check_name(group, "group")
    wanted = wire.decode_json(context.body_of(request), wire.ReceiveRequest)
    for topic in wanted.topics:
        wire.check_name(topic, "topic")
    acked: Acked | None = None
    context.answers.check()
    portion = Portion(context.answers)
    how: dict[str, Any] = {
        "forward": may_forward(request),
        "is_first": request.headers.get("portalmq-first-try") == "1",
        "portion": portion,
        "leaderships": (leaderships := Leaderships()),
    }
    packed = accepts_packed(request)
    events = None if packed else _accepted_events(request, wanted)
    try:
        with context.parked(wanted.wait_ms):
            if wanted.ack:
                delivered, acked = context.broker.receive_handler.ack_and_receive(
                    group, wanted, peer_of(request), **how, may_ack_later=packed and _prefers(request, wire.ACKS_LATER)
                )
                if acked.verdicts is not None:
                    _check_settled(wanted.ack, acked.verdicts)
                    if not all(acked.verdicts):
                        acked.stale.extend(stale_of(wanted.ack, acked.verdicts))
            else:
                delivered = context.broker.receive_handler.receive(group, wanted, peer_of(request), **how)
        if events is None:
            body = outgoing.encode_received(delivered, acked, packed=packed)
        elif not delivered and events == wire.CLOUD_EVENT:
            return ResponseParts(b"", 204)
        else:
            single = events == wire.CLOUD_EVENT
            body = cloud_events.encode_event(delivered[0]) if single else cloud_events.encode_events(delivered)
        if not packed:  # other greenlets may have run meanwhile
            leaderships.check()
        context.answers.note(request, len(body))
    finally:
        portion.end()
    return ResponseParts(body, 200, wire.BATCH_MSGPACK if packed else events or wire.JSON)


def _accepted_events(request: HttpRequest, wanted: wire.ReceiveRequest) -> str | None:
    """Return the media type of events that the request asks for, or None. A single event is one message."""
    accepted = request.headers.get("accept", "").lower()
    if "cloudevents" not in accepted:
        return None
    for media in (wire.CLOUD_EVENT, wire.CLOUD_EVENTS):
        if media in accepted:
            if wanted.ack:
                raise InvalidRequest("an answer in CloudEvents has no room for stale receipts: ack with another call")
            if media == wire.CLOUD_EVENT:
                wanted.max_messages = 1
            return media
    return None


def ack(context: RequestContext, request: HttpRequest, group: str) -> ResponseParts:
    """Acknowledge messages: they are done."""
    wire.check_name(group, "group")
    wanted = wire.decode_json(context.body_of(request), wire.AckRequest)
    return _settled(
        wanted.receipts, context.broker.settlement.settle(group, wanted.receipts, forward=may_forward(request))
    )


def nack(context: RequestContext, request: HttpRequest, group: str) -> ResponseParts:
    """Give messages back, to be delivered again."""
    wire.check_name(group, "group")
    wanted = wire.decode_json(context.body_of(request), wire.NackRequest)
    if wanted.dead and (wanted.unseen or wanted.delay_ms is not None):
        raise InvalidRequest("`dead` makes dead letters of the messages: leave out `unseen` and `delay_ms`")
    verb: Verb = "reject" if wanted.dead else "release" if wanted.unseen else "nack"
    settle_request = SettleRequest(verb, wanted.delay_ms, wanted.reason)
    verdicts = context.broker.settlement.settle(group, wanted.receipts, settle_request, forward=may_forward(request))
    return _settled(wanted.receipts, verdicts)


def extend(context: RequestContext, request: HttpRequest, group: str) -> ResponseParts:
    """Extend leases."""
    wire.check_name(group, "group")
    wanted = wire.decode_json(context.body_of(request), wire.ExtendRequest)
    settle_request = SettleRequest("extend", wanted.visibility_timeout_ms)
    verdicts = context.broker.settlement.settle(group, wanted.receipts, settle_request, forward=may_forward(request))
    return _settled(wanted.receipts, verdicts)


def _settled(receipts: list[str], verdicts: Sequence[Verdict]) -> ResponseParts:
    _check_settled(receipts, verdicts)
    results = _results(receipts, verdicts)
    if not all(verdicts):
        raise StaleReceipt(
            f"{verdicts.count(False)} of {len(verdicts)} leases have passed on; see `results` for each receipt",
            outcome="partial",
            results=results,
        )
    return encoded(wire.ReceiptResults(results))


def _check_settled(receipts: list[str], verdicts: Sequence[Verdict]) -> None:
    """Raise Unavailable when a leader could not be reached: its receipts are `unknown` in the results. Sending all
    receipts again is safe."""
    if verdicts.count(True) == len(verdicts):
        return
    errors = [verdict for verdict in verdicts if isinstance(verdict, PortalMQError)]
    if errors:
        raise Unavailable(
            f"{len(errors)} of {len(verdicts)} receipts did not reach their leader: {errors[0]}",
            outcome="unknown",
            retry_after_s=errors[0].retry_after_s,
            results=_results(receipts, verdicts),
        )


def _results(receipts: list[str], verdicts: Sequence[Verdict]) -> list[wire.ReceiptResult]:
    return [
        wire.ReceiptResult(
            receipt, "unknown" if isinstance(verdict, PortalMQError) else "ok" if verdict else "stale_receipt"
        )
        for receipt, verdict in zip(receipts, verdicts, strict=True)
    ]
