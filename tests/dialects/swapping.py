"""A stand-in for a connection pooler in transaction mode, between clients and a real server."""

import select
import socket
import struct
import threading
from types import TracebackType
from typing import Self

from sqlalchemy import make_url

_HEADER = struct.Struct("!cI")
_READY, _SYNC, _QUERY, _TERMINATE = b"Z", b"S", b"Q", b"X"


class SwappingPooler:
    """Gives each client two server connections, and the other one for every new transaction.

    So nothing that a session keeps is there in the next transaction: prepared statements, settings,
    LISTEN. It speaks just enough of the protocol: no TLS, no passwords, no COPY.
    """

    def __init__(self, url: str) -> None:
        self._server = make_url(url)
        self.swaps = 0

    def __enter__(self) -> Self:
        self._door = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._door.close()

    @property
    def url(self) -> str:
        """The URL through the pooler."""
        url = self._server.set(host="127.0.0.1", port=self._door.getsockname()[1])
        url = url.update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        return url.render_as_string(hide_password=False)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            _send_at_once(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, self._connect() as first, self._connect() as second:
            try:
                self._relay(client, [first, second])
            except (OSError, EOFError):
                return

    def _connect(self) -> socket.socket:
        server = socket.create_connection((self._server.host, self._server.port or 5432))
        _send_at_once(server)
        return server

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
            if kind not in (_SYNC, _QUERY):
                continue
            for answer in _until_ready(servers[current]):
                client.sendall(answer)
            if answer[-1:] == b"I":  # no transaction is open
                current = 1 - current
                self.swaps += 1


def _send_at_once(each: socket.socket) -> None:
    """Without waiting for the other side, which waits for more: 40 ms for each small message."""
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _until_ready(server: socket.socket) -> list[bytes]:
    """All messages up to the one that ends an answer."""
    messages: list[bytes] = []
    while True:
        kind, message = _message(server)
        messages.append(message)
        if kind == _READY:
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
