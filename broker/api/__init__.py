"""HTTP: decode a request, make one call to the broker, encode the result.

    request -> routes (the table) -> topics | messages | groups | cluster -> Broker -> outgoing -> response
                                        |                                      |
                                        body, query, incoming                problems (the one table of errors)

    routes -> openapi -> GET /openapi.json, shown at /docs

A row of the table names types: of the parameters in the query, which the view gets decoded (query), of bodies, and of
answers. So the description of the API needs no second list, and tests hold every answer against it.

This package decides nothing about messages, and keeps no state but counters.
"""
