"""The HTTP room: decode a request, make one call to the domain, encode what it answers.

    request -> routes (the table) -> topics | messages | groups | cluster -> Broker -> outgoing -> response
                                        |                                      |
                                        body, query, incoming                problems (the one table of errors)

The room decides nothing about messages and keeps no state but counters. What it needs of the domain stands in
`domain`.
"""
