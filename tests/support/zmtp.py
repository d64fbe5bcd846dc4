"""ZeroMQ's wire protocol (ZMTP 3.0, NULL), by hand: for clients that break its rules."""

from __future__ import annotations

import socket
import struct

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + b"\x00" + bytes(31)
SOCKET_TYPE = b"\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ"
READY = b"\x05READY" + SOCKET_TYPE + b"\x08Identity" + struct.pack(">I", 0)
WITHIN_S = 60.0


def frame(body: bytes, *flags: int) -> bytes:
    if len(body) < 256:
        return bytes([sum(flags), len(body)]) + body
    return bytes([sum(flags) + LONG]) + struct.pack(">Q", len(body)) + body


def greeted(port: int) -> socket.socket:
    """Return a connection after its handshake."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S)
    connection.sendall(GREETING)
    received = b""
    while len(received) < len(GREETING):
        received += connection.recv(len(GREETING) - len(received))
    connection.sendall(frame(READY, COMMAND))
    connection.recv(4096)  # its READY
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    """Wait until the other side ends the connection. Raises TimeoutError when it does not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
