"""Random numbers of the operating system, for the clients' pauses and choices.

The module `random` belongs to the user: its seed would make all clients choose alike, and their threads would change
its state. The child of a fork also repeats nothing of its parent.
"""

from __future__ import annotations

import random

_system = random.SystemRandom()

below = _system.randrange
choice = _system.choice
fraction = _system.random
