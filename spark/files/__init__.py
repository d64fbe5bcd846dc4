"""The brokers' data directories as an origin."""
