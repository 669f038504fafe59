"""The fixtures of a job's life: direct hands on a queue, and where the contract is tried."""

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.databases import Database
from tests.life.hands import Hands
from tests.servers.postgres import Postgres


@pytest.fixture
def hands(database: Database) -> Iterator[Hands]:
    """A queue on a fresh database, once of each kind, and a clock that is moved by hand."""
    with closing(Hands(database)) as direct:
        yield direct


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("sqlite", marks=pytest.mark.sqlite),
    ],
)
def cyclone_database_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A database without our tables, once of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('contract')}/cyclone.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = f"cyclone_contract_{uuid.uuid4().hex[:12]}"
    server.create_database(name)
    yield server.url(name)
    server.drop_database(name)
