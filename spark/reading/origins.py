"""Opens the origin that the options name: data directories or brokers."""

from __future__ import annotations

from portalmq.spark.options import ReadOptions
from portalmq.spark.origin import Origin


def open_origin(reading: ReadOptions) -> Origin:
    """Return the origin that the options name. Raises SourceError."""
    if reading.paths:
        from portalmq.spark.files.directories import Directories

        return Directories(reading.paths, reading.topics, reading.span_offsets)
    from portalmq.spark.http_api.brokers import Brokers

    return Brokers(reading.bootstrap, reading.topics, reading.span_offsets, token=reading.token, tls=reading.tls)
