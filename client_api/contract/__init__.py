"""Bodies, names and limits of the HTTP contract, by noun. `portalmq.wire` has those that are used most."""
