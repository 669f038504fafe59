"""What stands in for a network: a door between clients and a real server."""

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from sqlalchemy import make_url


def hang_up(each: socket.socket) -> None:
    """Close it, and end whatever waits on it in another thread."""
    _end(each)
    each.close()


def _end(each: socket.socket) -> None:
    """Whoever waits on it is told, and closes it."""
    with suppress(OSError):  # the other side was faster
        each.shutdown(socket.SHUT_RDWR)


class Between(ABC):
    """Listens in the place of the server of `url`, and serves each client in a thread."""

    def __init__(self, url: str) -> None:
        self._server = make_url(url)
        self._lock = threading.Lock()
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
        hang_up(self._door)
        self.hang_up()

    @property
    def url(self) -> str:
        """The URL through the door."""
        url = self._server.set(host="127.0.0.1", port=self._door.getsockname()[1])
        url = url.update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        return url.render_as_string(hide_password=False)

    def hang_up(self) -> None:
        """End every connection, on both sides; the threads that serve them close them."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            _end(each)

    @abstractmethod
    def _serve(self, client: socket.socket) -> None:
        """Be the server for a client; an error of a socket ends it."""

    def _connect(self) -> socket.socket:
        server = socket.create_connection((self._server.host, self._server.port or 5432))
        self._keep(server)
        return server

    def _keep(self, each: socket.socket) -> None:
        # Without waiting for the other side, which waits for more: 40 ms for each small message.
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets.append(each)

    def _accept(self) -> None:
        while True:
            client, _ = self._door.accept()
            self._keep(client)
            self._start(self._serve, client)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=self._work, args=(work, *args), daemon=True).start()

    def _work(self, work: Callable[..., None], *args: Any) -> None:
        """Until one side of it hangs up; then both have."""
        try:
            work(*args)
        except (OSError, EOFError):
            return
        finally:
            for each in args:
                if isinstance(each, socket.socket):
                    hang_up(each)
