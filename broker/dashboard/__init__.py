"""The dashboard: pages at /ui/ on every broker, which are clients of the public API."""
