"""The cluster and its brokers in the control plane: ids and secrets created once, broker ids, registrations, and the
controller.

    broker start   claim_broker_id, next_incarnation, register_broker
    controller     elect_controller, commit_as_controller, remove_controller
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from portalmq.control_plane import state
from portalmq.control_plane.plane import (
    COMMIT_OPS_MAX,
    Check,
    Conflict,
    Create,
    Delete,
    Op,
    OutcomeUnknown,
    PlaneError,
    Set,
)
from portalmq.control_plane.state import BrokerState, ControllerState, PartitionState, StoreState
from portalmq.control_plane.tree import Tree, Versioned

# Before the id of a cluster whose adoption has begun and is not done.
ADOPTING = "adopting "
RECEIPT_KEY_BYTES = 32
CLUSTER_SECRET_BYTES = 32
_SECRET_BYTES = {state.RECEIPT_KEY: RECEIPT_KEY_BYTES, state.CLUSTER_SECRET: CLUSTER_SECRET_BYTES}


class BrokerIdTaken(PlaneError):
    """The broker id belongs to a live broker with another data directory or a later start. `url` is its address."""

    def __init__(self, sentence: str, *, url: str = "") -> None:
        super().__init__(sentence)
        self.url = url


class ControllerFenced(PlaneError):
    """Another controller has been elected since. Nothing was applied."""


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """The new state of a partition's node, for a commit at `version`."""

    topic_id: str
    number: int
    state: PartitionState
    version: int

    @property
    def path(self) -> str:
        return state.partition_path(self.topic_id, self.number)


