"""The application that a worker of celery_program loads, from its environment."""

from __future__ import annotations

import os
from pathlib import Path

from support.celery_program import application

_given = (pair.partition("=") for pair in os.environ["PROOF_OPTIONS"].split(",") if pair)
app = application(
    os.environ["PROOF_BROKER"],
    Path(os.environ["PROOF_NOTES"]),
    **{name: float(value) if value.replace(".", "").isdigit() else value for name, _, value in _given},
)
