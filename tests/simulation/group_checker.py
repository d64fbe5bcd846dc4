"""The invariants I11, I12, and I13 of commit calls, checked at each change: when a record is committed
(group_model.py), when a leader delivers messages or accepts a receipt, when a client is answered, when an output
arrives, when a broker begins to lead."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from simulation.biographies import Biographies
from simulation.group_model import Letter, QueueModel, StreamModel
from simulation.outbox import RESCHEDULED

from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import Ack, Cancel, Claim, Commit, Dead, GroupStart, Nack, Purge, Reschedule

if TYPE_CHECKING:
    from simulation.checker import Checker
    from simulation.content import Control
    from simulation.disk import Batch
    from simulation.group_host import GroupHost
    from simulation.group_options import QueueGroup
    from simulation.queue_groups import Receipt

    from portalmq.broker.core.queue.key_order import KeyQueues
    from portalmq.broker.core.stream.events import GroupMembers

# (end of the lease, its receipt)
Held = tuple[int, "Receipt"]


class GroupChecker:
    def __init__(self, checker: Checker) -> None:
        self.world = checker.world
        self.fail = checker.fail
        self.letters: dict[int, Letter] = {}
        self.biographies = Biographies(self)
        self._purged = 0
        self.cancelled: set[int] = set()
        self.queues = {
            name: QueueModel(config, self.letters, self.cancelled, self.fail)
            for name, config in self.world.queue_groups.items()
        }
        self.streams: dict[str, StreamModel] = {}
        self.ordered: dict[tuple[str, str], int] = {}  # outputs of committed records -> the record
        self.arrived_outputs: set[tuple[str, str]] = set()
        self.moved: dict[int, int] = {}  # scheduled messages -> the record that moved them
        self.paused: set[str] = set()  # groups whose pause is answered, and whose resume is not asked for yet
        self._finals: defaultdict[str, dict[int, int]] = defaultdict(dict)  # group -> offset -> epoch that knows
        self._live: defaultdict[tuple[str, int], dict[int, Held]] = defaultdict(dict)
        self._told: dict[tuple[str, int], str] = {}
        self._tokens: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)  # times of a key
        self._buckets: dict[str, KeyQueues | None] = {}  # that the times in `_tokens` are of
        self._attempts: defaultdict[tuple[str, str], set[Receipt]] = defaultdict(set)
        self._refused: set[tuple[str, Receipt]] = set()
        self._answered: defaultdict[str, dict[int, int]] = defaultdict(dict)  # group -> offset -> time of the answer

    def dropped_below(self) -> int:
        """A committed record purges everything below; dead messages there are forgotten."""
        return self._purged

    # --- committed records -------------------------------------------------------------------------------------------

    def committed(self, batch: Batch, leader_epoch: int) -> None:
        self.biographies.committed(batch)
        for offset, mail in enumerate(batch.mail, batch.base):
            letter = self.letters[offset] = Letter(mail, batch.head.appended_at_ms, batch.uid)
            for queue in self.queues.values():
                queue.born(offset, letter)
        control = batch.control
        if control is None:
            return
        record: Any = control.record
        self.world.count(type(record).__name__)
        if isinstance(record, Cancel | Reschedule):
            self.cancelled.update(offset for start, end in record.ranges for offset in range(start, end))
        elif isinstance(record, Purge):
            self._purged = max(self._purged, record.upto)
        elif isinstance(record, GroupStart):
            # The group began after a purge: every leader misses the purged messages, sooner or later.
            self.queues[control.group].begin(max(record.start, self.dropped_below()))
        elif control.group in self.queues:
            self._take(self.queues[control.group], control, batch, leader_epoch)
        elif isinstance(record, Claim) or control.group in self.streams:
            if control.group not in self.streams:
                self.streams[control.group] = StreamModel(control.group, self.fail, self.letters, self.dropped_below)
            self.streams[control.group].take(control)
        if isinstance(record, Commit):
            self.ordered.update({(output.topic, output.record): batch.base for output in record.outputs})
        elif isinstance(record, Reschedule):
            moved = [offset for start, end in record.ranges for offset in range(start, end)]
            self.ordered.update({(RESCHEDULED, f"{offset} by {batch.base}"): batch.base for offset in moved})
            for offset in moved:
                if offset in self.moved:
                    self.fail("I13", "message {} is moved by {}, and was by {}", offset, batch.base, self.moved[offset])
                self.moved[offset] = batch.base
        elif isinstance(record, Dead) and record.topic:
            for start, end, _ in record.ranges:
                copies = {(record.topic, f"{at} by {batch.base}") for at in range(start, end) if at in self.letters}
                self.ordered.update(dict.fromkeys(copies, batch.base))

    def drops(self, host: GroupHost, upto: int) -> None:
        """A replica lets its log begin at `upto`."""
        for name, queue in self.queues.items():
            for offset in self.letters:
                if queue.has_begun and queue.start <= offset < upto and not queue.is_done(offset):
                    self.fail("I12", "{} drops message {}, which is {} for {}", host.node.id, offset,
                              queue.state.get(offset, "fresh"), name)  # fmt: skip

    def _take(self, queue: QueueModel, control: Control, batch: Batch, leader_epoch: int) -> None:
        queue.take(control, batch)
        self._finals[control.group].update(dict.fromkeys(queue.finals, leader_epoch))

    # --- decisions of a leader ---------------------------------------------------------------------------------------

    def appended(self, host: GroupHost, control: Control) -> None:
        """A leader ends leases by the records that it appends, committed or not."""
        record: Any = control.record
        if isinstance(record, Ack | Nack | Dead | Commit):
            live = self._live[control.group, host.epoch]
            for start, end, *_ in record.ranges:
                for offset in range(start, end):
                    live.pop(offset, None)

    def forgets(self, host: GroupHost) -> None:
        """A transaction was refused, or a log cut: its grants are gone, within their epoch too."""
        for (_, epoch), live in self._live.items():
            if epoch == host.epoch:
                live.clear()
        for (_, epoch, _), times in self._tokens.items():
            if epoch == host.epoch:
                times.clear()

    def handed(
        self,
        host: GroupHost,
        group: str,
        receipts: list[Receipt],
        deadline_ms: int,
        attempt: str | None,
        *,
        alone: bool,
    ) -> None:
        """A leader delivers these."""
        if attempt is not None:
            self._attempts[group, attempt].update(receipts)
        model, now_ms, wall_ms = self.queues[group], host.node.now_ms, host.node.wall_ms
        live = self._live[group, host.epoch]
        if group in self.paused:
            self.fail("I12", "{}: {} are delivered in epoch {}, and it is paused", group, receipts, host.epoch)
        if alone and len(receipts) != 1:
            self.fail("I12", "{}: {} are to be delivered alone", group, receipts)
        for receipt in receipts:
            offset = receipt.offset
            self._check_unanswered(host, group, offset)
            letter = self.letters.get(offset)
            if letter is None:
                self.fail("I12", "{}: {} is delivered and not committed", group, offset)
                return
            is_first = receipt.lease == 1 and model.state.get(offset, "fresh") == "fresh" and not model.config.by_key
            due_ms = letter.mail.deliver_at_ms
            if is_first and due_ms is not None and due_ms > max(wall_ms, letter.appended_at_ms):
                self.fail("I12", "{}: message {} is delivered {} ms early", group, offset, due_ms - wall_ms)
            if letter.mail.has_expired(wall_ms):
                self.fail("I12", "{}: message {} is delivered, and has expired", group, offset)
            if self._finals[group].get(offset, host.epoch + 1) <= host.epoch:
                self.fail("I12", "{}: message {} is delivered in epoch {}, and is {}", group, offset, host.epoch,
                          model.state.get(offset))  # fmt: skip
            if offset in live and live[offset][0] > now_ms:
                self.fail("I12", "{}: message {} is delivered under the live lease {}", group, offset, live[offset])
            if receipt.delivery > model.config.max_deliveries:
                self.fail("I12", "{}: {} is one delivery too many", group, receipt)
            if model.config.by_key and letter.mail.key and model.has_begun:
                self._check_key(host, model, offset, live)
            live[offset] = (deadline_ms, receipt)
            model.delivered.add(offset)
            if receipt in model.receipts:
                self.fail("I12", "{}: {} is delivered a second time", group, receipt)
            model.receipts.add(receipt)
            self.world.count("delivery")
            if receipt.delivery > 1:
                self.world.count("redelivery")

    def _check_key(self, host: GroupHost, model: QueueModel, offset: int, live: dict[int, Held]) -> None:
        """No more messages of a key are out at a time than its widest limit says, and they are the first that are not
        done; a delayed one takes its place in the order when it is first delivered, or held."""
        letter, name = self.letters[offset], model.config.name
        width, now_ms = model.config.widest, host.node.now_ms
        is_delayed = model.spot(offset, letter)[0] >= DELAYED
        out, before = list[int](), list[int]()
        for other, its in self.letters.items():
            if its.mail.key != letter.mail.key or other == offset or other < max(model.start, self.dropped_below()):
                continue
            if other in live and live[other][0] > now_ms:
                out.append(other)
            if other > offset or model.is_done(other) or its.mail.has_expired(host.node.wall_ms):
                continue
            if model.state.get(other) == "out" or not (is_delayed or model.spot(other, its)[0] >= DELAYED):
                before.append(other)
        if len(out) >= width:
            self.fail("I12", "{}: message {} is delivered while {} of its key are", name, offset, out)
        # Another leader may know less: the records committed in the meantime.
        if len(before) >= width and host.epoch >= self.world.checker.committed_epoch:
            states = {other: model.state.get(other, "fresh") for other in before}
            self.fail("I12", "{}: message {} is delivered before others of its key: {}", name, offset, states)
        self._check_rate(model.config, host, letter.mail.key)

    def _check_rate(self, config: QueueGroup, host: GroupHost, key: int) -> None:
        """In no span of time are more messages of a key delivered than its bucket holds and the span fills, by the
        fastest limit. A leader that loses its session and goes on in its epoch begins with full buckets."""
        if config.fastest is None:
            return
        rate_per_s, burst = config.fastest
        times = self._tokens[config.name, host.epoch, key]
        keys = host.groups.delivery[config.name].keys
        if self._buckets.get(config.name) is not keys:
            self._buckets[config.name] = keys
            for (name, _, _), earlier in self._tokens.items():
                if name == config.name:
                    earlier.clear()
        times.append(host.node.now_ms)
        for number, since_ms in enumerate(reversed(times), 1):
            if number > burst + (times[-1] - since_ms) * rate_per_s / 1_000 + 0.001:
                self.fail("I12", "{}: {} messages of key {} in {} ms", config.name, number, key, times[-1] - since_ms)

    def repeated(self, host: GroupHost, group: str, attempt: str, receipts: list[Receipt]) -> None:
        """A leader delivers these again to their holder."""
        if not self._attempts[group, attempt].issuperset(receipts):
            self.fail("I12", "{}: {} of {} are delivered again to {!r}", group, receipts,
                      self._attempts[group, attempt], attempt)  # fmt: skip
        live = self._live[group, host.epoch]
        for receipt in receipts:
            self._check_unanswered(host, group, receipt.offset)
            lease = live.get(receipt.offset)
            if lease is not None and lease[0] > host.node.now_ms and lease[1].lease != receipt.lease:
                self.fail("I12", "{}: {} is delivered again, {} is another's", group, receipt, lease)

    def _check_unanswered(self, host: GroupHost, group: str, offset: int) -> None:
        """After an ack is answered, its messages are delivered to no consumer, by no leader."""
        if offset in self._answered[group]:
            self.fail("I16", "{}: message {} is delivered in epoch {}, and its ack was answered at {}", group, offset,
                      host.epoch, self._answered[group][offset])  # fmt: skip

    def extended(self, host: GroupHost, group: str, offsets: list[int], deadline_ms: int) -> None:
        live = self._live[group, host.epoch]
        for offset in offsets:
            if offset in live:
                live[offset] = (deadline_ms, live[offset][1])

    def accepted(self, host: GroupHost, group: str, receipts: list[Receipt], verdicts: list[bool]) -> None:
        """A leader is about to accept or refuse these receipts."""
        live = self._live[group, host.epoch]
        knows_all = host.epoch >= self.world.checker.committed_epoch
        for receipt, good in zip(receipts, verdicts, strict=True):
            is_open = host.groups.delivery[group].has_span(receipt.offset)
            granted = self.queues[group].leases.get(receipt.offset)
            if good and is_open and knows_all and granted and receipt.leader_epoch < granted.leader_epoch:
                self.fail("I12", "{}: {} is accepted, and was granted again in epoch {}", group, receipt,
                          granted.leader_epoch)  # fmt: skip
            # A receipt accepted by an old leader after a commit of a later one is never committed, and so never
            # answered.
            if good and is_open and knows_all and (group, receipt) in self._refused:
                self.fail("I15", "{}: {} was refused, and is accepted now", group, receipt)
            lease = live.get(receipt.offset)
            if not good or lease is None or lease[0] <= host.node.now_ms:
                continue
            if (receipt.leader_epoch, receipt.lease) < (lease[1].leader_epoch, lease[1].lease):
                self.fail("I12", "{}: stale {} is accepted, {} is live", group, receipt, lease)

    # --- answers to clients -----------------------------------------------------------------------------------------

    def settled(self, group: str, receipts: list[Receipt], verdicts: list[bool], *, by_commit: bool = False) -> None:
        """A client's acks succeed. An ack of a message that has expired or was cancelled is fine, a commit is not."""
        model = self.queues[group]
        good_states = ("acked",) if by_commit else ("acked", "expired", "dropped", "cancelled")
        for receipt, good in zip(receipts, verdicts, strict=True):
            if not good:
                self._refused.add((group, receipt))
                continue
            self._answered[group].setdefault(receipt.offset, self.world.now)
            # One that was delivered is cancelled where its grant was lost and the next leader's clock is behind.
            is_cancelled = receipt.offset in model.delivered & self.cancelled - self.moved.keys()
            fresh = "cancelled" if is_cancelled else "fresh"
            state = model.state.get(receipt.offset, fresh)
            if state not in good_states and receipt.offset >= self.dropped_below():
                self.fail("I13", "{}: the ack of {} is answered, and it is {}", group, receipt.offset, state)

    def refused(self, group: str, call: str) -> None:
        """A client's commit call, repeated or not, is refused: it must have no effect later either."""
        self.queues[group].refused_calls.add(call)
        if call in self.queues[group].calls:
            self.fail("I13", "{}: {} is refused, and has been committed", group, call)

    def has_ordered(self, group: str, receipts: list[Receipt], call: str, outputs: int) -> None:
        """A client's commit call succeeds, or another one with the same receipts."""
        model = self.queues[group]
        if model.call_of.get(receipts[0].offset, "") not in (call, ""):
            return
        for number in range(outputs):
            if ("output", f"{call}/{number}") not in self.ordered:
                self.fail("I13", "{} is answered, and output {} was not ordered", call, number)

    def transforms(self, stream: str, call: str, inputs: list[int]) -> None:
        """A member is about to commit the output of these messages."""
        if stream in self.streams:
            self.streams[stream].inputs_of[call] = inputs

    def stream_refused(self, stream: str, call: str) -> None:
        """A member's commit is refused for good."""
        if stream in self.streams:
            self.streams[stream].refuse(call)

    def fetched(self, stream: str, offsets: list[int]) -> None:
        if stream in self.streams:
            self.streams[stream].fetched.update(offsets)

    def named(self, stream: str, member: str, generation: int) -> None:
        """A member learns that it owns a partition."""
        model = self.streams.get(stream)
        if model is None or model.owners.get(generation) != member:
            self.fail("I11", "{} is named to {}, for whom it was not claimed in generation {}", stream, member,
                      generation)  # fmt: skip

    def group_written(self, before: GroupMembers | None, after: GroupMembers) -> None:
        """The state of the stream group in ZooKeeper was changed."""
        if before is not None and after.generation <= before.generation:
            self.fail("I11", "generation {} is written over {}", after.generation, before.generation)
        self.world.count("generation")

    def arrived(self, id: tuple[int, ...], topic: str, content: str) -> None:
        """An output is in its log."""
        if (topic, content) not in self.ordered:
            self.fail("I13", "output {} of {} arrives, and nothing committed has ordered it", content, id)
        if (topic, content) in self.arrived_outputs:
            self.fail("I13", "output {} arrives twice, now as {}", content, id)
        self.arrived_outputs.add((topic, content))
        self.world.count("output")

    # --- knowledge of a leader ---------------------------------------------------------------------------------------

    def agrees(self, host: GroupHost) -> None:
        """Compare the fold of a leader that has appended nothing beyond the committed log with the models."""
        checker = self.world.checker
        if host.shell.replica.next_offset != checker.high_watermark or host.epoch < checker.committed_epoch:
            return
        self.world.count("folds compared")
        for group, delivery in host.groups.delivery.items():
            model = self.queues[group]
            if (delivery.pause.number, delivery.pause.paused) != model.pause:
                self.fail("I12", "{}: {} of its pauses is the last, in the fold of {} it is {}", group, model.pause,
                          host.node.id, delivery.pause)  # fmt: skip
            for offset, letter in self.letters.items():
                if offset < max(model.start, self.dropped_below()):
                    continue
                known = model.state.get(offset, "fresh")
                if delivery.has_span(offset):
                    folded = "out"
                elif delivery.is_dead(offset):
                    folded = "dead"
                elif delivery.is_ahead(offset) or delivery.has_passed(model.spot(offset, letter)):
                    folded = "done"
                else:
                    folded = "fresh"
                known = "done" if known in ("acked", "expired", "dropped") else known
                if known != folded and offset not in self.cancelled:
                    self.fail("I12", "{}: message {} is {}, in the fold of {} it is {}", group, offset,
                              model.state.get(offset, "fresh"), host.node.id, folded)  # fmt: skip
                span, lease = delivery.at(offset), model.leases.get(offset)
                holder = lease.holder if lease is not None else ""
                if span is not None and span.holder != holder:
                    self.fail("I12", "{}: message {} is held by {!r}, in the fold of {} by {!r}", group, offset, holder,
                              host.node.id, span.holder)  # fmt: skip
        for name, stream in host.groups.streams.items():
            known_stream = self.streams[name]
            least, most = known_stream.committed, max(known_stream.committed, self.dropped_below())
            owner = (known_stream.generation, known_stream.member)
            if not least <= stream.committed <= most or (stream.generation, stream.member) != owner:
                self.fail("I11", "{}: the fold of {} has {}", name, host.node.id, stream.snapshot())

    # --- at the end --------------------------------------------------------------------------------------------------

    def missing(self, host: GroupHost, upto: int) -> str | None:
        """Return the messages and orders below `upto` that are not finished; None if all are."""
        if not host.serves():
            return "the groups are not served"
        wall_ms = host.node.wall_ms
        for name, queue in self.queues.items():
            if not queue.has_begun:
                return f"{name} has not begun"
            for offset, letter in self.letters.items():
                is_due = (letter.mail.deliver_at_ms or 0) <= wall_ms + 1_000
                if is_due and queue.start <= offset < upto and not queue.is_done(offset):
                    return f"{name}: message {offset} is {queue.state.get(offset, 'fresh')}"
        last = max((offset for offset in self.letters if offset < upto), default=-1)
        late = [name for name, stream in self.streams.items() if stream.committed <= last]
        if late and self.world.members:
            return f"streams {late} are not read to {upto}"
        opened = [offset for offset in host.groups.outbox if offset < upto]
        if opened:
            return f"the outbox has {opened}"
        for output, record in self.ordered.items():
            if record < upto and output not in self.arrived_outputs:
                self.fail("I13", "output {} was ordered and never arrived", output)
        self.agrees(host)
        return None
