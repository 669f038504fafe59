"""A stand-in for a connection pooler: what a client sees of one, between it and a real server."""

import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sqlalchemy import make_url

from tests.servers.sockets import hang_up

_POOLERS_PID = 4_242_424
_HEADER = struct.Struct("!cI")


class Pooler:
    """Forwards to the server of `url`; tells clients a process id of its own, as poolers do.

    With `forwards_notifications=False` it behaves like one in transaction mode: LISTEN succeeds and
    nothing is ever heard.
    """

    def __init__(self, url: str, *, forwards_notifications: bool) -> None:
        self._server = make_url(url)
        self._forwards_notifications = forwards_notifications
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in [self._door, *self._sockets]:
            hang_up(each)

    @property
    def url(self) -> str:
        """The URL through the pooler."""
        url = self._server.set(host="127.0.0.1", port=self._door.getsockname()[1])
        url = url.update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        return url.render_as_string(hide_password=False)

    def _accept(self) -> None:
        while True:
            client, _ = self._door.accept()
            server = socket.create_connection((self._server.host, self._server.port or 5432))
            self._sockets += [client, server]
            self._start(lambda c=client, s=server: _copy(c, s))
            self._start(lambda c=client, s=server: self._answer(s, c))

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with server.makefile("rb") as messages:
            while header := messages.read(_HEADER.size):
                kind, length = _HEADER.unpack(header)
                body = messages.read(length - 4)
                if kind == b"K":
                    body = struct.pack("!I", _POOLERS_PID) + body[4:]
                if kind != b"A" or self._forwards_notifications:
                    client.sendall(header + body)
        hang_up(client)

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=_until_hung_up, args=(work,), daemon=True).start()


def _until_hung_up(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError:
        return


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    hang_up(target)
