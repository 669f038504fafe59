"""Fixtures of all tests: a server, and for each test a fresh database with our tables.

`database` runs a test once on PostgreSQL and once on SQLite; `postgresql_database` and
`sqlite_database` are the single ones.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.databases import (
    Database,
    PostgresCopies,
    postgresql_copy,
    postgresql_template,
    sqlite_copy,
    sqlite_template,
)
from tests.servers.postgres import Postgres, PostgresServer
from tests.shop import Shop

pytest.register_assert_rewrite("cyclone_sqla.testing.conformance")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server that all tests share: `CYCLONE_TEST_DATABASE_URL`, or one of our own."""
    if url := os.environ.get("CYCLONE_TEST_DATABASE_URL"):
        yield Postgres(url)
        return
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: Postgres) -> Iterator[str]:
    """The name of a database with our tables, to be copied."""
    with postgresql_template(postgres) as name:
        yield name


@pytest.fixture(scope="session")
def postgres_copies(postgres: Postgres, postgres_template: str) -> PostgresCopies:
    """Where `postgresql_database` gets its databases."""
    return PostgresCopies(postgres, postgres_template)


@pytest.fixture
def postgresql_database(postgres_copies: PostgresCopies) -> Iterator[Database]:
    """A PostgreSQL database that is as good as fresh."""
    with postgres_copies.lend() as database:
        yield database


@pytest.fixture(scope="session")
def sqlite_template_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `sqlite_database` copies."""
    return sqlite_template(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture
def sqlite_database(sqlite_template_file: Path, tmp_path: Path) -> Iterator[Database]:
    """A fresh SQLite database file."""
    with sqlite_copy(sqlite_template_file, tmp_path) as database:
        yield database


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("sqlite", marks=pytest.mark.sqlite),
    ]
)
def database(request: pytest.FixtureRequest) -> Database:
    """A fresh database, once of each kind."""
    fresh: Database = request.getfixturevalue(f"{request.param}_database")
    return fresh


@pytest.fixture(scope="session")
def cyclone_database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tests with the fixtures of the pytest plugin run: in memory, or see `on_both`."""
    if getattr(request, "param", "sqlite") == "sqlite":
        yield "sqlite://"
        return
    server, template = map(request.getfixturevalue, ("postgres", "postgres_template"))
    with postgresql_copy(server, template) as database:
        yield database.url


@pytest.fixture
def shop(database: Database) -> Shop:
    """An application on a fresh database, once on each kind."""
    return Shop(database)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask for one kind of database themselves."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"the name is another one in every process: {item.nodeid}")
        names = getattr(item, "fixturenames", ())
        if "postgres" in names:
            item.add_marker(pytest.mark.postgresql)
        if "sqlite_template_file" in names:
            item.add_marker(pytest.mark.sqlite)
