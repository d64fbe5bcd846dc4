"""The parts of a producer: batches, their senders, partitions."""
