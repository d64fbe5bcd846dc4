"""Connections and their files, shared by clients and brokers."""
