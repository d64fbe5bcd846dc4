"""MiniQ over ZeroMQ: three ports with REQ/REP in JSON, in front of a cluster.

    5557 commands    {"type", "payload": {"queue", ...}}    CREATE_QUEUE, QUEUE_SIZE, DELETE_MSG, PRODUCE_MSG, CONSUME
    5555 producers   {"queue", "message"}                   {"status": "ok", "id", ...} once it is stored
    5556 consumers   {"queue"}                              {"status": "ok", "id", "message", ...}, null when empty

    protocol   decodes and encodes frames; pure        dispatcher  requests by queue, and the worker threads
    server     the sockets                             cluster     the brokers' HTTP API, as this server uses it
    command    `portalmq zeromq`                       service     MiniQService, the client for programs
    curve      encryption                              flood       protection against endless messages

The server keeps no state: queues, messages and leases are the brokers'. It may be killed, restarted, or run several
times in front of one cluster.
"""
