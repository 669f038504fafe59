"""`cyclone-sqla migrate` in processes of their own, made quickly: the imports happen once."""

import multiprocessing
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from sqlalchemy import make_url

from cyclone_sqla.cli import main
from tests.databases import Database
from tests.waiting import wait_until

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["cyclone_sqla.cli.migrate", "cyclone_sqla.migrations"])


def migrate(url: str, output: Path) -> None:
    """Run the command; this process ends with its exit code."""
    with output.open("w") as sys.stdout:
        sys.stderr = sys.stdout
        main(["migrate", "--database-url", url, "--lock-timeout", "3600"])


class Migration:
    """A process that runs `cyclone-sqla migrate` on a database."""

    def __init__(self, database: Database, output: Path) -> None:
        self._url, self._output = make_url(database.url), output
        self._process: BaseProcess = _processes.Process(target=migrate, args=(database.url, output))
        self._process.start()

    def is_connected(self) -> bool:
        """Whether it has reached the database."""
        process = psutil.Process(self._process.pid)
        if self._url.get_backend_name() == "sqlite":
            file = os.path.realpath(str(self._url.database))
            return any(opened.path == file for opened in process.open_files())
        connections = process.net_connections()
        return any(c.raddr and c.raddr.port == self._url.port for c in connections)

    def is_over(self) -> bool:
        """Whether the process has ended."""
        return not self._process.is_alive()

    def result(self) -> str:
        """What it printed, when it has ended; fails if it failed."""
        self._process.join(60)
        printed = self._output.read_text()
        assert self._process.exitcode == 0, printed
        return printed

    def close(self) -> None:
        """End it if it is still there."""
        self._process.kill()
        self._process.join()


@contextmanager
def five_migrations(database: Database, directory: Path) -> Generator[list[Migration]]:
    """Five of them, started at once."""
    processes = [Migration(database, directory / f"output-{number}") for number in range(5)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


@contextmanager
def five_that_wait(database: Database, directory: Path) -> Generator[list[Migration]]:
    """Five of them, all at the door of a database that somebody else is migrating."""
    with five_migrations(database, directory) as processes:
        for process in processes:
            wait_until(process.is_connected, "a migration has reached the database")
        assert not any(process.is_over() for process in processes)
        yield processes
