"""Option values of several commands: times, durations, settings, message ids."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import msgspec

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION_S_MAX = 100 * 366 * 86_400
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)\Z")


def duration_s(given: str) -> float | None:
    """Return `500ms`, `90s`, `15m`, `2h`, `7d` in seconds; None if it is not a duration."""
    found = _DURATION.match(given)
    return None if found is None else float(found[1]) * _UNITS_S[found[2]]


class FiniteRange(click.FloatRange):
    """A number in a range. `nan`, which no range refuses, and `inf` are no numbers here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class SecondsRange(FiniteRange):
    """Seconds in a range, written as a number or as a duration: 2, 1s, 500ms."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = duration_s(value) if isinstance(value, str) else None
        return super().convert(value if seconds is None else seconds, param, ctx)


def duration(ctx: click.Context, parameter: click.Parameter, given: str | None) -> float | None:
    """Parse an option that is a duration."""
    if given is None:
        return None
    seconds = duration_s(given)
    if seconds is None:
        raise click.BadParameter(f"{given!r} is no duration; write 500ms, 90s, 15m, 2h or 7d")
    if seconds > DURATION_S_MAX:
        raise click.BadParameter(f"{given!r} is longer than a century")
    return seconds


def instant(given: str) -> datetime | None:
    """Parse an RFC 3339 time; without a zone it is in this machine's. Return None if it is not a time."""
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.astimezone()


def moment_ago(given: str) -> datetime:
    """Parse an RFC 3339 time, or how long ago: 90s, 15m, 2h, 7d. Raises BadParameter."""
    seconds = duration_s(given)
    try:
        moment = instant(given) if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)
    except OverflowError:
        moment = None
    if moment is None:
        raise click.BadParameter(f"{given!r} is no time; write 2026-05-01T12:00:00Z, or 15m for 15 minutes ago")
    return moment


def past_time(ctx: click.Context, parameter: click.Parameter, given: str | None) -> datetime | None:
    """Parse an option that is a time, or how long ago."""
    return None if given is None else moment_ago(given)


def future_time(ctx: click.Context, parameter: click.Parameter, given: str | None) -> datetime | None:
    """Parse an option that is a time."""
    if given is None:
        return None
    moment = instant(given)
    if moment is None:
        raise click.BadParameter(f"{given!r} is no time; write 2026-05-01T12:00:00Z (or use a delay)")
    return moment


def settings(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse `name=value` pairs, if any; a value is JSON where possible (numbers, null), else text."""
    config: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE")
        try:
            config[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            config[name] = value
    return config or None


def message_headers(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str] | None:
    """Parse `NAME=VALUE` pairs, if any, as headers of a message."""
    pairs = [pair.partition("=") for pair in given]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise click.BadParameter(f"{name!r} is not NAME=VALUE")
    return {name.lower(): value for name, _, value in pairs} or None


def message_ids(ctx: click.Context, parameter: click.Parameter, given: str | None) -> list[str] | None:
    """Parse an option with message ids separated by commas; `-` reads them from stdin, one on each line."""
    if given is None:
        return None
    lines: Iterable[str] = sys.stdin if given == "-" else given.split(",")
    ids = [each.strip() for each in lines if each.strip()]
    if not ids:
        raise click.BadParameter("no id is named; write for instance 0-17,0-18")
    return ids


def config_option(example: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option for settings; `example` is one of them."""
    return click.option(
        "-c", "--config", multiple=True, metavar="NAME=VALUE", callback=settings, help=f"A setting, e.g. {example}."
    )


def where_given(ctx: click.Context, parameter: click.Parameter, given: str | None) -> dict[str, Any] | None:
    """Parse a condition on messages; None if there is none."""
    if given is None:
        return None
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as fault:
        raise click.BadParameter(
            f'{fault}; write for instance \'{{"value.sensor":{{"eq":1}},"reason":{{"contains":"timeout"}}}}\''
        ) from None
