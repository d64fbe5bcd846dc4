"""The ports that MiniQ's clients expect."""

COMMAND_PORT = 5557
PRODUCER_PORT = 5555
CONSUMER_PORT = 5556
