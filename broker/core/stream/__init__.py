"""One stream group: membership, assignment, rebalance, offsets."""
