"""Produce, idempotency, producer fencing, scheduled messages, browsing."""
