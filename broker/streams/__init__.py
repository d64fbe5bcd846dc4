"""Stream groups over all leaders: coordination, offsets, checkpoints, fetches of readers."""
