"""HTTP/1.1 on a connection: the only parser of requests, strict (RFC 9112), and the answers."""
