"""The sink: rows to messages."""
