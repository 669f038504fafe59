"""A stand-in for a network that falls silent: it takes what is sent, and passes nothing on."""

import socket

from tests.servers.sockets import Between


class SilentProxy(Between):
    """Forwards to the server of `url`, until it is told to be silent.

    Then the system goes on to acknowledge what arrives here, so that nobody notices anything: not
    by keep-alives, nor by unacknowledged data.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._passing: set[socket.socket] = set()
        self._takes_new = True

    def hush(self, *, takes_new: bool) -> None:
        """What is connected is silent from now on; so are new ones unless it `takes_new`."""
        with self._lock:
            self._passing.clear()
            self._takes_new = takes_new

    def speak(self) -> None:
        """Let new connections through again."""
        with self._lock:
            self._takes_new = True

    def _serve(self, client: socket.socket) -> None:
        server = self._connect()
        with self._lock:
            if self._takes_new:
                self._passing |= {client, server}
        self._start(self._copy, server, client)
        self._work(self._copy, client, server)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if source in self._passing:
                target.sendall(data)
