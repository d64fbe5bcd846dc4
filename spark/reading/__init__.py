"""Reads of the messages: batch and streaming."""
