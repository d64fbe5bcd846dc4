"""HTTP protocols of older queues, for clients written for them: Portal MQ, MiniQ and WonderQ.

Each adapter decodes a request, makes one call to the broker, and encodes the result. All protocols share the same
replicated log: a message sent by one is received by any other. Errors are the broker's problem documents, with the
status codes of the old protocol where it defines them.

    Portal MQ    messages of a topic in order, one shared offset     group PORTAL_GROUP, not leased
    MiniQ        one queue, each message confirmed by its key        group DEFAULT, leased
    WonderQ      one queue, locks that expire, integer ids           group DEFAULT, leased by the consumer's id
"""

DEFAULT = "default"
PORTAL_GROUP = "portal-mq"
