"""The HTTP doors of older queues, for clients that were written for them: Portal MQ, MiniQ and WonderQ.

Each adapter decodes, makes one call of the domain, and encodes. What it is about is the same replicated log: what comes
in by one door goes out by any other. Errors are the broker's problem documents, with the status codes that the old
protocols had where they had any.

    Portal MQ    a topic's messages in turn, one shared offset       group PORTAL_GROUP, not leased
    MiniQ        one queue, each message confirmed by its key        group DEFAULT, leased
    WonderQ      one queue, unlocked after a time, integer ids       group DEFAULT, leased by the consumer's id
"""

DEFAULT = "default"
PORTAL_GROUP = "portal-mq"
