"""The server of the tests keeps its promises, so that a failing test can blame the product."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.servers import binaries
from tests.servers.guard import processes_living_in
from tests.servers.postgres import Postgres, PostgresServer
from tests.waiting import wait_until

pytestmark = pytest.mark.postgresql

_CHECKOUT = Path(__file__).parents[2]
_SERVE_UNTIL_KILLED = """
import sys
from tests.servers.postgres import PostgresServer

with PostgresServer() as server:
    server.freeze()
    print(server.directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def _connect(server: PostgresServer) -> psycopg.Connection[tuple[object, ...]]:
    url = server.url("postgres").replace("+psycopg", "")
    return psycopg.connect(url, autocommit=True, connect_timeout=30)


def test_own_settings_reach_the_server() -> None:
    with PostgresServer({"max_connections": "7"}) as server, _connect(server) as connection:
        assert connection.execute("SHOW max_connections").fetchone() == ("7",)


def test_a_killed_server_comes_back_with_what_was_committed(server: PostgresServer) -> None:
    with _connect(server) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    server.start()
    with _connect(server) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_a_restart_keeps_the_port(server: PostgresServer) -> None:
    before = server.url("postgres")
    server.restart("immediate")
    assert server.url("postgres") == before
    with _connect(server) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_frozen_server_answers_after_the_thaw(server: PostgresServer) -> None:
    with _connect(server) as connection:
        server.freeze()
        states = {process.status() for process in processes_living_in(server.data)}
        server.thaw()
        assert states == {"stopped"}
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_server_dies_with_a_killed_test_process() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _SERVE_UNTIL_KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_CHECKOUT,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        directory = Path(owner.stdout.readline().strip())
        assert processes_living_in(directory)
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    wait_until(lambda: not directory.exists(), "the guard removes the directory")
    assert processes_living_in(directory) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
def test_a_wheel_that_the_account_cannot_reach_is_copied(tmp_path: Path) -> None:
    bindir = binaries.wheel_binaries()
    assert bindir is not None
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "site-packages").symlink_to(bindir.parents[2])
    hidden = closed / "site-packages" / bindir.relative_to(bindir.parents[2])
    account = binaries.Account.unprivileged()
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        copy = binaries.reachable(hidden, account, Path(directory))
        assert copy.is_relative_to(directory)
        assert account.can_run(copy / "initdb")


def test_a_missing_server_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CYCLONE_PG_BINDIR", os.fspath(tmp_path))
    with pytest.raises(RuntimeError, match="set CYCLONE_PG_BINDIR"):
        binaries.find_binaries()


def test_another_kind_of_database_is_refused() -> None:
    with pytest.raises(ValueError, match="not a PostgreSQL URL"):
        Postgres("sqlite:///shop.db")
