"""The cluster and its brokers in the control plane: ids and secrets made once, who has which id, who is there, and who
is the controller.

    a start     claim_broker_id, next_incarnation, register_broker
    an office   elect_controller, commit_as_controller, depose
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

RECEIPT_KEY_BYTES = 32
CLUSTER_SECRET_BYTES = 32
_SECRET_BYTES = {state.RECEIPT_KEY: RECEIPT_KEY_BYTES, state.CLUSTER_SECRET: CLUSTER_SECRET_BYTES}


class BrokerIdTaken(PlaneError):
    """A live broker with another data directory has this id, or a later start of this one. `url` is where."""

    def __init__(self, sentence: str, *, url: str = "") -> None:
        super().__init__(sentence)
        self.url = url


class ControllerFenced(PlaneError):
    """Another controller was elected since: what this one wants does not count any more. Nothing was applied."""


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """What a partition's node is to hold, if it still has `version`."""

    topic_id: str
    number: int
    state: PartitionState
    version: int

    @property
    def path(self) -> str:
        return state.partition_path(self.topic_id, self.number)


class ClusterNodes(Tree):
    """What concerns the whole cluster, and no topic."""

    # --- the cluster and its brokers ---

    def cluster_id(self, wanted: str | None = None) -> str:
        """The cluster's id, made by whoever asks first: `wanted`, or a fresh one."""
        return self._made_once(state.CLUSTER_ID, lambda: (wanted or self._unique()).encode()).decode()

    def replace_cluster_id(self, wanted: str) -> None:
        """Make it this cluster, whatever it was."""

        def replace() -> None:
            held = self.plane.get(state.CLUSTER_ID)
            if held is None:
                self.plane.commit(Create(state.CLUSTER_ID, wanted.encode()))
            elif held.data.decode() != wanted:
                self.plane.commit(Set(state.CLUSTER_ID, wanted.encode(), held.version))

        self._until_fitting(state.CLUSTER_ID, replace)

    def find_cluster_id(self) -> str | None:
        """The cluster's id, if it has one."""
        held = self.plane.get(state.CLUSTER_ID)
        return held.data.decode() if held else None

    def receipt_key(self) -> bytes:
        """The key that signs receipts, made by whoever asks first."""
        return self._made_once(state.RECEIPT_KEY, lambda: self._random_bytes(RECEIPT_KEY_BYTES))

    def cluster_secret(self) -> str:
        """What brokers show to each other, in hexadecimal digits; made by whoever asks first."""
        return self._made_once(state.CLUSTER_SECRET, lambda: self._random_bytes(CLUSTER_SECRET_BYTES)).hex()

    def note_exposed(self, versions: Mapping[str, int]) -> None:
        """Others could read these nodes, at these versions: if they are secrets, they have to be made anew."""
        checks = [Check(path, versions[path]) for path in _SECRET_BYTES if path in versions]
        if checks:
            # It exists when they are noted already, and they have other versions when they were made anew meanwhile.
            with contextlib.suppress(Conflict):
                self.plane.commit(*checks, Create(state.EXPOSED_SECRETS))

    def renew_exposed(self) -> bool:
        """Make the secrets anew that others could read; False when they have to wait, because brokers use them."""

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

        return self._until_fitting(state.EXPOSED_SECRETS, renew)

    def claim_broker_id(self, store_uuid: str, wanted: int | None = None) -> int:
        """The id of the broker whose data directory is `store_uuid`: the one it has, or the smallest that is free.

        A `wanted` one that another directory has passes over to this one when no broker of that id is registered: a
        disk that was emptied comes back under its old id. Raises BrokerIdTaken when one is.
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
                # The pair says "not there" in the commit itself: nobody registers in between.
                nobody = state.broker_path(wanted)
                passed_on = msgspec.structs.replace(held.value, store_uuid=store_uuid)
                self.plane.commit(Create(nobody), Delete(nobody, 0), Set(path, state.encode(passed_on), held.version))
            return wanted

        return self._until_fitting("a broker id", claim)

    def _claim_any(self, store_uuid: str, claims: Mapping[int, Versioned[StoreState]]) -> int:
        own = next((broker_id for broker_id, held in claims.items() if held.value.store_uuid == store_uuid), None)
        if own is not None:
            return own
        free = next(number for number in range(1, len(claims) + 2) if number not in claims)
        self.plane.commit(Create(state.store_path(free), state.encode(StoreState(store_uuid))))
        return free

    def claims(self) -> dict[int, Versioned[StoreState]]:
        """Which data directory has which broker id, whether it runs or not."""
        return {
            int(node.path.rpartition("/")[2]): Versioned(state.decode(node.data, StoreState), node.version)
            for node in self.plane.get_children(state.STORES)
            if node.path.rpartition("/")[2].isdigit()
        }

    def next_incarnation(self, broker_id: int, store_uuid: str, before: int = 0) -> int:
        """A number above `before` and above that of every earlier start of a broker with this id, on whatever disk.

        Raises BrokerIdTaken when the id was claimed by another data directory meanwhile.
        """
        path = state.store_path(broker_id)

        def start() -> int:
            held = self._read(path, StoreState)
            if held is None:
                claim = StoreState(store_uuid, before + 1)
                self.plane.commit(Create(path, state.encode(claim)))
                return claim.incarnation
            if held.value.store_uuid != store_uuid:
                raise BrokerIdTaken(f"broker id {broker_id} was claimed by another data directory")
            claim = StoreState(store_uuid, max(before, held.value.incarnation) + 1)
            self.plane.commit(Set(path, state.encode(claim), held.version))
            return claim.incarnation

        return self._until_fitting(f"broker {broker_id}", start)

    def _check_unregistered(self, broker_id: int) -> None:
        self.plane.sync()
        held = self._read(state.broker_path(broker_id), BrokerState)
        if held is not None:
            raise BrokerIdTaken(
                f"broker id {broker_id} is held by {held.value.url}, which has another data directory",
                url=held.value.url,
            )

    def register_broker(self, broker_id: int, broker: BrokerState) -> None:
        """Make the broker known for as long as its session lasts, or tell what changed with it.

        An entry left by an earlier session of the same data directory is replaced, one with equal content too: it
        would go when that session ends, and with it the broker. Raises BrokerIdTaken for another data directory's,
        and for one of a later start: then this process is the ghost.
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

        self._until_fitting(f"broker {broker_id}", register)

    def unregister_broker(self, broker_id: int) -> None:
        """Take this session's own entry away, so that nobody has to wait for the session's end."""
        held = self.plane.get(state.broker_path(broker_id))
        if held is not None and held.owner == self.plane.session_id:
            self.plane.commit(Delete(held.path, held.version))

    def brokers(self) -> dict[int, BrokerState]:
        """The brokers that have a session, by id."""
        found = self._all(state.BROKERS, BrokerState)
        return {int(broker_id): broker for broker_id, broker in sorted(found.items(), key=lambda item: int(item[0]))}

    # --- the controller ---

    def controller(self) -> Versioned[ControllerState] | None:
        return self._read(state.CONTROLLER, ControllerState)

    def elect_controller(self, broker_id: int, incarnation: int) -> Versioned[ControllerState] | None:
        """Take the office, if nobody has it; None when somebody has.

        The epoch is the version of /controller_epoch, which the same commit raises: whatever an older controller still
        sends checks for its own, and does not fit any more. An office that an earlier session of this broker left is
        taken over.
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
                    return held  # an attempt whose outcome was unknown went through
                before = [Delete(state.CONTROLLER, current.version)]
            elected = ControllerState(broker_id, incarnation, counter.version + 1)
            self.plane.commit(
                *before,
                Create(state.CONTROLLER, state.encode(elected), ephemeral=True),
                Set(state.CONTROLLER_EPOCH, b"", counter.version),
            )
            return Versioned(elected, 0)

        return self._until_fitting("the controller", elect)

    def depose(self, held: Versioned[ControllerState]) -> bool:
        """End the term of the controller `held`, and no later one's; False when it had ended already.

        Safe whoever asks for it: the next one's epoch fences it.
        """
        try:
            self.plane.commit(Check(state.CONTROLLER_EPOCH, held.value.epoch), Delete(state.CONTROLLER, held.version))
        except Conflict:
            return False
        return True

    def commit_as_controller(
        self, controller: Versioned[ControllerState], changes: Sequence[PartitionChange]
    ) -> list[PartitionChange]:
        """Compare-and-set the partitions, as long as `controller` is in office; answers the changes that were applied.

        One that does not fit (its partition changed meanwhile) is left out and does not hold up the others. One whose
        outcome is unknown counts as applied when a synced read shows so. Raises Deposed, and PlaneUnavailable when
        the plane does not answer: what was committed before that stands.
        """
        return self.commit_fitting(changes, Check(state.CONTROLLER_EPOCH, controller.value.epoch))

    def commit_fitting(self, changes: Sequence[PartitionChange], *guard: Check) -> list[PartitionChange]:
        """The same for a broker that changes what is its own to change, unless there is a `guard`."""
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
                # One read finds all that do not fit, where the commit names only the first.
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
