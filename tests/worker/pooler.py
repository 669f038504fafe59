"""A stand-in for a connection pooler: what a client sees of one, between it and a real server."""

import socket
import struct

from tests.servers.sockets import Between

_POOLERS_PID = 4_242_424
_HEADER = struct.Struct("!cI")


class Pooler(Between):
    """Forwards to the server of `url`; tells clients a process id of its own, as poolers do.

    With `forwards_notifications=False` it behaves like one in transaction mode: LISTEN succeeds and
    nothing is ever heard.
    """

    def __init__(self, url: str, *, forwards_notifications: bool) -> None:
        super().__init__(url)
        self._forwards_notifications = forwards_notifications

    def _serve(self, client: socket.socket) -> None:
        server = self._connect()
        self._start(self._answer, server, client)
        self._work(self._ask, client, server)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(65536):
            server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with server.makefile("rb") as messages:
            while header := messages.read(_HEADER.size):
                kind, length = _HEADER.unpack(header)
                body = messages.read(length - 4)
                if kind == b"K":
                    body = struct.pack("!I", _POOLERS_PID) + body[4:]
                if kind != b"A" or self._forwards_notifications:
                    client.sendall(header + body)
