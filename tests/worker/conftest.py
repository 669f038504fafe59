"""Databases without our tables, on which workers are started too, processes of workers, and
asynchronous applications.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from tests.databases import Database
from tests.migrations.conftest import empty_postgresql, empty_sqlite
from tests.processes import App
from tests.worker.site import Site

__all__ = ["empty_postgresql", "empty_sqlite"]


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONE_DATABASE_URL", raising=False)


@pytest.fixture
def app(tmp_path: Path, sqlite_database: Database) -> App:
    """The application on a migrated SQLite file."""
    return App(tmp_path, sqlite_database)


@pytest.fixture(autouse=True)
def _no_line_is_mended(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Within a minute a sweep would hide that a step has left a line without its head."""
    yield
    if request.path.name != "test_sweep.py":
        said = [record.getMessage() for record in caplog.get_records("call")]
        assert not [text for text in said if "had lost its head" in text]


@pytest.fixture(
    params=[
        pytest.param(("postgresql", "asyncpg"), id="asyncpg", marks=pytest.mark.postgresql),
        pytest.param(("postgresql", "psycopg"), id="psycopg", marks=pytest.mark.postgresql),
        pytest.param(("sqlite", "aiosqlite"), id="aiosqlite", marks=pytest.mark.sqlite),
    ]
)
def bare_async_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """An application with asynchronous sessions, on each driver; it has no tables yet."""
    dialect, driver = request.param
    database: Database = request.getfixturevalue(f"{dialect}_database")
    site = Site(database)
    engine = create_async_engine(database.url_for(driver))
    site.cyclone.database = async_sessionmaker(engine)
    yield site
    engine.sync_engine.dispose()
