"""Which topics are read: those that are named, or match a name with `*` (any characters) or `?` (one); or all.

Internal topics, whose names begin with two underscores, have to be named: no pattern matches them that does not begin
so itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

INTERNAL = "__"


def is_pattern(name: str) -> bool:
    """No topic's own name has these characters."""
    return "*" in name or "?" in name


def is_wanted(topic: str, asked: Sequence[str] | None) -> bool:
    """`asked` None means all but the internal ones."""
    if asked is None:
        return not topic.startswith(INTERNAL)
    return any(_matches(topic, name) for name in asked)


def not_found(asked: Sequence[str] | None, found: Collection[str]) -> list[str]:
    """The names and patterns that none of the topics is."""
    return [name for name in asked or () if not any(_matches(topic, name) for topic in found)]


def _matches(topic: str, name: str) -> bool:
    if not is_pattern(name):
        return topic == name
    return fnmatchcase(topic, name) and (name.startswith(INTERNAL) or not topic.startswith(INTERNAL))
