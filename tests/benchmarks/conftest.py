"""Fixtures of the benchmarks: a server as in production, and the book of figures."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from tests.benchmarks.book import Book
from tests.benchmarks.place import PostgresPlace, SqlitePlace
from tests.databases import Database, PostgresCopies
from tests.servers.postgres import Postgres, PostgresServer

SETTINGS = {
    "shared_buffers": "512MB",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_wal_size": "4GB",
    "min_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "work_mem": "16MB",
    "maintenance_work_mem": "256MB",
    "random_page_cost": "1.1",
    "shared_preload_libraries": os.environ.get("BENCH_PRELOAD", ""),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--out", type=Path, default=None, help="a JSON file that takes the figures")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server that writes to the disk, or the one that is given."""
    if url := os.environ.get("CYCLONE_TEST_DATABASE_URL"):
        yield Postgres(url)
        return
    with PostgresServer(SETTINGS) as server:
        yield server


@pytest.fixture(scope="session")
def book(request: pytest.FixtureRequest, postgres: Postgres) -> Book:
    """Where figures go."""
    url = make_url(postgres.url("postgres")).set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False)) as connection:
        server = connection.execute("SHOW server_version").fetchone()
    assert server is not None
    versions = {"postgresql": server[0].split()[0], "sqlite": sqlite3.sqlite_version}
    return Book(request.config.getoption("--out"), versions)


@pytest.fixture
def place(postgresql_database: Database) -> Iterator[PostgresPlace]:
    """A PostgreSQL database to fill and to drain."""
    with closing(PostgresPlace(postgresql_database)) as place:
        yield place


@pytest.fixture
def other_place(postgres_copies: PostgresCopies) -> Iterator[PostgresPlace]:
    """A second one, for the same without."""
    with ExitStack() as stack:
        database = stack.enter_context(postgres_copies.lend())
        yield stack.enter_context(closing(PostgresPlace(database)))


@pytest.fixture
def sqlite_place(sqlite_database: Database) -> Iterator[SqlitePlace]:
    """A SQLite file to fill and to drain."""
    with closing(SqlitePlace(sqlite_database)) as place:
        yield place