class ClusterNodes(Tree):
    """Nodes that concern the whole cluster, and no topic."""

    # --- the cluster and its brokers ---

    def cluster_id(self, wanted: str | None = None) -> str:
        """Return the cluster's id. The first call creates it: `wanted`, or a fresh one."""
        return self._made_once(state.CLUSTER_ID, lambda: (wanted or self._unique()).encode()).decode()

    def begin_adoption(self, cluster_id: str) -> None:
        """Let no broker start, of this cluster or another, until the id is replaced."""
        self.replace_cluster_id(f"{ADOPTING}{cluster_id}")

    def replace_cluster_id(self, wanted: str) -> None:
        """Set the cluster's id, whatever it was."""

        def replace() -> None:
            held = self.plane.get(state.CLUSTER_ID)
            if held is None:
                self.plane.commit(Create(state.CLUSTER_ID, wanted.encode()))
            elif held.data.decode() != wanted:
                self.plane.commit(Set(state.CLUSTER_ID, wanted.encode(), held.version))

        self._retry_conflicts(state.CLUSTER_ID, replace)

    def find_cluster_id(self) -> str | None:
        """Return the cluster's id, or None."""
        held = self.plane.get(state.CLUSTER_ID)
        return held.data.decode() if held else None

    def receipt_key(self) -> bytes:
        """Return the key that signs receipts. The first call creates it."""
        return self._made_once(state.RECEIPT_KEY, lambda: self._random_bytes(RECEIPT_KEY_BYTES))

    def cluster_secret(self) -> str:
        """Return the secret that brokers show to each other, in hexadecimal digits. The first call creates it."""
        return self._made_once(state.CLUSTER_SECRET, lambda: self._random_bytes(CLUSTER_SECRET_BYTES)).hex()

    def note_exposed(self, versions: Mapping[str, int]) -> None:
        """Record that other users could read these nodes, at these versions: secrets among them must be replaced."""
        checks = [Check(path, versions[path]) for path in _SECRET_BYTES if path in versions]
        if checks:
            # A Conflict means that they are recorded already, or that they were replaced in the meantime.
            with contextlib.suppress(Conflict):
                self.plane.commit(*checks, Create(state.EXPOSED_SECRETS))

    def renew_exposed(self) -> bool:
        """Replace the secrets that other users could read. Return False while brokers use them."""

        def renew() -> bool:
            noted = self.plane.get(state.EXPOSED_SECRETS)
            if noted is None:
                return True
            if self.plane.children(state.BROKERS):
                return False
            held = [node for node in self.plane.get_many(list(_SECRET_BYTES)) if node is not None]
            fresh = [Set(node.path, self._random_bytes(_SECRET_BYTES[node.path]), node.version) for node in held]
            self.plane.commit(Delete(state.EXPOSED_SECRETS, noted.version), *fresh)
            return True

        return self._retry_conflicts(state.EXPOSED_SECRETS, renew)

    def claim_broker_id(self, store_uuid: str, wanted: int | None = None) -> int:
        """Return the id of the broker with this data directory: the one it has, or the smallest free one.

        A `wanted` id of another directory passes to this one when no broker with that id is registered: a disk that
        was emptied keeps its id. Raises BrokerIdTaken when one is.
        """

        def claim() -> int:
            claims = self.claims()
            if wanted is None:
                return self._claim_any(store_uuid, claims)
            path, held = state.store_path(wanted), claims.get(wanted)
            if held is None:
                self.plane.commit(Create(path, state.encode(StoreState(store_uuid))))
            elif held.value.store_uuid != store_uuid:
                self._check_unregistered(wanted)
                # The pair asserts "not registered" in the commit itself, so no broker registers in between.
                entry = state.broker_path(wanted)
                passed_on = msgspec.structs.replace(held.value, store_uuid=store_uuid)
                self.plane.commit(Create(entry), Delete(entry, 0), Set(path, state.encode(passed_on), held.version))
            return wanted

        return self._retry_conflicts("a broker id", claim)

    def _claim_any(self, store_uuid: str, claims: Mapping[int, Versioned[StoreState]]) -> int:
        own = next((broker_id for broker_id, held in claims.items() if held.value.store_uuid == store_uuid), None)
        if own is not None:
            return own
        free = next(number for number in range(1, len(claims) + 2) if number not in claims)
        self.plane.commit(Create(state.store_path(free), state.encode(StoreState(store_uuid))))
        return free

    def claims(self) -> dict[int, Versioned[StoreState]]:
        """Return the data directory of each broker id, running or not."""
        return {
            int(node.path.rpartition("/")[2]): Versioned(state.decode(node.data, StoreState), node.version)
            for node in self.plane.get_children(state.STORES)
            if node.path.rpartition("/")[2].isdigit()
        }

    def next_incarnation(self, broker_id: int, store_uuid: str, before: int = 0) -> int:
        """Return a number above `before` and above every earlier incarnation of this broker id, on any disk.

        Raises BrokerIdTaken when another data directory has claimed the id since.
        """
        path = state.store_path(broker_id)

        def start() -> int:
            held = self._read(path, StoreState)
            if held is not None and held.value.store_uuid != store_uuid:
                raise BrokerIdTaken(f"broker id {broker_id} was claimed by another data directory")
            claim = StoreState(store_uuid, max(before, held.value.incarnation if held else 0) + 1)
            self._write(path, claim, held)
            return claim.incarnation

        return self._retry_conflicts(f"broker {broker_id}", start)

    def _check_unregistered(self, broker_id: int) -> None:
        self.plane.sync()
        held = self._read(state.broker_path(broker_id), BrokerState)
        if held is not None:
            raise BrokerIdTaken(
                f"broker id {broker_id} is held by {held.value.url}, which has another data directory",
                url=held.value.url,
            )

    def register_broker(self, broker_id: int, broker: BrokerState) -> None:
        """Register the broker for the life of its session, or update its entry.

        An entry of an earlier session of the same data directory is replaced even when equal: it would go when that
        session ends, and with it the broker. Raises BrokerIdTaken for an entry of another data directory, and for one
        of a later start: then this process is the outdated one.
        """
        path = state.broker_path(broker_id)

        def register() -> None:
            create = Create(path, state.encode(broker), ephemeral=True)
            self.plane.sync()
            held = self.plane.get(path)
            if held is None:
                self.plane.commit(create)
                return
            other = state.decode(held.data, BrokerState)
            if other.store_uuid != broker.store_uuid or other.incarnation > broker.incarnation:
                whose = "another data directory" if other.store_uuid != broker.store_uuid else "started later"
                raise BrokerIdTaken(f"broker id {broker_id} is held by {other.url}, which has {whose}", url=other.url)
            if held.owner != self.plane.session_id:
                self.plane.commit(Delete(path, held.version), create)
            elif other != broker:
                self.plane.commit(Set(path, create.data, held.version))

        self._retry_conflicts(f"broker {broker_id}", register)

    def unregister_broker(self, broker_id: int) -> None:
        """Remove this session's own entry, so that no other broker has to wait for the session's end."""
        held = self.plane.get(state.broker_path(broker_id))
        if held is not None and held.owner == self.plane.session_id:
            self.plane.commit(Delete(held.path, held.version))

    def brokers(self) -> dict[int, BrokerState]:
        """Return the brokers that have a session, by id."""
        found = self._all(state.BROKERS, BrokerState)
        return {int(broker_id): broker for broker_id, broker in sorted(found.items(), key=lambda item: int(item[0]))}

    # --- the controller ---

    def controller(self) -> Versioned[ControllerState] | None:
        return self._read(state.CONTROLLER, ControllerState)

    def elect_controller(self, broker_id: int, incarnation: int) -> Versioned[ControllerState] | None:
        """Become the controller, if there is none; None when another broker is.

        The epoch is the version of /controller_epoch, which the same commit raises. Commits of an older controller
        check its own epoch, and conflict. A controller node that an earlier session of this broker left is replaced.
        """

        def elect() -> Versioned[ControllerState] | None:
            self.plane.sync()
            counter = self.plane.get(state.CONTROLLER_EPOCH)
            if counter is None:
                self.plane.commit(Create(state.CONTROLLER_EPOCH))
                counter = self.plane.get(state.CONTROLLER_EPOCH)
                assert counter is not None
            current = self.plane.get(state.CONTROLLER)
            before: list[Op] = []
            if current is not None:
                held = Versioned(state.decode(current.data, ControllerState), current.version)
                if held.value.broker_id != broker_id:
                    return None
                if (held.value.incarnation, current.owner) == (incarnation, self.plane.session_id):
                    return held  # an attempt with an unknown outcome was applied
                before = [Delete(state.CONTROLLER, current.version)]
            elected = ControllerState(broker_id, incarnation, counter.version + 1)
            self.plane.commit(
                *before,
                Create(state.CONTROLLER, state.encode(elected), ephemeral=True),
                Set(state.CONTROLLER_EPOCH, b"", counter.version),
            )
            return Versioned(elected, 0)

        return self._retry_conflicts("the controller", elect)

    def remove_controller(self, held: Versioned[ControllerState]) -> bool:
        """End the term of the controller `held`, and no later one's. Return False when it had ended already.

        Any broker may call it: the next controller's epoch fences the old one.
        """
        try:
            self.plane.commit(Check(state.CONTROLLER_EPOCH, held.value.epoch), Delete(state.CONTROLLER, held.version))
        except Conflict:
            return False
        return True

    def commit_as_controller(
        self, controller: Versioned[ControllerState], changes: Sequence[PartitionChange]
    ) -> list[PartitionChange]:
        """Compare-and-set the partitions while `controller` is elected. Return the changes that were applied.

        A change whose partition has changed is left out and does not delay the others. One with an unknown outcome
        counts as applied when a synced read shows it. Raises ControllerFenced, and PlaneUnavailable when the plane does
        not answer: earlier commits of the call remain.
        """
        return self.commit_fitting(changes, Check(state.CONTROLLER_EPOCH, controller.value.epoch))

    def commit_fitting(self, changes: Sequence[PartitionChange], *guard: Check) -> list[PartitionChange]:
        """Do the same for a broker that changes its own partitions, or for a controller with a `guard`."""
        applied: list[PartitionChange] = []
        room, waiting = COMMIT_OPS_MAX - len(guard), list(changes)
        while waiting:
            applied += self._commit_fitting(guard, waiting[:room])
            waiting = waiting[room:]
        return applied

    def _commit_fitting(self, guard: tuple[Check, ...], part: list[PartitionChange]) -> list[PartitionChange]:
        while part:
            sets = [Set(change.path, state.encode(change.state), change.version) for change in part]
            try:
                self.plane.commit(*guard, *sets)
            except OutcomeUnknown:
                return self._applied(part)
            except Conflict as conflict:
                if any(conflict.path == check.path for check in guard):
                    raise ControllerFenced(f"another controller was elected: {conflict}") from None
                # One read finds all that conflict, where the commit names only the first.
                found = self.plane.get_many([change.path for change in part])
                part = [
                    change
                    for change, node in zip(part, found, strict=True)
                    if node is not None and node.version == change.version and change.path != conflict.path
                ]
            else:
                return part
        return []

    def _applied(self, part: list[PartitionChange]) -> list[PartitionChange]:
        self.plane.sync()
        found = self.plane.get_many([change.path for change in part])
        return [
            change
            for change, node in zip(part, found, strict=True)
            if node is not None and (node.version, node.data) == (change.version + 1, state.encode(change.state))
        ]
