"""The brokers' HTTP interface as an origin."""
