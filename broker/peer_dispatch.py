"""What other brokers may ask of this one: every call's name, and the room that answers it.

Each call's question and answer are msgspec Structs of cluster/rpc, encoded as
MessagePack. An answer is given here or refused: nothing is forwarded a second time.
"""

from __future__ import annotations

from collections.abc import Callable

from portalmq.broker.cluster.unclean_election import serve_log_end
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.wiring import Wiring

PeerCall = Callable[[bytes, Peer | None], bytes]


def peer_calls(wiring: Wiring) -> dict[str, PeerCall]:
    """Name -> (body, the asking broker's connection) -> answer."""
    return {
        "fetch": wiring.replication.serve,
        "produce": lambda body, peer: wiring.produce_handler.serve(body),
        "first": lambda body, peer: wiring.repeat_finder.serve(body),
        "fence": lambda body, peer: wiring.producer_fencing.serve(body),
        "browse": wiring.browser.serve_browse,
        "purge": lambda body, peer: wiring.browser.serve_purge(body),
        "scheduled": lambda body, peer: wiring.scheduled_messages.serve_list(body),
        "cancel": lambda body, peer: wiring.scheduled_messages.serve_cancel(body),
        "partitions": lambda body, peer: wiring.overview.serve_partitions(body),
        "known": lambda body, peer: wiring.groups.serve_known(body),
        "start": lambda body, peer: wiring.groups.serve_start(body),
        "receive": wiring.receive_handler.serve_receive,
        "replay": lambda body, peer: wiring.receive_handler.serve_replay(body),
        "interest": wiring.receive_handler.serve_interest,
        "settle": lambda body, peer: wiring.settlement.serve(body),
        "finish": lambda body, peer: wiring.offset_acks.serve(body),
        "turn": lambda body, peer: wiring.shared_offsets.serve(body),
        "fronts": lambda body, peer: wiring.shared_offsets.serve_fronts(body),
        "unfinished": lambda body, peer: wiring.unfinished.serve(body),
        "sizes": lambda body, peer: wiring.queue_sizes.serve(body),
        "look": lambda body, peer: wiring.queue_sizes.serve_look(body),
        "commit": lambda body, peer: wiring.group_commits.serve(body),
        "dead_letters": lambda body, peer: wiring.dead_letters.serve_list(body),
        "match_dead": lambda body, peer: wiring.dead_letters.serve_match(body),
        "redrive": lambda body, peer: wiring.dead_letters.serve_redrive(body),
        "drop_dead": lambda body, peer: wiring.dead_letters.serve_drop(body),
        "groups": lambda body, peer: wiring.group_admin.serve_groups(body),
        "end_group": lambda body, peer: wiring.group_admin.serve_end(body),
        "coordinate": wiring.group_coordinators.serve,
        "claim": lambda body, peer: wiring.stream_partitions.serve_claim(body),
        "commit_offsets": lambda body, peer: wiring.stream_partitions.serve_commit(body),
        "seek": lambda body, peer: wiring.stream_partitions.serve_seek(body),
        "offsets": lambda body, peer: wiring.stream_partitions.serve_positions(body),
        "standing": lambda body, peer: serve_log_end(wiring.topics, body),
        "time": lambda body, peer: wiring.timekeeping.serve(body),
        **wiring.membership.calls,
    }
