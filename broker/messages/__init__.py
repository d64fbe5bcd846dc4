"""Messages on their way in, and looked at: produce, idempotency, producer fencing, schedules, browsing."""
