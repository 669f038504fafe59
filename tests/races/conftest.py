"""The fixture of races: actors on a database of their own."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.databases import Database
from tests.races.actors import Race


@pytest.fixture
def race(postgresql_database: Database) -> Iterator[Race]:
    """Actors on a fresh PostgreSQL database: on SQLite there is one writer, and no race."""
    with closing(Race(postgresql_database)) as actors:
        yield actors
