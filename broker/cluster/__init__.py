"""This broker among others: membership, controller, topics, metadata, calls between brokers, locks."""
