"""Replication between two brokers: one conversation for all their partitions."""
