"""The parts of a consumer: leases, prefetch, atomic commits."""
