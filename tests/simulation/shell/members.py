"""Members of a stream group, lock holders and readers of a run."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.shell.checker import TOPIC
from simulation.shell.history import Granted
from simulation.shell.network import NeverGone, Unknown

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.errors import IllegalGeneration, PortalMQError

if TYPE_CHECKING:
    from simulation.shell.clients import Clients

STREAM_GROUP = "s"
LOCK = "lock"
SESSION_MS = contract.SESSION_TIMEOUT_MS_MIN
PAGE = 20


class Members:
    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._world = clients.world
        self._loop = clients.loop

    def start(self) -> None:
        options, seed = self._world.options, self._world.seed
        for number in range(options.members):
            self._clients.spawn(self._read, f"m{number}", Random(f"member {seed} {number}"))
        for number in range(options.holders):
            self._clients.spawn(self._hold, f"h{number}", Random(f"holder {seed} {number}"))
        if options.browses:
            self._clients.spawn(self._browse, Random(f"browser {seed}"))

    def _call(self, random: Random, work: Any) -> Any:
        """Return the answer; None when there is none, or a refusal."""
        try:
            return self._clients.call(random, work)
        except IllegalGeneration:
            raise
        except (Unknown, PortalMQError):
            return None

    # --- a stream group ----------------------------------------------------------------------------------------------

    def _read(self, member: str, random: Random) -> None:
        """Join, commit what is assigned, leave or fall silent, and join again, under the same name or a new one."""
        clients, name, lives = self._clients, member, 0
        while not clients.stopping:
            lives += random.random() < 0.5
            name = f"{member}-{lives}"
            request = contract.JoinRequest([TOPIC], name, SESSION_MS)
            began_ns = self._loop.now_ns
            join = None
            with suppress(IllegalGeneration):  # a copy of an earlier call to leave came meanwhile
                join = self._call(
                    random,
                    lambda broker, request=request: broker.group_coordinators.join(STREAM_GROUP, request, NeverGone()),
                )
            if join is None:
                self._loop.wait(0.1 + random.random() * 0.3)
                continue
            self._world.reached["joined"] += 1
            try:
                self._own(name, random, join, began_ns)
            except IllegalGeneration:
                self._world.reached["fenced"] += 1
            if random.random() < 0.3:
                self._call(random, lambda broker, name=name: broker.group_coordinators.leave(STREAM_GROUP, name))
            self._loop.wait(random.random() * 0.5)

    def _own(self, member: str, random: Random, answer: Any, began_ns: int) -> None:
        history, loop = self._world.checker.history, self._loop
        known: dict[tuple[str, int, int], int] = {}
        turns = random.choice((3, 20))
        while not self._clients.stopping and turns:
            turns -= 1
            assigned = {(each.topic, each.partition): each.offset for each in answer.assignment}
            self._world.note("client", "{} has generation {}: {}", member, answer.generation, assigned)
            history.assigned(member, answer.generation, assigned, began_ns, loop.now_ns)
            offsets = []
            for each in answer.assignment:
                where = each.topic, each.partition
                at = known.setdefault((*where, each.since), each.offset)
                upto = random.randint(at, max(at, history.place(where).watermark))
                known[*where, each.since] = upto
                history.commits(where, upto)
                offsets.append(contract.PartitionOffset(*where, upto))
            if offsets:
                self._commit(member, random, answer.generation, offsets)
            loop.wait(random.random() * random.choice((0.2, 0.2, 3.0)))
            began_ns, generation = loop.now_ns, answer.generation
            beat = self._call(
                random, lambda broker, g=generation: broker.group_coordinators.heartbeat(STREAM_GROUP, member, g)
            )
            answer = beat if beat is not None else answer

    def _commit(self, member: str, random: Random, generation: int, offsets: list[contract.PartitionOffset]) -> None:
        history, began_ns = self._world.checker.history, self._loop.now_ns
        request = contract.CommitOffsetsRequest(member, generation, offsets)
        done = self._call(random, lambda broker: broker.offsets.commit(STREAM_GROUP, request))
        for each in done.results if done is not None else ():
            if each.status == "ok":
                self._world.reached["offset committed"] += 1
                self._world.note("client", "{} has committed {}/{}", member, each.partition, each.offset)
                where = each.topic, each.partition
                history.committed(member, generation, where, each.offset, began_ns, self._loop.now_ns)

    # --- a lock ------------------------------------------------------------------------------------------------------

    def _hold(self, owner: str, random: Random) -> None:
        history, loop, clients = self._world.checker.history, self._loop, self._clients
        while not clients.stopping:
            ttl_ms = random.choice((1_000, 3_000))
            request = wire.LockRequest(owner, ttl_ms, random.choice((0, 1_000)))
            began_ns = loop.now_ns
            grant = self._call(random, lambda broker, request=request: broker.locks.acquire(LOCK, request, NeverGone()))
            if grant is None:
                loop.wait(0.1 + random.random() * 0.5)
                continue
            if loop.now_ns - began_ns >= ttl_ms * 1_000_000:
                continue  # the answer came after its time: `Lock.acquire` asks again
            token = grant.fencing_token
            self._world.reached["locked"] += 1
            self._world.note("client", "{} holds the lock with token {}", owner, token)
            held_ns = grant.expires_in_ms * 1_000_000
            history.locked(LOCK, Granted(owner, token, began_ns, loop.now_ns, held_ns))
            for _ in range(random.choice((0, 1, 3))):
                loop.wait(random.random() * ttl_ms / 2_000)
                began_ns = loop.now_ns
                renewal = wire.LockRenewal(owner, token, ttl_ms)
                if self._call(random, lambda broker, it=renewal: broker.locks.renew(LOCK, it)) is None:
                    break
                history.renewed(LOCK, token, began_ns)
            loop.wait(random.random() * ttl_ms / 1_000)
            if random.random() < 0.7:
                history.unlocks(LOCK, token)
                release = wire.LockRelease(owner, token)
                self._call(random, lambda broker, it=release: broker.locks.release(LOCK, it))

    # --- readers -----------------------------------------------------------------------------------------------------

    def _browse(self, random: Random) -> None:
        world, history = self._world, self._world.checker.history
        lease_ns = int((world.options.session_s + 1.0) * 1e9)
        while not self._clients.stopping:
            self._loop.wait(0.2 + random.random() * 0.3)
            number = random.randrange(world.options.partitions)
            where = TOPIC, number
            known = history.place(where).values
            if not known:
                continue
            offset = random.choice(sorted(known)[-200:])
            began_ns = self._loop.now_ns
            page = self._call(random, partial(_page, number=number, offset=offset))
            if page is not None:
                world.reached["browsed"] += 1
                found = [(each.offset, each.record.value) for each in page.messages]
                history.browsed(where, offset, found, began_ns, lease_ns)


def _page(broker: Any, number: int, offset: int) -> Any:
    return broker.browser.browse(TOPIC, number, offset=offset, limit=PAGE)
