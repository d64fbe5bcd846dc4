"""A member of a stream group: its place in the group, what it fetched, what it commits."""
