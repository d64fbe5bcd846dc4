"""Numbers in bodies of the HTTP contract, and their bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec

# The largest integer that all JSON readers keep exact (RFC 8259, section 6), and below the 2^63 of SQLite columns.
INTEGER_MAX = 2**53 - 1

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]

# The longest wait of a request.
WAIT_MS_MAX = 60_000
