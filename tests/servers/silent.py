"""A stand-in for a network that falls silent: it takes what is sent, and passes nothing on."""

import socket
import threading
from types import TracebackType
from typing import Self

from sqlalchemy import make_url

from tests.servers.sockets import hang_up


class SilentProxy:
    """Forwards to the server of `url`, until it is told to be silent.

    Then the system goes on to acknowledge what arrives here, so that nobody notices anything: not
    by keep-alives, nor by unacknowledged data.
    """

    def __init__(self, url: str) -> None:
        self._server = make_url(url)
        self._sockets: list[socket.socket] = []
        self._passing: set[socket.socket] = set()
        self._takes_new = True
        self._lock = threading.Lock()

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
        hang_up(self._door)
        self.hang_up()

    @property
    def url(self) -> str:
        """The URL through the proxy."""
        url = self._server.set(host="127.0.0.1", port=self._door.getsockname()[1])
        return url.render_as_string(hide_password=False)

    def hush(self, *, takes_new: bool) -> None:
        """What is connected is silent from now on; so are new ones unless it `takes_new`."""
        with self._lock:
            self._passing.clear()
            self._takes_new = takes_new

    def speak(self) -> None:
        """Let new connections through again."""
        with self._lock:
            self._takes_new = True

    def hang_up(self) -> None:
        """Close the connections that are silent or not."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
            self._passing.clear()
        for each in sockets:
            hang_up(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return  # the door is closed
            try:
                server = socket.create_connection((self._server.host, self._server.port or 5432))
            except OSError:
                client.close()
            else:
                self._join(client, server)

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._sockets += [client, server]
            if self._takes_new:
                self._passing |= {client, server}
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if source in self._passing:
                    target.sendall(data)
        except OSError:
            return  # it was hung up
        finally:
            hang_up(target)
