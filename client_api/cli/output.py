"""Data on stdout in one of three forms: an aligned table, one JSON document, or one JSON object on each line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, Literal

import click
import msgspec

from portalmq import wire
from portalmq.message import Message

Form = Literal["table", "json", "ndjson"]

# A long table is aligned by its first rows and streamed from there on.
ALIGNED_BY_ROWS = 100
CELL_WIDTH_MAX = 60
LAST_COLUMN_WIDTH_MIN = 10
_GAP = "  "
# Cells with a colour of their own.
_COLOURS = {
    "healthy": "green",
    "needs attention": "red",
    "without leader": "red",
    "under-replicated": "yellow",
    "not_ready": "red",
    "dead": "red",
}


def show_rows(rows: Iterable[Mapping[str, Any]], form: Form, columns: list[str]) -> None:
    """Print rows as they arrive. A table shows `columns`, JSON shows all fields."""
    if form == "table":
        _show_table(rows, columns)
    elif form == "json":
        _show_array(rows)
    else:
        for row in rows:
            sys.stdout.write(_json(row) + "\n")


def show_one(fields: Mapping[str, Any], form: Form) -> None:
    """Print one object: as `name  value` lines, or as JSON."""
    if form != "table":
        sys.stdout.write(_json(fields) + "\n")
        return
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        cell = _cell(value)
        shown = click.style(cell, fg=_COLOURS.get(cell)) if _in_colour() else cell
        sys.stdout.write(f"{_bold(name.ljust(width))}{_GAP}{shown}\n")


def write_no_more() -> None:
    """Discard all further output, also what is flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def message_row(message: Message) -> dict[str, Any]:
    """Return a message as the HTTP API shows it in JSON."""
    row: dict[str, Any] = {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "key": None,
        **_payload(message),
        "content_type": message.content_type,
        "headers": dict(message.headers),
        "timestamp_ms": message.timestamp_ms,
    }
    if message.key is not None:
        row.update(_text_or_base64("key", message.key))
    for name in ("deliver_at_ms", "expires_at_ms", "receipt"):
        if getattr(message, name) is not None:
            row[name] = getattr(message, name)
    for name in ("priority", "delivery_count", "lease_expires_at_ms"):
        if getattr(message, name):
            row[name] = getattr(message, name)
    return row


def time_text(unix_ms: int) -> str:
    """Return a time as RFC 3339 text in UTC, with milliseconds."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show_value(message: Message) -> None:
    """Print the payload as it was sent, and a line feed. A terminal gets control characters in escaped form."""
    out = sys.stdout.buffer
    value = message.value
    if _on_terminal():
        text = value.decode("utf-8", "backslashreplace")
        value = "".join(each if each in "\n\t" else _harmless(each) for each in text).encode("utf-8")
    out.write(value + b"\n")
    out.flush()


def _payload(message: Message) -> dict[str, Any]:
    if wire.is_json_type(message.content_type):
        try:
            return {"value": msgspec.json.decode(message.value)}
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    return _text_or_base64("value", message.value)


def _text_or_base64(name: str, content: bytes) -> dict[str, Any]:
    try:
        return {name: content.decode("utf-8")}
    except UnicodeDecodeError:
        # msgspec writes bytes as base64.
        return {f"{name}_base64": content} if name == "value" else {name: None, f"{name}_base64": content}


def _show_table(rows: Iterable[Mapping[str, Any]], columns: list[str]) -> None:
    """Print a table. On a terminal the last column takes the rest of its width, so that no row wraps."""
    cells = ([_cell(_of(row, column)) for column in columns] for row in rows)
    first = list(islice(cells, ALIGNED_BY_ROWS))
    widths = [max([len(column), *(len(row[at]) for row in first)]) for at, column in enumerate(columns)]
    if _on_terminal():
        left = shutil.get_terminal_size().columns - sum(width + len(_GAP) for width in widths[:-1])
        widths[-1] = min(widths[-1], max(left, LAST_COLUMN_WIDTH_MIN))
    sys.stdout.write(_bold(_line([column.upper() for column in columns], widths)) + "\n")
    for row in chain(first, cells):
        row[-1] = _shortened(row[-1], widths[-1] if _on_terminal() else CELL_WIDTH_MAX)
        sys.stdout.write(_line(row, widths, colour=True) + "\n")


def _of(row: Mapping[str, Any], column: str) -> Any:
    """Return a column's value; the bytes of a key or value that is not text."""
    value = row.get(column)
    return row.get(f"{column}_base64") if value is None else value


def _show_array(rows: Iterable[Mapping[str, Any]]) -> None:
    between = "["
    for row in rows:
        sys.stdout.write(between + _json(row))
        between = ",\n "
    sys.stdout.write("[]\n" if between == "[" else "]\n")


def _line(cells: list[str], widths: list[int], *, colour: bool = False) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    padded[-1] = padded[-1].rstrip()
    if colour and _in_colour():
        padded = [click.style(each, fg=_COLOURS.get(cell)) for each, cell in zip(padded, cells, strict=True)]
    return _GAP.join(padded).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return _shortened(repr(value[:CELL_WIDTH_MAX]), CELL_WIDTH_MAX)
    text = value if isinstance(value, str) else _json(value)
    return _shortened(_harmless(text), CELL_WIDTH_MAX)


def _harmless(text: str) -> str:
    """Escape control characters: a terminal must not obey escape sequences in a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _bold(text: str) -> str:
    return click.style(text, bold=True) if _in_colour() else text


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _in_colour() -> bool:
    return _on_terminal() and "NO_COLOR" not in os.environ
