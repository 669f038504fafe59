"""Databases that the tests of a module share, because they are many, and doors into them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.binding.doors import KINDS, SQLITE_DRIVERS, Door, drivers
from tests.databases import postgresql_copy, sqlite_copy
from tests.servers.postgres import Postgres
from tests.shop import Shop


@pytest.fixture(scope="module")
def shared_postgresql(postgres: Postgres, postgres_template: str) -> Iterator[Shop]:
    """An application on PostgreSQL."""
    with postgresql_copy(postgres, postgres_template) as database:
        yield Shop(database, hints=True)


@pytest.fixture(scope="module")
def shared_sqlite(
    sqlite_template_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """An application on SQLite."""
    with sqlite_copy(sqlite_template_file, tmp_path_factory.mktemp("shared")) as database:
        yield Shop(database, hints=True)


@pytest.fixture(params=drivers(*KINDS))
def driver(request: pytest.FixtureRequest) -> str:
    """Each driver."""
    name: str = request.param
    return name


@pytest.fixture
def shop(request: pytest.FixtureRequest, driver: str) -> Iterator[Shop]:
    """The application on the driver's database; its rows are deleted after the test."""
    kind = "sqlite" if driver in SQLITE_DRIVERS else "postgresql"
    shop: Shop = request.getfixturevalue(f"shared_{kind}")
    yield shop
    shop.clear()


@pytest.fixture(params=range(3))
def door(request: pytest.FixtureRequest, shop: Shop, driver: str) -> Door:
    """Each kind of target on each driver."""
    return Door(shop.database, driver, KINDS[driver][request.param])
