"""The server of the tests keeps its promises, so that a failing test can blame the product."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.servers.postgres import Postgres, PostgresServer

pytestmark = pytest.mark.postgresql


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
        states = [process.status() for process in server.processes()]
        server.thaw()
        assert len(states) > 5
        assert set(states) == {"stopped"}
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_another_kind_of_database_is_refused() -> None:
    with pytest.raises(ValueError, match="not a PostgreSQL URL"):
        Postgres("sqlite:///shop.db")
