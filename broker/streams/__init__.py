"""Stream groups: coordinators, offsets, checkpoints, fetches of readers, shared offsets."""
