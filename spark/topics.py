"""Topic selection: by name, by a pattern with `*` (any characters) or `?` (one character), or all.

Internal topics, whose names begin with two underscores, must be named: only a pattern that itself begins with two
underscores matches them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

INTERNAL = "__"


def is_pattern(name: str) -> bool:
    """True for a pattern; topic names cannot have these characters."""
    return "*" in name or "?" in name


def is_wanted(topic: str, asked: Sequence[str] | None) -> bool:
    """True when the topic is selected; `asked` None selects all but the internal ones."""
    if asked is None:
        return not topic.startswith(INTERNAL)
    return any(_matches(topic, name) for name in asked)


def not_found(asked: Sequence[str] | None, found: Collection[str]) -> list[str]:
    """Return the names and patterns that match no topic."""
    return [name for name in asked or () if not any(_matches(topic, name) for topic in found)]


def _matches(topic: str, name: str) -> bool:
    if not is_pattern(name):
        return topic == name
    return fnmatchcase(topic, name) and (name.startswith(INTERNAL) or not topic.startswith(INTERNAL))
