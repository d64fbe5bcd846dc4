"""Where a streaming query stands in each log, and what became of the logs since.

Positions are {"<topic>@<topic id>/<partition>": the next offset to read}: what Spark keeps in the checkpoint, the same
by files and by HTTP. A look at the logs says of each position one of these:

    good       start_offset <= position <= end_offset
    behind     the log ends below the position. Seen while a broker fails over (what a replica knows to be committed is
               up to a second old), or for good, when a broker's directory was restored from an older copy
    missing    there is no such log. Seen for a moment, or for good when the topic was deleted
    removed    the log begins above the position: retention or a purge was faster than the query
    remade     the topic is there with another id: it was deleted and made again

The last two are certain at once; behind and missing are doubts that may pass, and are losses only when they stay.
A log that is new enters the positions with the offset where it begins, and is read from there by the next batch: so
that the beginning stands in the checkpoint, and a batch that is read again begins where it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from portalmq.spark.origin import PartitionLog

Positions = dict[str, int]


@dataclass
class LogPositions:
    """What one look at the logs says of the positions."""

    floors: Positions = field(default_factory=dict)  # where reading goes on: the position, or higher after a loss
    ends: Positions = field(default_factory=dict)  # how far it may be read; floors[name] <= ends[name], same names
    doubts: dict[str, str] = field(default_factory=dict)  # by log: what may pass
    losses: list[str] = field(default_factory=list)  # what is certain

    @property
    def waiting(self) -> dict[str, int]:
        return {name: end - self.floors[name] for name, end in self.ends.items()}


def standing(positions: Mapping[str, int], logs: Iterable[PartitionLog]) -> LogPositions:
    found = {log.name: log for log in logs}
    ids = {log.topic: log.topic_id for log in found.values()}
    now = LogPositions()
    for name, position in positions.items():
        log = found.get(name)
        if log is not None:
            _judge(now, log, position)
        elif topic_of(name) in ids:
            now.losses.append(
                f"the topic of {name} was deleted and made again, with the id {ids[topic_of(name)]}: what was not read"
                f" of it from offset {position} on is gone"
            )
        else:
            now.floors[name] = now.ends[name] = position
            now.doubts[name] = f"{name} is gone (was its topic deleted?): it was read up to offset {position}"
    for name, log in found.items():
        if name not in positions:
            now.floors[name] = now.ends[name] = log.start_offset
            if log.start_offset > 0:
                now.losses.append(
                    f"{name} is new, and the offsets below {log.start_offset} were removed before they were read"
                    " (retention or a purge)"
                )
    return now


def _judge(now: LogPositions, log: PartitionLog, position: int) -> None:
    if log.start_offset > position:
        now.losses.append(
            f"offsets {position} to {log.start_offset - 1} of {log.name} were removed before they were read"
            " (retention or a purge)"
        )
    if log.end_offset < position:
        now.doubts[log.name] = (
            f"{log.name} ends at offset {log.end_offset}, although it was read up to {position} already: was a broker"
            " restored from an older copy, or is the directory of the newest replica left out?"
        )
    now.floors[log.name] = max(position, log.start_offset)
    now.ends[log.name] = max(now.floors[log.name], log.end_offset)


def accepted(now: LogPositions, gone: Iterable[str], logs: Iterable[PartitionLog]) -> None:
    """Those doubts have not passed, and the user wants to go on: without what is missing, and at the end of what ends
    below its position. Never further back than that: what was read is not read again."""
    found = {log.name: log for log in logs}
    for name in gone:
        del now.doubts[name]
        if name in found:
            now.floors[name] = now.ends[name] = found[name].end_offset
        else:
            del now.floors[name], now.ends[name]


def topic_of(name: str) -> str:
    return name.rsplit("@", 1)[0]


def as_sorted(positions: Mapping[str, int]) -> Positions:
    """Spark compares offsets as text, so that the order of names has to be the same each time."""
    return dict(sorted(positions.items()))
