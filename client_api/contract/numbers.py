"""Numbers and names in bodies of the HTTP contract, and their bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec

# The largest integer that all JSON readers keep exact (RFC 8259, section 6), and below the 2^63 of SQLite columns.
INTEGER_MAX = 2**53 - 1

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# The name of a topic, a group or a lock, as JSON schemas have it; wire.check_name checks it.
NAME_PATTERN = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,190}$"
Name = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": NAME_PATTERN})]

Positive = Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]

# The longest wait of a request.
WAIT_MS_MAX = 60_000
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]
