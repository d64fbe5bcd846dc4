"""A member of a stream group: membership, fetching, commits."""
