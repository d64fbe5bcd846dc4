"""HTTP: decode a request, make one call to the broker, encode the result.

    request -> routes (the table) -> topics | messages | groups | cluster -> Broker -> outgoing -> response
                                        |                                      |
                                        body, query, incoming                problems (the one table of errors)

This package decides nothing about messages, and keeps no state but counters.
"""
