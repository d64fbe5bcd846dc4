"""What a partition replica is told, and what it asks for. Numbers only: payload bytes never enter the core.

Told:  PartitionStateChanged, AppendRequested, Appended
Asked: Append, Refuse, AnswerDuplicate, HighWatermarkAdvanced, StepDown
"""

from __future__ import annotations

from dataclasses import dataclass

from portalmq.errors import PortalMQError


@dataclass(frozen=True, slots=True)
class Stamp:
    """Sequence identity of a batch (KIP-98): sequence is that of its first message."""

    producer_id: int
    producer_epoch: int
    sequence: int


# --- told ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionStateChanged:
    """The control plane's word on who leads. `leader` is None while there is none."""

    leader: int | None
    leader_epoch: int
    isr: frozenset[int]
    replicas: tuple[int, ...]
    min_insync_replicas: int


@dataclass(frozen=True, slots=True)
class AppendRequested:
    """Someone wants `count` offsets. `token` comes back in the answer; `is_control` marks our own records, which are
    taken as long as this replica leads."""

    token: object
    count: int
    stamp: Stamp | None = None
    is_control: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The local COMMIT returned: everything below `end_offset` is fsynced here."""

    end_offset: int


Event = PartitionStateChanged | AppendRequested | Appended

# --- asked -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """Write the batch of `token` at `base_offset` under `leader_epoch`; a token of None is EPOCH_START."""

    token: object
    base_offset: int
    leader_epoch: int
    appended_at_ms: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing of `token` was or will be applied; `error` says why."""

    token: object
    error: PortalMQError


@dataclass(frozen=True, slots=True)
class AnswerDuplicate:
    """The batch of `token` is in the log already: answer its first place, once that is below the high watermark."""

    token: object
    base_offset: int
    appended_at_ms: int


@dataclass(frozen=True, slots=True)
class HighWatermarkAdvanced:
    """Every offset below `high_watermark` is committed and readable."""

    high_watermark: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """This replica leads no longer: whoever waits gets an unknown outcome."""

    leader: int | None


Action = Append | Refuse | AnswerDuplicate | HighWatermarkAdvanced | StepDown
