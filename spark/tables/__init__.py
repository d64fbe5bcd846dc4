"""The tables beside `messages`: batches, deliveries and groups."""
