"""What other brokers may ask of this one: every call's name, and the room that answers it.

Each call's question and answer are msgspec Structs beside the room that uses them (or in cluster/rpc.py), encoded as
MessagePack. An answer is given here or refused: nothing is forwarded a second time.
"""

from __future__ import annotations

from collections.abc import Callable

from portalmq.broker.cluster.unclean_election import serve_standing
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.wiring import Rooms

PeerCall = Callable[[bytes, Peer | None], bytes]


def peer_calls(rooms: Rooms) -> dict[str, PeerCall]:
    """Name -> (body, the asking broker's connection) -> answer."""
    return {
        "fetch": rooms.replication.serve,
        "produce": lambda body, peer: rooms.producing.serve(body),
        "first": lambda body, peer: rooms.repeats.serve(body),
        "fence": lambda body, peer: rooms.fences.serve(body),
        "browse": rooms.browsing.serve_browse,
        "purge": lambda body, peer: rooms.browsing.serve_purge(body),
        "scheduled": lambda body, peer: rooms.schedule.serve_list(body),
        "cancel": lambda body, peer: rooms.schedule.serve_cancel(body),
        "partitions": lambda body, peer: rooms.overview.serve_partitions(body),
        "known": lambda body, peer: rooms.groups.serve_known(body),
        "start": lambda body, peer: rooms.groups.serve_start(body),
        "receive": rooms.receiving.serve_receive,
        "replay": lambda body, peer: rooms.receiving.serve_replay(body),
        "interest": rooms.receiving.serve_interest,
        "settle": lambda body, peer: rooms.settling.serve(body),
        "finish": lambda body, peer: rooms.finishing.serve(body),
        "turn": lambda body, peer: rooms.turns.serve(body),
        "fronts": lambda body, peer: rooms.turns.serve_fronts(body),
        "unfinished": lambda body, peer: rooms.unfinished.serve(body),
        "sizes": lambda body, peer: rooms.sizing.serve(body),
        "look": lambda body, peer: rooms.sizing.serve_look(body),
        "commit": lambda body, peer: rooms.committing.serve(body),
        "dead_letters": lambda body, peer: rooms.dead_letters.serve_list(body),
        "match_dead": lambda body, peer: rooms.dead_letters.serve_match(body),
        "redrive": lambda body, peer: rooms.dead_letters.serve_redrive(body),
        "drop_dead": lambda body, peer: rooms.dead_letters.serve_drop(body),
        "groups": lambda body, peer: rooms.census.serve_groups(body),
        "end_group": lambda body, peer: rooms.census.serve_end(body),
        "coordinate": rooms.streams.serve,
        "claim": lambda body, peer: rooms.streaming.serve_claim(body),
        "commit_offsets": lambda body, peer: rooms.streaming.serve_commit(body),
        "seek": lambda body, peer: rooms.streaming.serve_seek(body),
        "offsets": lambda body, peer: rooms.streaming.serve_standings(body),
        "standing": lambda body, peer: serve_standing(rooms.topics, body),
        "time": lambda body, peer: rooms.timekeeping.serve(body),
        **rooms.membership.calls,
    }
