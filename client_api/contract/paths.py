"""Names of topics, groups and locks, and the paths that they make."""

from __future__ import annotations

import re
from urllib.parse import quote

from portalmq.errors import InvalidRequest

# The paths of calls between brokers; clients are refused.
INTERNAL_PATH = "/internal/v1/"
NAME = re.compile(r"[A-Za-z0-9._-]{1,190}\Z")


def check_name(name: str, what: str) -> str:
    """Return `name` if it is a valid name of a topic, a group or a lock; raise InvalidRequest otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} is text, not {name!r}")
    if not NAME.match(name) or name in {".", ".."}:
        raise InvalidRequest(
            f"{name[:200]!r} cannot name a {what}: 1 to 190 of the characters A-Z a-z 0-9 . _ - , and not '.' or '..'"
        )
    return name


def topic_path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


def messages_path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/messages"


def partition_messages_path(topic: str, partition: int) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/partitions/{partition}/messages"


def group_path(group: str, verb: str = "") -> str:
    return f"/v1/groups/{quote(group, safe='')}" + (f"/{verb}" if verb else "")
