"""The answers to other brokers: for each call of cluster/rpc, the method that answers it.

A call is answered here or refused: nothing is forwarded a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from portalmq.broker.cluster.routing import LeaderRouter, LocalWork
from portalmq.broker.cluster.rpc import BrokerCall, PartitionCall, PartitionRequest
from portalmq.broker.cluster.rpc import messages as rpc
from portalmq.broker.cluster.rpc import queues as rpc_queues
from portalmq.broker.cluster.unclean_election import serve_log_end
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

    on.leader(rpc.PRODUCE, wiring.produce_handler.local_produce)
    on.leader(rpc.FIRST, wiring.repeat_finder.local_find)
    on.leader_watched(rpc.BROWSE, wiring.browser.local_browse)
    on.leader(rpc.PURGE, wiring.browser.local_purge)
    on.leader(rpc.SCHEDULED, wiring.scheduled_messages.local_list)
    on.leader(rpc.CANCEL, wiring.scheduled_messages.local_cancel)

    on.leader(rpc_queues.KNOWN, wiring.groups.local_known)
    on.leader(rpc_queues.START, wiring.groups.local_start)
    on.leader(rpc_queues.SETTLE, wiring.settlement.local_settle)
    on.leader(rpc_queues.FINISH, wiring.offset_acks.local_finish)
    on.leader(rpc_queues.UNFINISHED, wiring.unfinished.local_list)
    on.leader(rpc_queues.SIZES, wiring.queue_sizes.local_sizes)
    on.leader(rpc_queues.LOOK, wiring.queue_sizes.local_look)
    on.leader(rpc_queues.COMMIT, wiring.group_commits.local_commit)
    on.leader(rpc_queues.DEAD_LETTERS, wiring.dead_letters.local_list)
    on.leader(rpc_queues.MATCH_DEAD, wiring.dead_letters.local_match)
    on.leader(rpc_queues.REDRIVE, wiring.dead_letters.local_redrive)
    on.leader(rpc_queues.DROP_DEAD, wiring.dead_letters.local_drop)
    return on.calls | {
        "fence": lambda body, peer: wiring.producer_fencing.serve(body),
        "partitions": lambda body, peer: wiring.overview.serve_partitions(body),
        "receive": wiring.receive_handler.serve_receive,
        "replay": lambda body, peer: wiring.receive_handler.serve_replay(body),
        "interest": wiring.receive_handler.serve_interest,
        "turn": lambda body, peer: wiring.shared_offsets.serve(body),
        "fronts": lambda body, peer: wiring.shared_offsets.serve_fronts(body),
        "groups": lambda body, peer: wiring.group_admin.serve_groups(body),
        "end_group": lambda body, peer: wiring.group_admin.serve_end(body),
        "coordinate": wiring.group_coordinators.serve,
        "claim": lambda body, peer: wiring.stream_partitions.serve_claim(body),
        "commit_offsets": lambda body, peer: wiring.stream_partitions.serve_commit(body),
        "seek": lambda body, peer: wiring.stream_partitions.serve_seek(body),
        "offsets": lambda body, peer: wiring.stream_partitions.serve_positions(body),
        "standing": lambda body, peer: serve_log_end(wiring.topics, body),
        "time": lambda body, peer: wiring.clock_agreement.serve(body),
        **wiring.membership.peer_queries.calls,
    }
