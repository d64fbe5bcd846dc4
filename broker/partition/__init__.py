"""A partition on this broker: one core and one log, joined; appending, reading, retention, compaction."""
