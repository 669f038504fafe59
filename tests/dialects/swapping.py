"""A stand-in for a connection pooler in transaction mode, between clients and a real server."""

import select
import socket
import struct

from tests.servers.sockets import Between

_HEADER = struct.Struct("!cI")
_READY, _SYNC, _QUERY, _TERMINATE = b"Z", b"S", b"Q", b"X"
_COPY_BEGINS, _COPY_DONE, _COPY_FAILED = b"G", b"c", b"f"


class SwappingPooler(Between):
    """Gives each client two server connections, and the other one for every new transaction.

    So nothing that a session keeps is there in the next transaction: prepared statements, settings,
    LISTEN. It speaks just enough of the protocol: no TLS, no passwords; a COPY by a
    simple query.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.swaps = 0

    def _serve(self, client: socket.socket) -> None:
        with self._connect() as first, self._connect() as second:
            self._relay(client, [first, second])

    def _relay(self, client: socket.socket, servers: list[socket.socket]) -> None:
        length = _exactly(client, 4)
        startup = length + _exactly(client, struct.unpack("!I", length)[0] - 4)
        for server in servers:
            server.sendall(startup)
            greeting = b"".join(_until_ready(server))
        client.sendall(greeting)
        current = 0
        while True:
            readable, _, _ = select.select([client, servers[current]], [], [])
            if servers[current] in readable:  # answers to a Flush of asyncpg's, without an end
                client.sendall(_message(servers[current])[1])
                continue
            kind, message = _message(client)
            servers[current].sendall(message)
            if kind == _TERMINATE:
                return
            if kind not in (_SYNC, _QUERY, _COPY_DONE, _COPY_FAILED):
                continue
            for answer in _until_ready(servers[current]):
                client.sendall(answer)
            if answer[-1:] == b"I":  # no transaction is open
                current = 1 - current
                self.swaps += 1


def _until_ready(server: socket.socket) -> list[bytes]:
    """All messages up to the one that ends an answer, or asks for the rows of a COPY."""
    messages: list[bytes] = []
    while True:
        kind, message = _message(server)
        messages.append(message)
        if kind in (_READY, _COPY_BEGINS):
            return messages


def _message(source: socket.socket) -> tuple[bytes, bytes]:
    header = _exactly(source, _HEADER.size)
    kind, length = _HEADER.unpack(header)
    return kind, header + _exactly(source, length - 4)


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
