"""One replica of a partition: leader, follower, in-sync replicas, epochs, idempotent producers."""
