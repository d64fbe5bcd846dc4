"""Random numbers of the operating system, for the clients' pauses and choices.

The module `random` is the user's: its seed would make all clients choose alike, and their threads would change its
state. A child of a fork repeats nothing of its parent either.
"""

from __future__ import annotations

import random

_system = random.SystemRandom()

below = _system.randrange
choice = _system.choice
fraction = _system.random
