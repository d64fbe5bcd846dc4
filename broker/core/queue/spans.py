"""Cutting many ranges out of a group's spans at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from msgspec.structs import replace

from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.queue.records import Range


def length_of(spans: Sequence[SpanFold]) -> int:
    """Return how many messages the spans hold."""
    return sum([span.end - span.start for span in spans])


def take_out(
    spans: dict[int, SpanFold], starts: Sequence[int], ranges: Sequence[Range]
) -> tuple[list[SpanFold], list[SpanFold]]:
    """Remove the spans that the sorted ranges touch from `spans`, whose sorted starts are `starts`. Return the
    removed spans, and the parts of them outside the ranges, to be put back; both by offset."""
    taken: list[SpanFold] = []
    rests: list[SpanFold] = []
    cut: SpanFold | None = None  # the span that remains from `upto` on, as far as is known
    upto = 0
    for start, end in ranges:
        if cut is not None:
            rest_end = min(start, cut.end)
            if upto < rest_end:
                rests.append(replace(cut, start=upto, end=rest_end))
            upto = max(upto, end)
            if upto < cut.end:
                continue
            start, cut = max(start, cut.end), None
        span = spans.get(start)
        if span is not None and span.end == end:  # exactly one span
            taken.append(spans.pop(start))
            continue
        for at in range(max(0, bisect_right(starts, start) - 1), len(starts)):
            if starts[at] >= end:
                break
            span = spans.get(starts[at])
            if span is None or span.end <= start:
                continue
            taken.append(spans.pop(span.start))
            if span.start < start:
                rests.append(replace(span, end=start))
            if span.end > end:
                cut, upto = span, end
    if cut is not None:
        rests.append(replace(cut, start=upto))
    return taken, rests
