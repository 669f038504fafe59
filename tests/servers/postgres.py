"""A PostgreSQL for the tests: one that they start themselves, or one that they are given."""

import os
import random
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import psycopg
from psycopg import sql
from sqlalchemy import make_url

from tests.servers.binaries import Account, find_binaries, reachable
from tests.servers.guard import Guard, kill_all, send_all
from tests.waiting import wait_until

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "max_prepared_transactions": "10",  # for two-phase commits
    "fsync": "off",  # the machine doesn't lose power in a test; a killed server recovers without it
    "shared_buffers": "128MB",
    "timezone": "UTC",
}


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


class PostgresServer(Postgres):
    """A private server in a temporary directory, on a free port of 127.0.0.1.

        with PostgresServer() as server:
            server.create_database("shop")

    Nothing of it is left when the block or the test process ends, however it ends. Every method
    waits until what it says is true.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """Take `settings` of `postgresql.conf`, which are added to the fast defaults."""
        self.port = _free_port()
        super().__init__(f"postgresql://postgres@127.0.0.1:{self.port}/postgres")
        self._settings = {**_SETTINGS, **(settings or {}), "port": str(self.port)}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        bindir = find_binaries()
        self._make_directory()
        try:
            self._bindir = reachable(bindir, self._account, self.directory)
            self._initialise()
            self.start()
        except BaseException:
            self._guard.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.release()
        if self._process is not None:
            self._process.wait()

    def start(self) -> None:
        """Start the server; it has been stopped or killed before.

        Raises:
            RuntimeError: it doesn't start; the message holds the server's log.
        """
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [self._bindir / "postgres", "-D", self.data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,
                **self._account.run_as,
            )
        wait_until(self._is_ready, "PostgreSQL is ready", within=60)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: "smart" waits for sessions, "fast" ends them, "immediate" crashes."""
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        process = self._running()
        process.send_signal(signals[mode])
        process.wait(timeout=60)
        self._process = None

    def restart(self, mode: str = "fast") -> None:
        """Stop and start again, on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill all the server's processes at once; `start` then recovers from the log."""
        self._running().kill()
        kill_all(self.data)
        self._running().wait()
        self._process = None

    def freeze(self) -> None:
        """Stop all its processes where they are: connections stay open, nothing answers."""
        self._running().send_signal(signal.SIGSTOP)  # first, so that it makes no more children
        frozen = send_all(self.data, signal.SIGSTOP)
        wait_until(lambda: all(_is_stopped(process) for process in frozen), "PostgreSQL is frozen")

    def thaw(self) -> None:
        """Let a frozen server go on."""
        send_all(self.data, signal.SIGCONT)

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self.directory / "log"

    def _make_directory(self) -> None:
        # Not below TMPDIR: the path of a Unix socket holds 107 bytes, and the account of the server
        # must reach it.
        self.directory = Path(tempfile.mkdtemp(prefix="cyclone-pg-", dir="/tmp"))
        self._guard = Guard(self.directory)
        self._account = Account.unprivileged()
        self._account.own(self.directory)

    def _initialise(self) -> None:
        subprocess.run(
            [self._bindir / "initdb", "-D", self.data, *_INITDB_OPTIONS],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.directory,
            env=_environment(),
            **self._account.run_as,
        )
        settings = {**self._settings, "unix_socket_directories": str(self.directory)}
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _is_ready(self) -> bool:
        if self._running().poll() is not None:
            raise RuntimeError(f"PostgreSQL didn't start:\n{self.log_path.read_text()}")
        lines = _read_lines(self.data / "postmaster.pid")
        # A killed server leaves its file behind, "ready" and all.
        ours = lines[:1] == [str(self._running().pid)]
        return ours and len(lines) > _STATUS_LINE and lines[_STATUS_LINE].strip() == "ready"

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("the server isn't running; call start() first")
        return self._process


_INITDB_OPTIONS = (
    "--username=postgres",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--no-sync",
)
_STATUS_LINE = 7  # of postmaster.pid, counted from 0: starting, standby, ready or stopping


def _is_stopped(process: psutil.Process) -> bool:
    """Or at its end: the process that would bury it is stopped itself."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections are given: one of these
    could take it while the server restarts."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
