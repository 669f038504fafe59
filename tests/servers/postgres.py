"""A PostgreSQL for the tests: one that they start themselves, or one that they are given."""

import random
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping

import psutil
import psycopg
from psycopg import sql
from sqlalchemy import make_url

from cyclone_sqla.testing.postgresql.server import TemporaryPostgres
from tests.waiting import wait_until

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "shared_buffers": "128MB",
}

ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""What ends a process for us: the one that would bury it may be stopped itself."""

HALTED = (psutil.STATUS_STOPPED, *ENDED)


class Postgres:
    """A server that is reached through a URL: databases are created and dropped there."""

    def __init__(self, url: str) -> None:
        """Take the `url` of any database of the server, with a role that may create databases."""
        self._url = make_url(url)
        if self._url.get_backend_name() != "postgresql":
            raise ValueError(f"not a PostgreSQL URL: {self._url!r}")

    def url(self, database: str, driver: str = "psycopg") -> str:
        """The SQLAlchemy URL of `database`, password included, for `driver`."""
        url = self._url.set(drivername=f"postgresql+{driver}", database=database)
        return url.render_as_string(hide_password=False)

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create the database `name`, as a copy of `template` where one is given."""
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        with self._connect() as connection:
            if template is not None and connection.info.server_version >= 150_000:
                # Of a small template and without fsync, twice as fast as through the log.
                statement += sql.SQL(" STRATEGY FILE_COPY")
            connection.execute(statement)

    def close_database(self, name: str) -> None:
        """Let nobody connect to the database `name`: a template must have no sessions."""
        statement = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false")
        self._execute(statement.format(sql.Identifier(name)))

    def drop_database(self, name: str) -> None:
        """Drop the database `name` if it exists, and end its sessions."""
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
        self._execute(statement.format(sql.Identifier(name)))

    def _execute(self, statement: sql.Composed) -> None:
        with self._connect() as connection:
            connection.execute(statement)

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=True)


class PostgresServer(Postgres, TemporaryPostgres):
    """A private server in a temporary directory, on a free port of 127.0.0.1, to break and mend.

        with PostgresServer() as server:
            server.create_database("shop")

    Nothing of it is left when the block or the test process ends, however it ends. Every method
    waits until what it says is true.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """Take `settings` of `postgresql.conf`, which are added to the fast defaults."""
        self.port = _free_port()
        Postgres.__init__(self, f"postgresql://postgres@127.0.0.1:{self.port}/postgres")
        own = {**_SETTINGS, **(settings or {}), "port": str(self.port)}
        TemporaryPostgres.__init__(self, own)

    def start(self) -> None:
        """Start the server; it has been stopped or killed before."""
        self._start()

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: "smart" waits for sessions, "fast" ends them, "immediate" crashes."""
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        process = self._running()
        process.send_signal(signals[mode])
        process.wait(timeout=60)

    def restart(self, mode: str = "fast") -> None:
        """Stop and start again, on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill all the server's processes at once; `start` then recovers from the log."""
        server = self._running()
        killed = self._send_all(signal.SIGKILL)
        wait_until(lambda: all(_is(ENDED, process) for process in killed), "PostgreSQL is dead")
        server.wait()

    def freeze(self) -> None:
        """Stop all its processes where they are: connections stay open, nothing answers."""
        frozen = self._send_all(signal.SIGSTOP)
        wait_until(lambda: all(_is(HALTED, process) for process in frozen), "PostgreSQL is frozen")

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._send_all(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """Those of the server, its own first."""
        server = psutil.Process(self._running().pid)
        return [server, *server.children(recursive=True)]

    def _send_all(self, number: signal.Signals) -> list[psutil.Process]:
        """Send a signal to all its processes; return them."""
        self._running().send_signal(signal.SIGSTOP)  # so that it makes no more children meanwhile
        processes = self.processes()
        for process in reversed(processes):
            _send(process, number)
        return processes

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the server isn't running; call start() first")
        return self._process


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _is(states: Collection[str], process: psutil.Process) -> bool:
    try:
        return process.status() in states
    except psutil.NoSuchProcess:
        return True


def _free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections are given: one of these
    could take it while the server restarts."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
