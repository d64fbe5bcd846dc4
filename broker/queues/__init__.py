"""Queue groups over all leaders: receive, settle, dead letters, outbox, atomic commits, counts."""
