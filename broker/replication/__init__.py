"""Fetches between two brokers: all their partitions in one conversation."""
