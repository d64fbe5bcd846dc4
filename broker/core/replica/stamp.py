"""The identity of an idempotent producer's batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stamp:
    """Sequence identity of a batch (KIP-98). `sequence` is that of its first message."""

    producer_id: int
    producer_epoch: int
    sequence: int
