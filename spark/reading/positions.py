"""The positions of a streaming query in each log, compared with the state of the logs.

Positions are {"<topic>@<topic id>/<partition>": the next offset to read}: the content of Spark's checkpoint, the same
for files and HTTP. A poll of the logs finds each position in one of these states:

    good       start_offset <= position <= end_offset
    behind     the log ends below the position. Temporary while a broker fails over (a replica learns of commits up to
               a second late), or permanent after a broker's directory was restored from an older copy
    missing    the log does not exist. Temporary, or permanent when the topic was deleted
    removed    the log begins above the position: retention or a purge was faster than the query
    remade     the topic exists with another id: it was deleted and created again

The last two are certain at once; behind and missing are doubts, which become losses only when they persist.
A new log enters the positions with its first offset, and the next batch reads from there: so the checkpoint has its
start, and a batch that is read again begins at the same offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from portalmq.spark.origin import PartitionLog

Positions = dict[str, int]


@dataclass
class LogPositions:
    """The positions after a comparison with the logs."""

    floors: Positions = field(default_factory=dict)  # where reading continues: the position, or higher after a loss
    ends: Positions = field(default_factory=dict)  # how far it may be read; floors[name] <= ends[name], same names
    doubts: dict[str, str] = field(default_factory=dict)  # by log: losses that may be temporary
    losses: list[str] = field(default_factory=list)  # certain losses

    @property
    def waiting(self) -> dict[str, int]:
        return {name: end - self.floors[name] for name, end in self.ends.items()}


def compare_positions(positions: Mapping[str, int], logs: Iterable[PartitionLog]) -> LogPositions:
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


def accept_losses(now: LogPositions, gone: Iterable[str], logs: Iterable[PartitionLog]) -> None:
    """Accept doubts that persist: drop missing logs, and continue at the end of those that end below their position.
    Never continue below that end, so that nothing is read twice."""
    found = {log.name: log for log in logs}
    for name in gone:
        del now.doubts[name]
        if name in found:
            now.floors[name] = now.ends[name] = found[name].end_offset
        else:
            del now.floors[name], now.ends[name]


def topic_of(name: str) -> str:
    return name.rsplit("@", 1)[0]


def sorted_positions(positions: Mapping[str, int]) -> Positions:
    """Return the positions sorted by name: Spark compares offsets as text."""
    return dict(sorted(positions.items()))
