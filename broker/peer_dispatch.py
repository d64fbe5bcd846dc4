"""The answers to other brokers: for each call of cluster/rpc, the method that answers it.

A call is answered here or refused: nothing is forwarded a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from portalmq.broker.cluster.routing import LeaderRouter, LocalWork
from portalmq.broker.cluster.rpc import (
    BrokerCall,
    PartitionCall,
    PartitionRequest,
    brokers,
    messages,
    queues,
    schedules,
    streams,
)
from portalmq.broker.cluster.unclean_election import answer_log_end
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.wiring import Wiring

A = TypeVar("A")
R = TypeVar("R", bound=msgspec.Struct)
P = TypeVar("P", bound=PartitionRequest)
T = TypeVar("T")
# (body, the connection of the asking broker) -> answer
PeerCall = Callable[[bytes, Peer | None], bytes]

_encode = msgspec.msgpack.Encoder().encode


class PeerDispatch:
    """Answers calls by their names."""

    def __init__(self, leaders: LeaderRouter) -> None:
        self.calls: dict[str, PeerCall] = {}
        self._leaders = leaders

    def broker(self, call: BrokerCall[R, A], answer: Callable[[R], A]) -> None:
        """Answer a call to this broker."""
        self.watched(call, lambda request, peer: answer(request))

    def watched(self, call: BrokerCall[R, A], answer: Callable[[R, Peer | None], A]) -> None:
        """Answer a call to this broker that takes the connection of the asking one, which may close."""
        self.calls[call.name] = lambda body, peer: _encode(answer(call.decode(body), peer))

    def leader(
        self, call: PartitionCall[P, T], local: Callable[[P], LocalWork[T]], *, patience_s: float | None = None
    ) -> None:
        """Answer a call to the leader of partitions with the work that `local` returns for the request."""
        self.leader_watched(call, lambda request, peer: local(request), patience_s=patience_s)

    def leader_watched(
        self,
        call: PartitionCall[P, T],
        local: Callable[[P, Peer | None], LocalWork[T]],
        *,
        patience_s: float | None = None,
    ) -> None:
        def answer(body: bytes, peer: Peer | None) -> bytes:
            request: Any = call.decode(body)
            return self._leaders.serve(call, request, local(request, peer), patience_s=patience_s)

        self.calls[call.name] = answer


def peer_calls(wiring: Wiring) -> dict[str, PeerCall]:
    """Return the answers of a broker, by the names of the calls."""
    on = PeerDispatch(wiring.leaders)
    on.calls["fetch"] = wiring.replication.serve

    on.leader(messages.PRODUCE, wiring.produce_handler.local_produce)
    on.leader(messages.FIRST, wiring.repeat_finder.local_find)
    on.leader_watched(messages.BROWSE, wiring.browser.local_browse)
    on.leader(messages.PURGE, wiring.browser.local_purge)
    on.leader(messages.OPEN_ORDERS, wiring.browser.local_open_orders)
    on.leader(messages.SCHEDULED, wiring.scheduled_messages.local_list)
    on.leader(messages.CANCEL, wiring.scheduled_messages.local_cancel)
    on.leader(messages.TRACE, wiring.message_traces.local_trace)
    on.leader(messages.LOCATE, wiring.message_traces.local_locate)
    on.leader(messages.MATCH_SCHEDULED, wiring.scheduled_messages.local_match)
    on.leader(messages.MOVE_SCHEDULED, wiring.scheduled_messages.local_move)
    on.leader(messages.PARTITIONS, wiring.overview.local_sizes, patience_s=0.0)
    on.broker(messages.FENCE, wiring.producer_fencing.on_fence)

    on.leader(queues.KNOWN, wiring.groups.local_known)
    on.leader(queues.START, wiring.groups.local_start)
    on.watched(queues.RECEIVE, wiring.receive_handler.lease)
    on.broker(queues.REPLAY, wiring.receive_handler.replay)
    on.watched(queues.INTEREST, wiring.receive_handler.await_messages)
    on.leader(queues.SETTLE, wiring.settlement.local_settle)
    on.leader(queues.FINISH, wiring.offset_acks.local_finish)
    on.leader(queues.COMMIT, wiring.group_commits.local_commit)
    on.leader(queues.UNFINISHED, wiring.unfinished.local_list)
    on.leader(queues.LOOK, wiring.queue_sizes.local_look)
    on.leader(queues.DEAD_LETTERS, wiring.dead_letters.local_list)
    on.leader(queues.MATCH_DEAD, wiring.dead_letters.local_match)
    on.leader(queues.REDRIVE, wiring.dead_letters.local_redrive)
    on.leader(queues.DROP_DEAD, wiring.dead_letters.local_drop)
    on.broker(queues.GROUPS, wiring.group_admin.count)
    on.broker(queues.GROUP_AT, wiring.group_past.count)
    on.leader(queues.UNFINISHED_AT, wiring.group_past.local_list)
    on.broker(queues.END_GROUP, wiring.group_admin.end)
    on.broker(queues.PAUSE_GROUP, wiring.group_admin.on_pause)

    on.leader(streams.TURN, wiring.shared_offsets.local_turn)
    on.leader(streams.FRONTS, wiring.shared_offsets.local_fronts)
    on.leader(streams.CLAIM, wiring.stream_partitions.local_claim)
    on.leader(streams.COMMIT_OFFSETS, wiring.stream_partitions.local_commit)
    on.leader(streams.SEEK, wiring.stream_partitions.local_seek)
    on.leader(streams.OFFSETS, wiring.stream_partitions.local_positions)
    on.watched(streams.COORDINATE, wiring.group_coordinators.answer)

    on.leader(schedules.CHANGE_SCHEDULE, wiring.schedules.local_change)
    on.leader(schedules.LAST_TICKS, wiring.schedules.local_last_ticks, patience_s=0.0)

    on.broker(brokers.STANDING, lambda request: answer_log_end(wiring.topics, request))
    on.broker(brokers.STANDINGS, wiring.membership.peer_queries.answer_log_ends)
    on.broker(brokers.DIGEST, wiring.digests.answer)
    on.broker(brokers.SUSPECT, wiring.membership.peer_queries.on_report)
    on.broker(brokers.REACH, wiring.membership.peer_queries.answer_reach)
    on.broker(brokers.TIME, wiring.clock_agreement.tell)
    on.broker(brokers.RATES, wiring.rates.answer)
    return on.calls
