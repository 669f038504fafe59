"""Databases without our tables."""

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.databases import Database
from tests.servers.postgres import Postgres


@pytest.fixture
def empty_postgresql(postgres: Postgres) -> Iterator[Database]:
    """A PostgreSQL database with nothing in it."""
    name = f"cyclone_empty_{uuid.uuid4().hex[:12]}"
    postgres.create_database(name)
    try:
        with closing(Database(postgres.url(name))) as database:
            yield database
    finally:
        postgres.drop_database(name)


@pytest.fixture
def empty_sqlite(tmp_path: Path) -> Iterator[Database]:
    """The URL of a SQLite file that doesn't exist yet."""
    with closing(Database(f"sqlite:///{tmp_path / 'empty.db'}")) as database:
        yield database


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("sqlite", marks=pytest.mark.sqlite),
    ]
)
def empty_database(request: pytest.FixtureRequest) -> Database:
    """A database with nothing in it, once of each kind."""
    empty: Database = request.getfixturevalue(f"empty_{request.param}")
    return empty
