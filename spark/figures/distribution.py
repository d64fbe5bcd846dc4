"""Distributions of integers with their frequencies: quantiles and histograms, as Spark columns.

Values below 1,024 are exact; greater ones keep ten leading bits, within 0.1 percent. So there are at most some 28,000
different ones, and exact weighted quantiles of billions of messages fit one task.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as f

_KEPT_BITS = 10


def coarse(value: Column) -> Column:
    """Return the value, or the middle of the range of values with its ten leading bits."""
    step = _bits(value) - _KEPT_BITS
    scale = f.pow(f.lit(2), f.greatest(step, f.lit(0))).cast("long")
    low = f.floor(value / scale).cast("long") * scale
    return f.when(value < 1 << _KEPT_BITS, value).otherwise(low + f.floor(scale / 2).cast("long"))


def quantiles(value: Column, weight: Column, total: Column, biggest: Column) -> Column:
    """Aggregate `coarse` values to model.Quantiles. `total` is the sum of the exact values of a row, `biggest` the
    greatest of them."""
    ranks = f.percentile(value, f.array(f.lit(0.5), f.lit(0.9), f.lit(0.99)), weight)
    most = f.max(biggest).cast("double")  # the middle of a range may exceed all values in it
    return f.struct(
        (f.sum(total) / f.sum(weight)).alias("mean"),
        f.least(ranks[0], most).alias("p50"),
        f.least(ranks[1], most).alias("p90"),
        f.least(ranks[2], most).alias("p99"),
        most.alias("max"),
    )


def power_from(value: Column) -> Column:
    """Return the histogram's border at or below: 0, 1, 2, 4, 8, ..."""
    return f.when(value < 1, f.lit(0)).otherwise(f.pow(f.lit(2), _bits(value) - 1)).cast("long")


def power_to(border: Column) -> Column:
    """Return the border above `power_from`."""
    return f.when(border < 1, f.lit(1)).otherwise(border * 2).cast("long")


def _bits(value: Column) -> Column:
    return f.length(f.bin(value))
