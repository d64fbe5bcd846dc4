"""The controller: the one broker that decides, elected by compare-and-set, and its work.

Every broker runs a ControllerLoop; one at a time is the controller. control_plane/controller.py decides, given the
mirror and what the failure detector found. This module applies the decisions in commits that check /controller_epoch.
So no commit of an older controller fits once a newer one is elected. Therefore two brokers that both believe to be
controller, or one that has lost the role unnoticed, cost time and never a message.

    no controller                 elect: at once when alone, after a jitter of up to 500 ms when others compete
    the controller is gone        it refused or was silent twice in the incarnation it was elected in, and no other
                                  broker reaches it: remove it, elect at once; where no other broker can be asked, not
                                  again within half a minute
    this broker is controller     plan, commit; regularly sweep what crashed creations left, forget tombstones
    others miss a leader          that this broker reaches: ask which brokers reach it; after too few did three times in
                                  a row, ask the same of the other ISR members, of which one may lead instead
    the plane was unavailable     for one session a missing registration proves nothing
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import gevent
from gevent.event import Event

from portalmq.broker.cluster.cold_elections import ColdElections
from portalmq.broker.cluster.failure_detector import FailureDetector
from portalmq.broker.cluster.peer_queries import PeerQueries
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.yielding import give_way, in_short_turns
from portalmq.control_plane.catalog import Catalog, ControllerFenced, PartitionChange, Versioned
from portalmq.control_plane.controller import (
    View,
    cold_elections,
    cut_off,
    live_brokers,
    may_be_forgotten,
    old_strays,
    plan,
)
from portalmq.control_plane.mirror import Mirror, PartitionKey
from portalmq.control_plane.plane import OutcomeUnknown, PlaneError, PlaneState, PlaneUnavailable
from portalmq.control_plane.state import BrokerState, ControllerState

log = logging.getLogger(__name__)

JITTER_S = 0.5
MAINTENANCE_EVERY_MS = 30_000
# Changes that follow each other closely are decided on in one pass.
PASS_PAUSE_S = 0.02
PASS_PAUSE_MIN_S = 0.2
RETRY_PAUSE_S = 0.2
# How often replicas that have all restarted are asked again for their log ends, while one of them is silent.
COLD_AGAIN_MS = 300
REFUSALS_OF_A_CONTROLLER = 2
# Two brokers that cannot reach each other would remove each other for ever: others decide, or else time does.
ASK_OTHERS_AGAIN_MS = 500
REMOVE_AGAIN_MS = 30_000
# How long a suspicion is followed up, how often, and how often in a row it must be confirmed: a broker that is slow
# under load is not cut off.
SUSPICION_MS = 3_000
# A probe of this broker's own runs during this time: a port that refuses needs no vote.
SUSPICION_SETTLES_S = 0.1
ASK_REACH_AGAIN_MS = 1_000
CUT_OFF_MIN = 3
LOGGED_MAX = 20


class ControllerHost(Protocol):
    """What ControllerLoop needs of the broker that runs it."""

    broker_id: int

    @property
    def me(self) -> BrokerState: ...

    @property
    def registered(self) -> bool:
        """Whether the broker is registered in the present session."""
        ...


@dataclass(eq=False, repr=False)
class ControllerLoop:
    """Invariant: `held`, while not None, is the election that this broker won in the present session."""

    _host: ControllerHost
    _catalog: Catalog
    _mirror: Mirror
    _failure_detector: FailureDetector
    _peer_queries: PeerQueries
    _clock: Clock
    _chance: Callable[[], float]

    def __post_init__(self) -> None:
        self.held: Versioned[ControllerState] | None = None
        self.wake = Event()
        self._known: dict[int, BrokerState] = {}
        self._grace_until_ms = 0
        self._maintenance_at_ms = 0
        self._ask_others_ms = 0
        # The controller that this broker last removed without asking others, and when.
        self._removed_alone = (-1, 0)
        # (broker id, incarnation): when another broker last reported that it gets no answer.
        self._suspected_ms: dict[tuple[int, int], int] = {}
        self._ask_reach_ms = 0
        # How often in a row the leader of a partition was found to be cut off.
        self._cut_off: dict[PartitionKey, int] = {}
        self._first_seen_ms: dict[str, int] = {}
        self._closing = Event()
        self._cold = ColdElections(self._peer_queries.log_ends, self._clock)

    # --- live brokers ------------------------------------------------------------------------------------------------

    def live(self) -> dict[int, BrokerState]:
        """Return the brokers that count as live, as far as this one knows."""
        return live_brokers(self._mirror.brokers, self._known, self._failure_detector.gone(), in_grace=self._in_grace())

    def begin_grace(self, session_timeout_s: float) -> None:
        """Count all brokers known before as live for one session: the control plane was unavailable until now."""
        self._grace_until_ms = self._clock.now_ms() + round(1_000 * session_timeout_s)

    def update_watched_brokers(self) -> None:
        """Remember and probe the right brokers, after the mirror or the controller has changed."""
        before = self._known if self._in_grace() else {}
        self._known = {**before, **self._mirror.brokers}
        others = {number: broker for number, broker in self._known.items() if number != self._host.broker_id}
        controller = self._mirror.controller
        if self.held is not None:
            self._failure_detector.watch(others, others.keys())
        else:
            self._failure_detector.watch(others, {controller.value.broker_id} if controller else ())

    def _in_grace(self) -> bool:
        return self._clock.now_ms() < self._grace_until_ms

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._closing.is_set():
            self.wake.wait(self._until_next_s())
            self.wake.clear()
            if not self._closing.is_set():
                self._closing.wait(self.run_pass_safely())

    def run_pass_safely(self) -> float:
        """Run one pass; the next one makes up for a failure. Return how many seconds to pause before it."""
        try:
            self.run_pass()
            return PASS_PAUSE_S
        except ControllerFenced as fenced:
            log.warning("%s", fenced)
            self.step_down()
        except (PlaneUnavailable, OutcomeUnknown) as away:
            log.warning("the controller's work is delayed: %s", away)
        except PlaneError as refused:
            log.error("the controller's work failed: %s", refused)
        except Exception:
            log.exception("the controller's work failed")
        self.wake.set()
        return RETRY_PAUSE_S

    def _until_next_s(self) -> float:
        now_ms = self._clock.now_ms()
        due_ms = [self._maintenance_at_ms if self.held else now_ms + MAINTENANCE_EVERY_MS]
        if self._in_grace():
            due_ms.append(self._grace_until_ms)
        if self.held and self._cold.is_waiting:
            due_ms.append(now_ms + COLD_AGAIN_MS)
        if self.held and self._suspected_ms:
            due_ms.append(self._ask_reach_ms)
        return max(PASS_PAUSE_MIN_S, (min(due_ms) - now_ms) / 1_000)

    def close(self) -> None:
        self._closing.set()
        self.wake.set()

    # --- being controller --------------------------------------------------------------------------------------------

    def run_pass(self) -> None:
        """Run one pass: elect a controller if there is none, and do the controller's work if it is this broker."""
        if not self._host.registered or self._catalog.plane.state is not PlaneState.CONNECTED:
            return
        self.update_watched_brokers()
        self._check_held()
        if self.held is None and not self._is_elected():
            return
        held = self.held
        assert held is not None
        self._elect_leaders(held)
        self._replace_cut_off(held)
        if self._clock.now_ms() >= self._maintenance_at_ms:
            self._maintenance_at_ms = self._clock.now_ms() + MAINTENANCE_EVERY_MS
            self._maintain()

    def step_down(self) -> None:
        """Stop being controller: the session has ended, or another broker was elected."""
        if self.held is not None:
            log.warning("broker %d is controller no longer", self._host.broker_id)
        self.held = None

    def resign(self) -> None:
        """Let another broker be elected at once. Raises PlaneUnavailable, OutcomeUnknown."""
        held, self.held = self.held, None
        if held is not None:
            self._catalog.remove_controller(held)

    def _check_held(self) -> None:
        """Step down if another broker was elected. The mirror may still show an earlier time; a later epoch decides."""
        held, shown = self.held, self._mirror.controller
        if held is None:
            return
        if shown is None:
            shown = self._catalog.controller()
        if shown is None or shown.value.epoch > held.value.epoch:
            self.step_down()

    def _is_elected(self) -> bool:
        """Whether this broker is controller now. Elect it if there is no controller."""
        if self._host.me.draining:
            return False
        shown = self._mirror.controller
        if shown is None:
            if self._others() and self._closing.wait(self._chance() * JITTER_S):
                return False
            shown = self._mirror.controller
            if shown is not None and shown.value.broker_id != self._host.broker_id:
                return False
        elif shown.value.broker_id != self._host.broker_id:
            if not self._is_gone(shown.value) or not self._catalog.remove_controller(shown):
                return False
            log.warning("broker %d was controller and is gone", shown.value.broker_id)
        self.held = self._catalog.elect_controller(self._host.broker_id, self._host.me.incarnation)
        if self.held is None:
            return False
        self._log_election("broker %d is controller, epoch %d", self._host.broker_id, self.held.value.epoch)
        self._maintenance_at_ms = self._clock.now_ms() + MAINTENANCE_EVERY_MS
        self.update_watched_brokers()
        return True

    def _others(self) -> bool:
        return any(number != self._host.broker_id for number in self._mirror.brokers)

    def _is_gone(self, controller: ControllerState) -> bool:
        registered = self._mirror.brokers.get(controller.broker_id)
        if registered is not None and registered.incarnation > controller.incarnation:
            return True  # it has restarted: the election belongs to its earlier incarnation
        if (controller.broker_id, controller.incarnation) not in self._failure_detector.gone(
            refusals=REFUSALS_OF_A_CONTROLLER
        ):
            return False
        now_ms = self._clock.now_ms()
        if self._mirror.brokers.keys() - {self._host.broker_id, controller.broker_id}:
            if now_ms < self._ask_others_ms:
                return False
            self._ask_others_ms = now_ms + ASK_OTHERS_AGAIN_MS
            return not self._peer_queries.is_reached_by_others(controller.broker_id, controller.incarnation)
        fenced, since_ms = self._removed_alone
        if fenced == controller.broker_id and now_ms < since_ms + REMOVE_AGAIN_MS:
            return False  # its session decides
        self._removed_alone = (controller.broker_id, now_ms)
        return True

    # --- the work ----------------------------------------------------------------------------------------------------

    def _elect_leaders(self, held: Versioned[ControllerState]) -> None:
        # A copy: the mirror changes during the pauses, and a commit on what has changed does not fit.
        view = View(dict(self._mirror.topics), dict(self._mirror.partitions), self.live())
        cold = cold_elections(view, paced=in_short_turns)
        give_way()
        self._commit(held, plan(dataclasses.replace(view, waiting=cold.keys()), paced=in_short_turns))
        log_ends = self._cold.log_ends(cold, view.live)
        if log_ends:
            partitions = {key: view.partitions[key] for key in log_ends}
            self._commit(held, plan(dataclasses.replace(view, partitions=partitions, log_ends=log_ends)))

    def note_suspicion(self, broker_id: int, incarnation: int) -> None:
        """Note that another broker gets no answer of this one. That it answers here then proves little."""
        if self.held is not None:
            if (broker_id, incarnation) not in self._suspected_ms:
                gevent.spawn_later(SUSPICION_SETTLES_S, self.wake.set)
            self._suspected_ms[broker_id, incarnation] = self._clock.now_ms()

    def _replace_cut_off(self, held: Versioned[ControllerState]) -> None:
        """Replace live leaders that too few replicas reach, if that stays so. Enough replicas reach the new leader:
        links that stay as they are move a partition once."""
        now_ms = self._clock.now_ms()
        self._suspected_ms = {key: at_ms for key, at_ms in self._suspected_ms.items() if now_ms - at_ms < SUSPICION_MS}
        if now_ms < self._ask_reach_ms:
            return
        if not self._suspected_ms:
            self._cut_off = {}
            return
        self._ask_reach_ms = now_ms + ASK_REACH_AGAIN_MS
        live = self.live()
        suspected = {id for id, incarnation in self._suspected_ms if id in live and live[id].incarnation == incarnation}
        led = {key: each for key, each in self._mirror.partitions.items() if each.value.leader in suspected}
        reach = self._peer_queries.reachability_of(suspected & {each.value.leader for each in led.values()})
        view = View(self._mirror.topics, led, live, reach=reach)
        self._cut_off = {key: self._cut_off.get(key, 0) + 1 for key in cut_off(view)}
        due = {key: led[key] for key, times in self._cut_off.items() if times >= CUT_OFF_MIN}
        if due:
            others = {number for each in due.values() for number in each.value.isr} - reach.keys()
            reach = {**reach, **self._peer_queries.reachability_of(others)}
            self._commit(held, plan(dataclasses.replace(view, partitions=due, reach=reach)))

    def _commit(self, held: Versioned[ControllerState], changes: list[PartitionChange]) -> None:
        if not changes:
            return
        applied = self._catalog.commit_as_controller(held, changes)
        # A change that did not fit is read again, and decided in the next pass.
        for change in changes:
            self._mirror.note(change.path)
        for change in applied[:LOGGED_MAX]:
            self._log_change(change)
        if len(applied) > LOGGED_MAX:
            self._log_election("and %d more partitions were changed likewise", len(applied) - LOGGED_MAX)

    def _log_change(self, change: PartitionChange) -> None:
        topic = self._mirror.topic_by_id(change.topic_id)
        name = f"{topic.name if topic else change.topic_id}/{change.number}"
        wanted = change.state
        if wanted.leader is None:
            log.error("%s has no leader: none of %s that are in sync is there", name, list(wanted.isr))
            return
        self._log_election(
            "%s: broker %d leads in epoch %d, in sync %s of %s",
            *(name, wanted.leader, wanted.leader_epoch, list(wanted.isr), list(wanted.replicas)),
        )

    def _log_election(self, sentence: str, *values: object) -> None:
        """Elections are news where there is a choice."""
        log.log(logging.INFO if self._others() else logging.DEBUG, sentence, *values)

    def _maintain(self) -> None:
        """What crashes left behind goes when it is old, and tombstones when nobody needs them."""
        now_ms = self._clock.now_ms()
        old = old_strays(self._catalog.strays(), self._first_seen_ms, now_ms)
        if old:
            log.info(
                "the partitions of %d topics that were never made, or are deleted, are swept", self._catalog.sweep(old)
            )
        if not self._mirror.tombstones:
            return
        claimed = self._catalog.claims().keys()
        for topic_id, tombstone in list(self._mirror.tombstones.items()):
            if may_be_forgotten(
                tombstone,
                self._catalog.confirmations(topic_id),
                registered=self._mirror.brokers.keys(),
                claimed=claimed,
                now_ms=self._clock.wall_ms(),
            ):
                self._catalog.forget_tombstone(topic_id)
